"""The names in torch's `powerSGD_hook`; `thinwire.hooks` says what each does."""

from thinwire.hooks import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
