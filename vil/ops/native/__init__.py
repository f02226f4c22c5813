"""C++ for CPUs that is compiled at the first use: local attention, and the MLP of a block.

library.py compiles and loads it, library.cpp has the functions that Python calls. attention.h
divides a call of attention into tasks for threads (threads.h), task.h says what a task does,
forward.h and backward.h have the two passes, window.h the keys of a chunk in a window or a layout,
and bias.h their bias and mask. mlp.h computes an MLP, with weights from panels.h. Both use gemm.h
for multiplications, softmax.h for exponentials, and pack.h for copies.
"""
