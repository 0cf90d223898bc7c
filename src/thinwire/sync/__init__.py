"""The layer between adapters and transports: buckets, steps, state, and the user's handle."""

from thinwire.sync.engine import Engine
from thinwire.sync.handle import GradientSync, Handle, Synced, attached, engine_of, handle_of
from thinwire.sync.settings import Settings

__all__ = ["Engine", "GradientSync", "Handle", "Settings", "Synced", "attached", "engine_of", "handle_of"]
