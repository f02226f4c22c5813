"""C++ code for CPUs, compiled at first use: local attention, and the MLP of a transformer block.

library.py compiles and loads the code. library.cpp has the functions that Python calls.
attention.h divides an attention call into tasks for threads (threads.h), and task.h defines a task.
forward.h and backward.h have the two passes, window.h has the keys of a chunk in a window or a
layout, and bias.h has their bias and mask.
mlp.h computes an MLP, with weights from panels.h.
Both use gemm.h for multiplications, softmax.h for exponentials, and pack.h for copies.
"""
