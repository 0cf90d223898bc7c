"""The result of `thinwire.advise`, which prints as a page: what to do, one table, why, lines to paste."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.advice.losses import NOISE_PERCENT, ExpectedLoss, signed
from thinwire.advice.prediction import LINES, Prediction, choose, code_of, contenders

LEGEND = f"""\
between: the quartiles of a step; %: of a step with 16 bits; 5 ms: a step at this round trip of the link
MB: what leaves a {{sender}} per step, and as much reaches it; kept: MB that an algorithm keeps between steps
loss: held-out loss above exact averaging's, in percent; up to {NOISE_PERCENT:g} counts as none
    ≤ 4.4: not measured; a rougher setting lost 4.4. > 12: not measured; a finer setting lost 12
    ?: not measured, or only in longer runs, or (low rank) in far smaller models
    Measured with small models of text; yours may differ
rounds: messages of a step that wait for each other"""

# Fewer bytes than 16 bits, with four members (docs/optimizers.md).
MUON_TIMES_FEWER = 238


@dataclass(frozen=True)
class Advice:
    """All predictions, fastest first, and the advised algorithm. Printing it shows everything.

    Attributes:
        predictions: Everything that was considered.
        baseline: Averaging in 16 bits, to compare with.
        compute_seconds: A step without averaging, predicted like the others.
        least_gain: The least time that an approximation must save, as a share of the baseline's step.
        budget_loss: The largest accepted loss gap, as a share of exact averaging's loss.
        optimizer: The optimizer for which losses were looked up; None for the worst of all.
        shards: Processes that together hold a replica of a sharded model; None for any other model.
        processes: Processes of a machine that average inside it first; bytes are those that leave it.
        notes: What makes the advice less certain, as sentences.
    """

    predictions: tuple[Prediction, ...]
    baseline: Prediction
    compute_seconds: float
    least_gain: float
    budget_loss: float = math.inf
    optimizer: str | None = None
    shards: int | None = None
    processes: int = 1
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Prediction:
        """The advised algorithm: the one of `tied` that loses least."""
        return choose(self.tied)

    @property
    def tied(self) -> list[Prediction]:
        """The fastest prediction within the loss budget that wins enough, and those that tie with it."""
        return contenders(self.predictions, self.least_gain, self.budget_loss, self.compute_seconds)

    @property
    def headline(self) -> tuple[str, str, str]:
        """Three sentences: what to do, how long a step then takes, and what loss to expect."""
        do = "leave DDP as it is" if self.adds_nothing else self.best.code.splitlines()[-1]
        plain, ms = self.plain, 1e3 * self.best.step_seconds
        name = "DDP as it is" if plain.is_exact else plain.name
        others = "" if plain is self.best else f", with {name} {1e3 * plain.step_seconds:.1f} ms"
        return (
            f"Do this: {do}",
            f"A step takes {ms:.1f} ms{others}, without any averaging {1e3 * self.compute_seconds:.1f} ms.",
            self.best.loss.in_words,
        )

    @property
    def plain(self) -> Prediction:
        """The way without Thinwire: DDP as it is, or native HSDP for a sharded model."""
        exact = (p for p in self.predictions if p.is_exact and self.shards is None)
        return next(exact, self.baseline)

    @property
    def adds_nothing(self) -> bool:
        """Whether exact averaging is advised, which DDP does itself."""
        return self.best.is_exact and self.shards is None

    @property
    def compress(self) -> bool:
        """Whether compressed messages are advised."""
        return self.best.is_lossy

    @property
    def nothing_to_win(self) -> bool:
        """Whether even a step without averaging would win less than `least_gain`."""
        is_near = self.compute_seconds > (1 - self.least_gain) * self.best.step_seconds
        return is_near and not self.best.is_lossy

    @property
    def lines(self) -> dict[str, str]:
        """Lines to paste by framework, with its usual names: model, optimizer, mesh, accelerator, trainer."""
        if self.adds_nothing:
            return {}
        # Only FSDP2 is priced for a sharded model; native HSDP needs no Thinwire.
        texts = {name: code_of(self.best.name, name) for name in (["FSDP2"] if self.shards else LINES)}
        return {name: "import thinwire\n" * ("thinwire." in text) + text for name, text in texts.items()}

    def __str__(self) -> str:
        sender = "process" if self.shards is None and self.processes == 1 else "machine"
        pasted = [
            line
            for name, text in self.lines.items()
            for line in ("", f"{name}:", *(f"    {code}" for code in text.splitlines()))
        ]
        if pasted and self.shards is None:
            command = f"thinwire attach --algorithm '{self.best.name}' -- torchrun … train.py …"
            pasted = ["", "Without code:", f"    {command}", *pasted]
        page = [*self.headline, "", *self._table(), "", LEGEND.format(sender=sender), ""]
        return "\n".join([*page, *self._why(), *self.notes, "", *self._sources(), *pasted])

    def _table(self) -> list[str]:
        def share(seconds: float) -> str:
            return f"{100 * seconds / self.baseline.step_seconds:.0f}"

        plain = "DDP as it is" if self.shards is None else "without Thinwire"
        round_trips = [f"{ms} ms" for ms in self.best.seconds_at]
        rows = [
            ["predicted, fastest first", "ms", "between", "%", "MB", "kept", "loss", *round_trips, "rounds"]
        ]
        alone = f"{1e3 * self.compute_seconds:.1f}", "", share(self.compute_seconds)
        rows.append(["computing alone", *alone, *[""] * (len(rows[0]) - 4)])
        for prediction in self.predictions:
            megabytes = prediction.sent_bytes / 1e6
            row = [
                f"{prediction.name}, {plain}" if prediction is self.plain else prediction.name,
                f"{1e3 * prediction.step_seconds:.1f}",
                f"{1e3 * prediction.low_seconds:.1f} – {1e3 * prediction.high_seconds:>6.1f}",
                share(prediction.step_seconds),
                f"{megabytes:.2f}" if megabytes >= 1 else f"{megabytes:.2g}",
                f"{prediction.memory_bytes / 1e6:.1f}",
                prediction.loss.short,
                *(f"{1e3 * seconds:.1f}" for seconds in prediction.seconds_at.values()),
                str(prediction.rounds),
            ]
            rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in rows
        ]

    def _why(self) -> Iterator[str]:
        best = self.best
        if self.nothing_to_win:
            yield "Nothing more to win: a step takes about as long without any averaging."
        elif not best.is_lossy:
            yield f"No approximation within the budget is certainly at least {self.least_gain:.0%} faster."
        if len(self.tied) > 1:
            names = "; ".join(prediction.name for prediction in self.tied)
            least = "is expected to lose the least; of equal gaps the most bits win"
            yield f"These take about the same time, as far as can be told: {names}."
            yield f"Of these, {best.name} {least if best.is_lossy else 'is the most exact'}."
        losses = {p.name: p.loss for p in self.predictions if p.is_lossy}
        if not any(loss.order <= 100 * self.budget_loss for loss in losses.values()):
            yield none_within(losses, self.budget_loss)
        waited_seconds = best.step_seconds - self.compute_seconds
        if waited_seconds > self.least_gain * best.step_seconds:
            less_often = "LocalSGD and DiLoCo average models less often (docs/local-sgd.md)"
            yield f"A step still waits {1e3 * waited_seconds:.1f} ms for messages: {less_often}."
            if self.optimizer == "AdamW":
                waits = 1e3 * (self.baseline.step_seconds - self.compute_seconds) / MUON_TIMES_FEWER
                megabytes = self.baseline.sent_bytes / 1e6 / MUON_TIMES_FEWER
                yield (
                    "Another optimizer, Muon in LocalSGD(every_steps=5, algorithm=TopK()), would wait "
                    f"{waits:.2g} ms and send {megabytes:.2g} MB; with 0.14 to 10.9 M parameters it ended 6 "
                    "to 16 % below exact AdamW (docs/optimizers.md)."
                )

    def _sources(self) -> list[str]:
        by_training: dict[str, dict[str, str]] = {}
        for prediction in self.predictions:
            for gap in prediction.loss.gaps:
                by_training.setdefault(gap.training, {})[gap.name] = f"{gap.name} {signed(gap.percent)} %"
        return [f"{training}: {'; '.join(gaps.values())}" for training, gaps in by_training.items()]


def none_within(losses: dict[str, ExpectedLoss], budget_loss: float) -> str:
    """Return a sentence that nothing meets the budget, with the algorithm that comes closest."""
    known = {name: loss for name, loss in losses.items() if loss.percent is not None}
    nearest = min(known, key=lambda name: known[name].order, default=None)
    detail = f"the nearest is {nearest} ({known[nearest].short} % loss)" if nearest else "no gap is known"
    return f"Nothing rougher than 16 bits is known to lose at most {100 * budget_loss:g} %: {detail}."
