"""C++ code for CPUs: local attention, linear layers and MLPs.

build.py compiles the code, for a wheel or at first use, and library.py loads it. library.cpp
defines the functions that Python calls.

Local attention: attention.h divides a call into tasks for threads (task.h, threads.h). forward.h
and backward.h compute the passes, window.h the keys of each chunk, bias.h the bias and the mask,
and globals.h the attention of global tokens.

Other layers: linear.h has a linear layer, mlp.h a layer norm and MLP, and panels.h packed weights.

Shared code: gemm.h and amx.h for matmuls, softmax.h for exponentials, gelu.h, norm.h, and pack.h
for copies.
"""
