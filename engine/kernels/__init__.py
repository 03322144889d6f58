"""Triton kernels of the GPU path: one module a kernel, each with the function that launches it.

Kernels compute in float32 whatever they read and write, round once, and read no key, value or
row that a mask hides. Tiles and head dimensions are powers of two; what lies beyond the real
size is masked. Rows that pad a step have slot -1 and length 0: nothing is read or written for
them but zeros in the output.
"""
