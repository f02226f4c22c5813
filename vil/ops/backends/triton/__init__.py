"""The Triton kernels: forward, backward, and the backend that joins them."""
