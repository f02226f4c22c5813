"""C++ code for CPUs, compiled at first use: local attention, and the MLP of a transformer block.

library.py compiles and loads the code. library.cpp has the functions that Python calls.
For attention, attention.h divides a call into tasks (task.h), which threads run (threads.h).
forward.h and backward.h have the two passes, window.h has the keys of a chunk in a window or a
layout, and bias.h has their bias and mask.
For the MLP, mlp.h computes the layers, with weights packed by panels.h.
Attention and MLP use gemm.h for matmuls, softmax.h for exponentials, and pack.h for copies.
"""
