"""The version: the package's metadata uses it, and processes compare it."""

__version__ = "0.3.0.dev0"
