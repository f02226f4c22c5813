"""Measure every backend on a case, and keep the fastest."""
