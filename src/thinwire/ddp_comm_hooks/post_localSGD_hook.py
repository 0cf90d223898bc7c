"""The names in torch's `post_localSGD_hook`; `thinwire.hooks` says what each does."""

from thinwire.hooks import PostLocalSGDState, post_localSGD_hook

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]
