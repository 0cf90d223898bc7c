"""What to paste: the advised line for each front."""

from __future__ import annotations

from thinwire.advice.result import Advice, Prediction, choose

__all__ = ["lines_to_paste"]


def lines_to_paste(advice: Advice) -> dict[str, str]:
    """Return lines by front.

    Where models are to be averaged now and then, and a front has no place for that, its lines are of what is
    advised among ways of averaging gradients, and say so.

    Args:
        advice: What was advised.
    """
    # Lightning and the Trainer own the loop, and FSDP2's shards are no whole models: there is no place for a
    # context around steps.
    best, of_gradients = advice.best, advice.best
    if best.averages_less_often:
        ranked = [each for each in advice.predictions if not each.averages_less_often]
        of_gradients = choose(ranked, advice.least_gain, advice.budget_loss)
    return (
        _local(best) | _of_gradients(of_gradients, best) if best is not of_gradients else _of_gradients(best)
    )


def _of_gradients(prediction: Prediction, instead_of: Prediction | None = None) -> dict[str, str]:
    algorithm = f"thinwire.{prediction.name}"
    note = "" if instead_of is None else f"# averages gradients; not {instead_of.name}\n"
    lines = {
        "DDP": prediction.code,
        "FSDP2": (
            'fully_shard(model, mesh=mesh["shard"])\n'
            f'thinwire.attach(model, {algorithm}, mesh=mesh["replicate"])'
        ),
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
    if instead_of is not None:
        # These take a training loop of one's own, and have lines for that.
        del lines["DDP"], lines["Accelerate"]
    return {front: note + line for front, line in lines.items()}


def _local(prediction: Prediction) -> dict[str, str]:
    around = prediction.code
    return {
        "DDP": around,
        # Accelerate wraps optimizers, and steps are counted on what is inside.
        "Accelerate": (
            "model, optimizer = accelerator.prepare(model, optimizer)\n"
            f"{around.replace('optimizer,', 'optimizer.optimizer,', 1)}"
        ),
    }
