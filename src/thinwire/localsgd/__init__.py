"""Averaging less often: local SGD, post-local SGD, hierarchical averaging and DiLoCo.

`local_sgd` is what users enter, or `diloco`, and `settings` what they give it. `model` is their model, and
`averaged` what of it is averaged; `division` makes fragments of that; a `fragment` is a slice of the model
with its last average. `schedule` says when what is averaged over whom. `averagings` does it: it asks all
members for a `consensus`, sends changes as a `flight`, and moves fragments, with an `outer` optimizer if
there is one. `loop` is what hangs on the user's optimizer and DDP model, `replica` what a process holds of
it, `state` what is saved.
"""

from thinwire.localsgd.local_sgd import DiLoCo, LocalSGD
from thinwire.localsgd.settings import Nesterov, Streaming, Warmup

__all__ = ["DiLoCo", "LocalSGD", "Nesterov", "Streaming", "Warmup"]
