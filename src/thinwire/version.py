"""The version, once: the package's metadata is made from it, and processes compare it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
