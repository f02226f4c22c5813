"""Time, memory and layout copies of attention and models, for `vil benchmark` and `vil analyze`."""
