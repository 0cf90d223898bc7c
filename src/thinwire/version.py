"""The version, once: the package's metadata is made from it, and processes compare it."""

__version__ = "0.3.0.dev0"
