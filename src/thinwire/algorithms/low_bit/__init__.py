"""Quantization: bit packing, codes of blocks with scales, and averaging them."""
