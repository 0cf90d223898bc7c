"""The arithmetic of low-rank steps, behind one protocol.

`matrices` is what it works on, `base` the protocol, `dispatch` picks what serves: `torch_kernels` everything,
`numba/` fp32 and small matrix ranks on one thread of the CPU. Algorithms call `dispatch` only.
"""
