"""Ways of averaging models now and then that `thinwire.advise` prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.algorithms import Algorithm, Quantize, TopK
from thinwire.fronts.local_sgd import DiLoCo, LocalSGD


@dataclass(frozen=True)
class LocalVariant:
    """A front with settings that are tried.

    Attributes:
        front: `LocalSGD` or `DiLoCo`.
        every_steps: Steps from one averaging of a parameter to the next.
        options: All other settings, by name.
        loses_more_than: What surely loses less, as it is written in code, where this was not measured.
    """

    front: type[LocalSGD]
    every_steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    loses_more_than: str = ""

    @property
    def fragments(self) -> int:
        """As of `LocalSGD`."""
        return int(self.options.get("fragments", 1))

    @property
    def delay_steps(self) -> int:
        """As of `LocalSGD`."""
        return int(self.options.get("delay_steps", 0))

    @property
    def name(self) -> str:
        """As it is written in code, without what is trained."""
        return f"{self.front.__name__}({self._settings()})"

    @property
    def code(self) -> str:
        """The line to put around a training loop."""
        return f"with thinwire.{self.front.__name__}(model, optimizer, {self._settings('thinwire.')}):"

    def _settings(self, prefix: str = "") -> str:
        given = {"every_steps": self.every_steps, **self.options}
        return ", ".join(
            f"{name}={prefix if isinstance(value, Algorithm) else ''}{value}" for name, value in given.items()
        )


LOCAL_VARIANTS = (
    LocalVariant(LocalSGD, 4, {"algorithm": Quantize(bits=4)}),
    LocalVariant(LocalSGD, 5, {"algorithm": TopK()}),
    LocalVariant(LocalSGD, 10),
    LocalVariant(LocalSGD, 10, {"algorithm": Quantize(bits=4)}),
    LocalVariant(DiLoCo, 30),
    LocalVariant(DiLoCo, 30, {"outer_lr": 1.0, "outer_momentum": 0.5}),
    LocalVariant(DiLoCo, 30, {"fragments": 2, "delay_steps": 5}, loses_more_than="DiLoCo(every_steps=30)"),
)
