"""Runs in real processes, and the faults that are injected into them."""
