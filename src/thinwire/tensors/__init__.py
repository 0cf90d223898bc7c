"""Shapes, layouts and packings of tensors: what kernels and algorithms share. Imports neither."""
