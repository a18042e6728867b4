"""Writing and reading of run folders: checkpoints, clients' states, metrics, discoveries, weights."""
