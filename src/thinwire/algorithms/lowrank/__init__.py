"""PowerSGD and its kin: what is sent is the two factors of a low-rank approximation."""
