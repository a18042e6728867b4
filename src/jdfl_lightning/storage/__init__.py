"""What a run leaves on disk, written and read: checkpoints, clients' states, metrics, discoveries, weights."""
