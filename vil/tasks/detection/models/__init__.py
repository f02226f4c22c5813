"""Detectors: backbone, feature pyramid, heads, weights."""
