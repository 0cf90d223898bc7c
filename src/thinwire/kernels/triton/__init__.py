"""Kernels written in Triton: for accelerators that it compiles for, in fp32, fp16 and bf16.

Each serves all tensors of a bucket, or of all buckets, with one launch. Tiles have fixed sizes, sums a fixed
order, and nothing is added atomically: the same input gives the same bits in every run.
"""
