"""The priced algorithms for gradients and ways to average models now and then; and the code of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from thinwire.advice.loss import EXACT_LOSS, ExpectedLoss, Training, expected_loss
from thinwire.advice.result import Advice, Prediction
from thinwire.algorithms import Algorithm, Quantize, TopK, registry
from thinwire.algorithms.registry import Variant
from thinwire.local_sgd import DiLoCo, LocalSGD, Nesterov, Streaming
from thinwire.local_sgd.schedule import WHOLE

# 16 bits lose nothing that was measured, and every backend carries them: that is what compression must beat.
EXACT, BASELINE, OVERFLOWING = "AllReduce()", 'Cast("bf16")', 'Cast("fp16")'
# It sends what `Cast("bf16")` sends, at the same moments, and needs no Thinwire.
NATIVE = "native HSDP in bf16"
NATIVE_LINES = (
    "from torch.distributed.fsdp import MixedPrecisionPolicy\n"
    "fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
)
# It replaces the parameters: an optimizer that was made before would train what is no longer there.
SHARDING = 'fully_shard(model, mesh=mesh["shard"])\n# make the optimizer here, of the shards\n'


def priced() -> dict[str, Variant]:
    """Return the algorithms that are priced, as they are written in code."""
    return {variant.code: variant for registered in registry.REGISTRY for variant in registered.priced}


@dataclass(frozen=True)
class LocalVariant:
    """An adapter with settings that are tried."""

    adapter: type[LocalSGD]
    every_steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    # An algorithm that surely loses less, as it is written in code, if this was not measured.
    loses_more_than: str = ""

    @property
    def streaming(self) -> Streaming:
        """As of `LocalSGD`."""
        streaming: Streaming = self.options.get("streaming", WHOLE)
        return streaming

    @property
    def name(self) -> str:
        """As it is written in code, without what is trained."""
        return f"{self.adapter.__name__}({self._settings()})"

    @property
    def code(self) -> str:
        """The line to put around a training loop."""
        return f"with thinwire.{self.adapter.__name__}(model, optimizer, {self._settings('thinwire.')}):"

    def _settings(self, prefix: str = "") -> str:
        settings = {"every_steps": self.every_steps, **self.options}
        return ", ".join(
            f"{name}={prefix if isinstance(value, Algorithm | Nesterov | Streaming) else ''}{value}"
            for name, value in settings.items()
        )


LOCAL_VARIANTS = (
    LocalVariant(LocalSGD, 4, {"algorithm": Quantize(bits=4)}),
    LocalVariant(LocalSGD, 5, {"algorithm": TopK()}),
    LocalVariant(LocalSGD, 10),
    LocalVariant(LocalSGD, 10, {"algorithm": Quantize(bits=4)}),
    LocalVariant(DiLoCo, 30),
    LocalVariant(DiLoCo, 30, {"outer": Nesterov(lr=1.0, momentum=0.5)}),
    LocalVariant(DiLoCo, 30, {"streaming": Streaming(fragments=2, delay_steps=5)}, "DiLoCo(every_steps=30)"),
)


def expected_losses(training: Training) -> dict[str, ExpectedLoss]:
    """Return the loss gap of everything that is priced, by the name of its prediction."""
    # In the table, algorithms have the names that they print.
    losses = {}
    for code, variant in priced().items():
        # 16 bits changed nothing in runs of any length.
        asked = replace(training, steps=None) if variant.keeps_16_bits else training
        bounds = variant.loses_more_than, variant.loses_less_than
        losses[code] = expected_loss(str(variant.algorithm), asked, *bounds)
    losses |= {
        local.name: expected_loss(local.name, training, local.loses_more_than) for local in LOCAL_VARIANTS
    }
    return losses | {EXACT: EXACT_LOSS, NATIVE: losses[BASELINE]}


def code_of(name: str, local: LocalVariant | None, *, is_sharded: bool) -> str:
    """Return the code to write for a prediction."""
    if name == NATIVE:
        return NATIVE_LINES
    model = "model" if is_sharded else "ddp_model"
    code = f"thinwire.attach({model}, thinwire.{name})" if local is None else local.code
    return _after_sharding(code) if is_sharded else code


def lines_to_paste(advice: Advice) -> dict[str, str]:
    """Return lines by adapter, in its users' names: model, optimizer, mesh, accelerator, trainer."""
    if advice.adds_nothing:
        return {}  # exact averaging is what they do by themselves
    # Only FSDP2 alone is priced for a sharded model; native HSDP needs no Thinwire.
    lines = _lines_by_adapter(advice.best) if advice.shards is None else {"FSDP2": advice.best.code}
    imported = "import thinwire\n"
    return {adapter: imported * ("thinwire." in text) + text for adapter, text in lines.items()}


def _lines_by_adapter(best: Prediction) -> dict[str, str]:
    algorithm, partial = f"thinwire.{best.name}", ""
    sharded = inside = f"thinwire.attach(model, {algorithm})"
    if best.averages_less_often:
        sharded = best.code
        adapter, _, settings = sharded[len("with ") : -len("):")].partition("(model, optimizer, ")
        # Accelerate wraps optimizers, and steps are counted on what is inside; its DDP model would go on
        # averaging gradients.
        unwrapped = f"accelerator.unwrap_model(model), optimizer.optimizer, {settings}"
        inside = f"with model.no_sync(), {adapter}({unwrapped}):"
        # Frameworks make the adapter themselves, when model and optimizer are there.
        algorithm, partial = f"partial({adapter}, {settings})", "from functools import partial\n"
    return {
        "DDP": best.code,
        "FSDP2": _after_sharding(sharded),
        "Accelerate": f"model, optimizer = accelerator.prepare(model, optimizer)\n{inside}",
        "Lightning": (
            f"{partial}from thinwire.integrations.lightning import ThinwireCallback, ThinwireStrategy\n"
            f"trainer = Trainer(strategy=ThinwireStrategy({algorithm}), callbacks=[ThinwireCallback()])"
        ),
        "Trainer": (
            f"{partial}from thinwire.integrations.transformers import attach\n"
            f"thinwire_callback = attach(trainer, {algorithm})"
        ),
    }


def _after_sharding(code: str) -> str:
    """Return a line behind the call of `fully_shard`, told where the replicas are."""
    end = "):" if code.endswith(":") else ")"
    return f'{SHARDING}{code.removesuffix(end)}, replicas=mesh["replicate"]{end}'
