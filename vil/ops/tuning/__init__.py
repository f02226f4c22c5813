"""Measure the backends on a case and store the fastest."""
