"""The server side of a run: the paper's Algorithm 1, its rounds, screening of client answers, and resuming."""
