"""What compiled arithmetic serves, known without importing Numba."""

# As many as a factor has at most: the largest matrix rank that is served.
FACTOR_ROWS = 4
