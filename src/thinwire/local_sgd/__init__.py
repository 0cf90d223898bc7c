"""Averaging less often: local SGD, post-local SGD, hierarchical averaging and DiLoCo.

`front` is the object users see: schedule, entry and exit, state. `averager` does one averaging of a
`replica` (the model's tensors, and what they were after the last one), after a `roll_call` of all
processes. `steps` counts attempted steps, `gradients` says over which group a DDP model averages its
gradients, `outer` makes the outer optimizer, `uneven` is for join contexts, and `checks` refuses what
can't work.
"""

from thinwire.local_sgd.front import LocalSGD

__all__ = ["LocalSGD"]
