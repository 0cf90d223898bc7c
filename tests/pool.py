"""Moved."""

from processes import Pool, WorkerFailed, in_each_process
from processes import Spawn as Pools
from training import are_alike, gathered

__all__ = ["Pool", "Pools", "WorkerFailed", "are_alike", "gathered", "in_each_process"]
