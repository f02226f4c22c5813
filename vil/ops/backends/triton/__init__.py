"""Triton kernels of local attention, and the backend that launches them."""
