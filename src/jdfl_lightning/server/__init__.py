"""The server's side of a run: Algorithm 1 of the paper, its rounds, which answers count, and how a run is resumed."""
