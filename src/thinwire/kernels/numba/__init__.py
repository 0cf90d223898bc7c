"""Arithmetic on the CPU, compiled by Numba. `tables` is the backend; importing it imports Numba."""
