"""Weights: files, loading, conversion, names, the Hub."""
