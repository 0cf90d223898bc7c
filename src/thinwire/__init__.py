"""Thinwire: data-parallel PyTorch training over slow networks."""
