"""Advice in sentences: what the command prints, and what a run says that chose by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping

from thinwire.advice.loss import NOISE_PERCENT, ExpectedLoss, signed
from thinwire.advice.result import Advice, Prediction
from thinwire.advice.variants import NATIVE, LocalVariant

LOSS_LEGEND = (
    "loss: the gap to exact averaging's held-out loss to be expected, in percent; up to "
    f"{NOISE_PERCENT:g} counts as none. p 4.4: published by others. ≤ 4.4: not measured; a rougher setting "
    "lost 4.4. > 12: not measured; a finer setting lost 12. ?: not known. Measured with small models; yours "
    "may differ."
)


def verdict(advice: Advice) -> list[str]:
    """Return why it is advised, a sentence or two for each item: what follows `Advice.headline`."""
    bits, gained = advice.break_even_bits_per_second, f"{advice.least_gain:.0%} over 16 bits"
    where = (
        f"links below {bits / 1e6:,.0f} Mbit/s"
        if 0 < bits < math.inf
        else "every link"
        if bits
        else "no link"
    )
    lines = [] if advice.best.is_lossy else [_why_not(advice)]
    if len(advice.tied) > 1:
        is_all = len(advice.tied) == len(advice.predictions)
        # A name has commas of its own: LocalSGD(every_steps=10, algorithm=Quantize(bits=4)).
        names = "all of them" if is_all else "; ".join(each.name for each in advice.tied)
        # Said before what follows from it: the one advised may not be the first of the table.
        tie = f"These take about the same time, as far as can be told: {names}."
        if advice.best in advice.tied and advice.best.is_lossy:
            tie += (
                f" Of those that win enough, {advice.best.name} is expected to lose the least; of equal gaps "
                "the most bits win."
            )
        elif advice.best in advice.tied:
            tie += f" Of these, {advice.best.name} loses nothing, and has the most bits."
        lines.append(tie)
    # It knows of no spread, and what is advised counts it: said, where the two could contradict each other.
    who = "Compressed messages" if advice.best.is_lossy else "By medians alone, compressed messages"
    lines.append(f"{who} win more than {gained} on {where}.")
    return [*lines, *_about_losses(advice), *advice.notes]


def losses_of(prediction: Prediction) -> str:
    """Return what is known of a way's loss, with where it is from."""
    loss = prediction.loss
    sentences = {
        "exact": ["none: it is exact averaging"],
        "measured": [str(gap) for gap in loss.gaps],
        "published": [str(gap) for gap in loss.gaps],
        "between": ["between " + " and ".join(f"{gap.name}: {gap}" for gap in loss.gaps)],
        "above": [f"more than {gap.name}: {gap}" for gap in loss.gaps],
        "unknown": ["not known"],
    }[loss.kind]
    # Beside the project's own: of larger models, at other batches, by others.
    if prediction.published is not None and prediction.published not in loss.gaps:
        sentences.append(str(prediction.published))
    return "; ".join(sentences)


def nearest(losses: Mapping[str, ExpectedLoss]) -> str | None:
    """Return what loses least, by what is known, and its gap; None if nothing is."""
    known = {name: loss for name, loss in losses.items() if loss.percent is not None}
    name = min(known, key=lambda name: known[name].order, default=None)
    return None if name is None else f"{name} ({known[name].short} % loss)"


def none_within(losses: Mapping[str, ExpectedLoss], budget_loss: float) -> str:
    """Return that nothing meets the budget, and what is nearest to it."""
    found = nearest(losses)
    told = "of none is a gap known" if found is None else f"the nearest is {found}"
    return f"Nothing rougher than 16 bits is known to lose at most {100 * budget_loss:g} %: {told}."


def sources(advice: Advice) -> list[str]:
    """Return a line for each training that losses are known from, with the gaps that it tells."""
    by_training: dict[str, dict[str, None]] = {}
    for each in advice.predictions:
        gaps = dict.fromkeys((*each.loss.gaps, *([] if each.published is None else [each.published])))
        for gap in gaps:
            # A dictionary keeps the order of what is first said, and says nothing twice.
            listed = by_training.setdefault(gap.training, {})
            listed[f"{gap.name} {signed(gap.percent)} %"] = None
    return [f"{training}: {'; '.join(listed)}" for training, listed in by_training.items()]


def _why_not(advice: Advice) -> str:
    """Return why nothing rougher than 16 bits is advised."""
    best = advice.best
    if advice.compressed_bytes >= advice.baseline.message_bytes:
        return (
            "Nothing to win by compressing: compressed messages of this model are "
            f"{advice.compressed_bytes:,.0f} bytes per step, 16 bits {advice.baseline.message_bytes:,.0f}."
        )
    if advice.nothing_to_win:
        return (
            f"Nothing to win: a step takes {1e3 * best.step_seconds:.1f} ms with {best.name}, "
            f"{1e3 * advice.compute_seconds:.1f} ms without any averaging."
        )
    return (
        f"Do not compress: no approximation wins more than {advice.least_gain:.0%} over {best.name} for sure."
    )


def _about_losses(advice: Advice) -> list[str]:
    """Return what the loss budget allows, and what it forbids."""
    # Without a bound nothing is refused for its loss.
    if math.isinf(advice.budget_loss):
        return []
    budget = f"{100 * advice.budget_loss:g} %"
    lines = []
    if advice.best.is_lossy:
        lines.append(f"Its loss gap: {losses_of(advice.best)}.")
    elif not any(each.is_lossy and advice.is_within_budget(each) for each in advice.predictions):
        lossy = {each.name: each.loss for each in advice.predictions if each.is_lossy}
        lines.append(none_within(lossy, advice.budget_loss))
    # Worth a word only if it is faster for sure, and by as much as counts.
    beyond = [
        each
        for each in advice.predictions
        if not advice.is_within_budget(each)
        and each.high_seconds < (1 - advice.least_gain) * advice.best.low_seconds
    ]
    if beyond:
        fastest = beyond[0]
        share = fastest.step_seconds / advice.baseline.step_seconds
        lines.append(
            f"Beyond a loss budget of {budget}, {fastest.name} takes {share:.0%} of a step with 16 bits "
            f"(loss gap: {losses_of(fastest)})."
        )
    return lines


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
    return f'{SHARDING}{code.removesuffix(end)}, replicas=mesh["replicate"]{end}'
