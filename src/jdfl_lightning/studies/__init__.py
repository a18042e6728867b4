"""What Python users and commands call: a run, Phase 1 alone, suites, sweeps over Phase 1, evaluation, predictions."""
