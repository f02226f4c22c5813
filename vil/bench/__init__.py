"""Measure time, memory and layout copies of models, for `vil benchmark` and `vil analyze`."""
