"""What to paste: the advised lines for each front."""

from __future__ import annotations

from thinwire.advice.result import Advice, Prediction

# It replaces the parameters: an optimizer that was made before would train what is no longer there.
SHARDING = 'fully_shard(model, mesh=mesh["shard"])\n# make the optimizer here, of the shards\n'


def lines_to_paste(advice: Advice) -> dict[str, str]:
    """Return lines by front, in the names that its users give: model, optimizer, mesh, accelerator, trainer.

    None if exact averaging is advised, which they do by themselves.

    Args:
        advice: What was advised.
    """
    best = advice.best
    if advice.adds_nothing:
        return {}
    # What is priced of a sharded model is of FSDP2 alone.
    if advice.shards is not None:
        lines = {"FSDP2": best.code}
    else:
        lines = _local(best) if best.averages_less_often else _of_gradients(best)
    # Native HSDP needs none.
    return {
        front: f"import thinwire\n{text}" if "thinwire." in text else text for front, text in lines.items()
    }


def _of_gradients(prediction: Prediction) -> dict[str, str]:
    algorithm = f"thinwire.{prediction.name}"
    return {
        "DDP": prediction.code,
        "FSDP2": (f'{SHARDING}thinwire.attach(model, {algorithm}, replicas=mesh["replicate"])'),
        "Accelerate": (
            f"model, optimizer = accelerator.prepare(model, optimizer)\nthinwire.attach(model, {algorithm})"
        ),
        **_of_frameworks(algorithm),
    }


def _local(prediction: Prediction) -> dict[str, str]:
    around = prediction.code
    front = around.removeprefix("with ").partition("(")[0]
    settings = around.partition("(model, optimizer, ")[2].removesuffix("):")
    inside = f"accelerator.unwrap_model(model), optimizer.optimizer, {settings}"
    frameworks = _of_frameworks(f"partial({front}, {settings})")
    return {
        "DDP": around,
        "FSDP2": (f'{SHARDING}{around.removesuffix("):")}, mesh=mesh["replicate"]):'),
        # Accelerate wraps optimizers, and steps are counted on what is inside; its DDP model would go on
        # averaging gradients.
        "Accelerate": (
            "model, optimizer = accelerator.prepare(model, optimizer)\n"
            f"with model.no_sync(), {front}({inside}):"
        ),
        # They make the front themselves, when model and optimizer are there.
        **{name: f"from functools import partial\n{lines}" for name, lines in frameworks.items()},
    }


def _of_frameworks(algorithm: str) -> dict[str, str]:
    return {
        "Lightning": (
            "from thinwire.integrations.lightning import ThinwireCallback, ThinwireStrategy\n"
            f"trainer = Trainer(strategy=ThinwireStrategy({algorithm}), callbacks=[ThinwireCallback()])"
        ),
        "Trainer": (
            "from thinwire.integrations.transformers import attach\n"
            f"thinwire_callback = attach(trainer, {algorithm})"
        ),
    }
