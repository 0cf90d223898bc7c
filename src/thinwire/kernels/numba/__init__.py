"""The arithmetic of small matrix ranks on one thread of the CPU, compiled by Numba.

`numba_kernels` is the backend; nothing of Numba is imported before that is.
"""
