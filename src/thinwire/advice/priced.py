"""The algorithms that are priced, and the lines of code that use one."""

from __future__ import annotations

from thinwire.algorithms import registry
from thinwire.algorithms.registry import Variant

# 16 bits lose nothing that was measured, and every backend carries them: that is what compression must beat.
EXACT, BASELINE = "AllReduce()", 'Cast("bf16")'
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


def code_of(name: str, *, is_sharded: bool) -> str:
    """Return the code to write for a prediction."""
    if name == NATIVE:
        return NATIVE_LINES
    if is_sharded:
        return f'{SHARDING}thinwire.attach(model, thinwire.{name}, replicas=mesh["replicate"])'
    return f"thinwire.attach(ddp_model, thinwire.{name})"


def lines_by_framework(name: str) -> dict[str, str]:
    """Return the lines that use an algorithm, in a framework's users' names, such as trainer."""
    algorithm = f"thinwire.{name}"
    return {
        "DDP": code_of(name, is_sharded=False),
        "FSDP2": code_of(name, is_sharded=True),
        "Accelerate": (
            f"model, optimizer = accelerator.prepare(model, optimizer)\nthinwire.attach(model, {algorithm})"
        ),
        "Lightning": (
            "from thinwire.integrations.lightning import ThinwireCallback, ThinwireStrategy\n"
            f"trainer = Trainer(strategy=ThinwireStrategy({algorithm}), callbacks=[ThinwireCallback()])"
        ),
        "Trainer": (
            "from thinwire.integrations.transformers import attach\n"
            f"thinwire_callback = attach(trainer, {algorithm})"
        ),
    }
