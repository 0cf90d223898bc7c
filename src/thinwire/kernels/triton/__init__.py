"""Kernels written in Triton: for accelerators that it compiles for, in fp32, fp16 and bf16.

Each serves all tensors of a bucket, or of all buckets, by one launch. Tiles are of fixed sizes, sums have one
order, and nothing is added atomically: the same input gives the same bits in every run.
"""
