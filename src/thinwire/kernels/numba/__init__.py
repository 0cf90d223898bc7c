"""Arithmetic on the CPU, compiled by Numba. `tables` is the backend: until it is imported, Numba is not."""
