"""The arithmetic of small matrix ranks on one thread of the CPU, compiled by Numba."""

from thinwire.algorithms.compiled.bases import orthonormal_rows
from thinwire.algorithms.compiled.compiler import FACTOR_ROWS
from thinwire.algorithms.compiled.passes import products, projections, settle

__all__ = ["FACTOR_ROWS", "orthonormal_rows", "products", "projections", "settle"]
