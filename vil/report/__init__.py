"""Plots and HTML pages of runs and benchmarks."""
