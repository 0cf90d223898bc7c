"""Moved."""

from processes import Process, context, enter, modules, process

__all__ = ["Process", "context", "enter", "modules", "process"]
