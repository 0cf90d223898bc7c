"""Shapes, layouts and packing of tensors, shared by kernels and algorithms. Imports neither."""
