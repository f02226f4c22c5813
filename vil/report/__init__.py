"""Plots and pages of runs and benchmarks."""
