"""What is priced: algorithms for gradients, and ways of averaging models now and then; what each may lose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.advice.loss import EXACT_LOSS, ExpectedLoss, Training, expected_loss
from thinwire.algorithms import Algorithm, Quantize, TopK, registry
from thinwire.algorithms.registry import Variant
from thinwire.localsgd import DiLoCo, LocalSGD, Nesterov, Streaming
from thinwire.localsgd.schedule import WHOLE

# 16 bits lose nothing that was measured, and every backend carries them: that is what compression must beat.
EXACT, BASELINE, OVERFLOWING = "AllReduce()", 'Cast("bf16")', 'Cast("fp16")'
# It sends what `Cast("bf16")` sends, at the same moments, and needs no Thinwire.
NATIVE = "native HSDP in bf16"


def priced() -> dict[str, Variant]:
    """Return the algorithms that are priced, as they are written in code."""
    return {variant.code: variant for each in registry.REGISTRY for variant in each.priced}


@dataclass(frozen=True)
class LocalVariant:
    """A front with settings that are tried."""

    front: type[LocalSGD]
    every_steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    # What surely loses less, as it is written in code, if this was not measured.
    loses_more_than: str = ""

    @property
    def streaming(self) -> Streaming:
        """As of `LocalSGD`."""
        streaming: Streaming = self.options.get("streaming", WHOLE)
        return streaming

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
            f"{name}={prefix if isinstance(value, Algorithm | Nesterov | Streaming) else ''}{value}"
            for name, value in given.items()
        )


STREAMED = {"streaming": Streaming(fragments=2, delay_steps=5)}
LOCAL_VARIANTS = (
    LocalVariant(LocalSGD, 4, {"algorithm": Quantize(bits=4)}),
    LocalVariant(LocalSGD, 5, {"algorithm": TopK()}),
    LocalVariant(LocalSGD, 10),
    LocalVariant(LocalSGD, 10, {"algorithm": Quantize(bits=4)}),
    LocalVariant(DiLoCo, 30),
    LocalVariant(DiLoCo, 30, {"outer": Nesterov(lr=1.0, momentum=0.5)}),
    LocalVariant(DiLoCo, 30, STREAMED, loses_more_than="DiLoCo(every_steps=30)"),
)


def expected_losses(training: Training) -> dict[str, ExpectedLoss]:
    """Return the loss gap of everything that is priced, by the name of its prediction."""
    gradients = {
        # In the table, algorithms have the names that they print.
        code: expected_loss(
            str(each.algorithm),
            training,
            loses_more_than=each.loses_more_than,
            loses_less_than=each.loses_less_than,
        )
        for code, each in priced().items()
    }
    models = {
        each.name: expected_loss(each.name, training, loses_more_than=each.loses_more_than)
        for each in LOCAL_VARIANTS
    }
    return {**gradients, **models, EXACT: EXACT_LOSS, NATIVE: gradients[BASELINE]}
