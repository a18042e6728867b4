"""Studies over many or finished runs: suites, sweeps over Phase 1, tests and predictions."""
