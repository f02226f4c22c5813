"""C++ code for CPUs, compiled at first use: local attention, linear layers and MLPs.

library.py compiles and loads the code. library.cpp defines the functions that Python calls.

Local attention: attention.h divides a call into tasks (task.h), which threads run (threads.h).
forward.h and backward.h compute the two passes. window.h finds the keys of each chunk, and bias.h
adds the bias and the mask to their scores. globals.h computes the attention of global tokens.

Other layers: linear.h computes a linear layer, mlp.h a layer norm and an MLP, and patches.h a patch
embedding. panels.h packs their weights.

All of them use gemm.h for matmuls, softmax.h for exponentials, and pack.h for copies.
"""
