"""Benchmarks of models and of attention backends, for `vil benchmark` and `vil analyze`."""
