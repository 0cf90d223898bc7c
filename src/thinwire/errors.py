"""Everything Thinwire raises on purpose, as one small tree.

```
ThinwireError
├── ConfigError           (also a ValueError)    an argument is wrong
├── AttachError           (also a RuntimeError)  this model or process group can't be attached
├── AgreementError        (also a RuntimeError)  the processes are configured differently
├── GradientError         (also a TypeError)     a gradient of a kind that can't be averaged
├── StateError            (also a ValueError)    a state dict does not fit
├── CheckpointError       (also an OSError)      a checkpoint can't be written; the cause is attached
├── NonfiniteError        (also a FloatingPointError)  gradients are not finite, and on_nonfinite="raise"
├── StepError             (also a RuntimeError)  start and finish were called out of order
├── CommunicationError    (also a RuntimeError)  a collective failed; the backend's error is the cause
├── LeftError             (also a RuntimeError)  this member has left its elastic group, as asked
└── MissingExtraError     (also an ImportError)  an optional package is not installed
```

Each message says what Thinwire got, what it expected, and what to do.
"""

from __future__ import annotations

__all__ = [
    "AgreementError",
    "AttachError",
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "GradientError",
    "LeftError",
    "MissingExtraError",
    "NonfiniteError",
    "StateError",
    "StepError",
    "ThinwireError",
]


class ThinwireError(Exception):
    """The root of the tree: `except ThinwireError` catches all that Thinwire raises on purpose."""


class ConfigError(ThinwireError, ValueError):
    """An argument has the wrong type or an impossible value. Nothing was changed."""


class AttachError(ThinwireError, RuntimeError):
    """This model or process group can't be attached. Nothing was changed."""


class AgreementError(ThinwireError, RuntimeError):
    """The processes are configured differently; raised on all of them. Nothing was changed."""


class GradientError(ThinwireError, TypeError):
    """A gradient is of a kind that the algorithm can't average, such as a sparse one."""


class StateError(ThinwireError, ValueError):
    """A state dict belongs to a different model or version. Nothing was loaded."""


class CheckpointError(ThinwireError, OSError):
    """A checkpoint can't be written: a full disk, no permission. An existing file stays as it was."""


class NonfiniteError(ThinwireError, FloatingPointError):
    """Gradients are not finite, and `on_nonfinite="raise"`. All processes raise it; memory is as before."""


class StepError(ThinwireError, RuntimeError):
    """A step was started, finished or switched out of order. The memory is as before the step."""


class CommunicationError(ThinwireError, RuntimeError):
    """A collective failed. The backend's own error is attached as the cause; the memory is as before.

    One exception: with several processes per machine, the last intra-node message may fail. The memory then
    holds a step whose gradients never arrived; `state_dict()` and new steps raise until a state is loaded.
    """


class LeftError(ThinwireError, RuntimeError):
    """This member has left its elastic group, as requested. The adapter's context manager catches it."""


class MissingExtraError(ThinwireError, ImportError):
    """A package that an integration needs is missing, too old or too new. An import's error is the cause."""
