"""Measure all attention backends on a case, and store the fastest."""
