"""Averaging less often: local SGD, post-local SGD, hierarchical averaging and DiLoCo.

```
optimizer.step()                    training_loop: a hook calls the averager after each step
 └ ModelAverager._after_step        averager: counts the step; when the schedule says so:
    ├ membership.start              finds the members and compares their statuses
    │  └ ModelChanges.send          the change since the last average, scaled, to an engine: a PendingAverage
    ├ membership.advance            with fixed members and a delay: sends later rounds during training
    └ membership.finish             waits for the means
       └ ModelChanges.apply         outer step on the last averages; the model is set to them
```

`LocalSGD` (local_sgd.py) has a `StaticMembership`: a group that never changes. `elastic.LocalSGD` and
`elastic.Steps` (elastic_members.py, steps.py) have an `ElasticMembership`: the members that are present. It
averages the tensors of an `ElasticContributor`: a model's changes, or one step's gradients. A `Group`
(groups/) finds the members; a `MachineGroup` makes several processes one member.
"""

from thinwire.local_sgd.local_sgd import DiLoCo, LocalSGD
from thinwire.local_sgd.outer import Nesterov
from thinwire.local_sgd.schedule import Streaming, Warmup

__all__ = ["DiLoCo", "LocalSGD", "Nesterov", "Streaming", "Warmup"]
