"""The layer between adapters and transports: buckets, steps, state, and the user's handle."""

from thinwire.sync.engine import Engine
from thinwire.sync.handle import GradientSync, Synced, attached, counter_of, engine_of
from thinwire.sync.settings import Settings

__all__ = ["Engine", "GradientSync", "Settings", "Synced", "attached", "counter_of", "engine_of"]
