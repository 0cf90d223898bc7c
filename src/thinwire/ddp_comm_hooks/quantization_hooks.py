"""The names in torch's `quantization_hooks`; `thinwire.hooks` says what each does."""

from thinwire.hooks import quantization_perchannel_hook, quantization_pertensor_hook

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]
