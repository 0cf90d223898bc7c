"""PowerSGD and related algorithms, which send the two factors of a low-rank approximation."""
