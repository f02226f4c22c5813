"""Helpers of the detection tests."""
