"""What to write: the line of a prediction, and the advised lines for each front."""

from __future__ import annotations

from thinwire.advice.result import Advice, Prediction
from thinwire.advice.variants import NATIVE, LocalVariant

# It replaces the parameters: an optimizer that was made before would train what is no longer there.
SHARDING = 'fully_shard(model, mesh=mesh["shard"])\n# make the optimizer here, of the shards\n'
NATIVE_LINES = (
    "from torch.distributed.fsdp import MixedPrecisionPolicy\n"
    "fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
)


def code_of(name: str, way: LocalVariant | None, *, is_sharded: bool) -> str:
    """Return what to write for a prediction."""
    if name == NATIVE:
        return NATIVE_LINES
    model = "model" if is_sharded else "ddp_model"
    code = f"thinwire.attach({model}, thinwire.{name})" if way is None else way.code
    return _of_fsdp2(code) if is_sharded else code


def lines_to_paste(advice: Advice) -> dict[str, str]:
    """Return lines by front, in the names that its users give: model, optimizer, mesh, accelerator, trainer.

    None if exact averaging is advised, which they do by themselves.
    """
    if advice.adds_nothing:
        return {}
    # What is priced of a sharded model is of FSDP2 alone.
    lines = _of_fronts(advice.best) if advice.shards is None else {"FSDP2": advice.best.code}
    # Native HSDP needs none.
    return {
        front: f"import thinwire\n{text}" if "thinwire." in text else text for front, text in lines.items()
    }


def _of_fronts(best: Prediction) -> dict[str, str]:
    algorithm, partial = f"thinwire.{best.name}", ""
    sharded = inside = f"thinwire.attach(model, {algorithm})"
    if best.averages_less_often:
        sharded = best.code
        front, _, settings = sharded[len("with ") : -len("):")].partition("(model, optimizer, ")
        # Accelerate wraps optimizers, and steps are counted on what is inside; its DDP model would go on
        # averaging gradients.
        unwrapped = f"accelerator.unwrap_model(model), optimizer.optimizer, {settings}"
        inside = f"with model.no_sync(), {front}({unwrapped}):"
        # Frameworks make the front themselves, when model and optimizer are there.
        algorithm, partial = f"partial({front}, {settings})", "from functools import partial\n"
    return {
        "DDP": best.code,
        "FSDP2": _of_fsdp2(sharded),
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


def _of_fsdp2(code: str) -> str:
    """Return a line behind the call of `fully_shard`, told where the replicas are."""
    end = "):" if code.endswith(":") else ")"
    name = "mesh" if code.startswith("with ") else "replicas"
    return f'{SHARDING}{code.removesuffix(end)}, {name}=mesh["replicate"]{end}'
