"""The name in torch's `debugging_hooks`; `thinwire.hooks` says what it does."""

from thinwire.hooks import noop_hook

__all__ = ["noop_hook"]
