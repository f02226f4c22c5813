"""Measure the backends of attention, linear layers and MLPs, and store the fastest."""
