"""What compiled arithmetic serves, known without importing Numba."""

__all__ = ["FACTOR_ROWS"]

# As many as a factor has at most: the largest matrix rank that is served.
FACTOR_ROWS = 4
