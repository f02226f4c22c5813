"""C++ code for CPUs, compiled at first use: local attention, linear layers and MLPs.

library.py compiles and loads the code. library.cpp has the functions that Python calls.
For attention, attention.h divides a call into tasks (task.h), which threads run (threads.h).
forward.h and backward.h have the two passes, window.h has the keys of a chunk in a window or a
layout, and bias.h has their bias and mask. globals.h has the attention of global tokens.
linear.h computes a linear layer and mlp.h a layer norm and an MLP, with weights packed by panels.h.
All use gemm.h for matmuls, softmax.h for exponentials, and pack.h for copies.
"""
