"""Measure all backends on a case, and store the fastest."""
