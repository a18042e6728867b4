"""What is done with many runs, or with finished ones: suites, sweeps over Phase 1, tests and predictions."""
