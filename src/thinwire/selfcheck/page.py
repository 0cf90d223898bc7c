"""A page about a device: what was found, what has failed, and what was not run and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class KernelError:
    """How far the arithmetic of a matrix rank is from that in float64, relative to it.

    Attributes:
        matrix_rank: r.
        products: Of M Q.
        orthonormal_rows: Of P̂ᵀ P̂ from the identity, per row.
        projections: Of P̂ᵀ M.
        reconstruct: Of the residual.
    """

    matrix_rank: int
    products: float
    orthonormal_rows: float
    projections: float
    reconstruct: float


@dataclass(frozen=True)
class StepCost:
    """What a step of an algorithm takes, from the first bucket to the last mean.

    Attributes:
        algorithm: As it is written in code.
        milliseconds: Median.
        copies: The same in copies of the gradients.
        timed_steps: Of which that is the median: fewer where steps are slow.
        launches: Kernels; None where that is not known.
        host_waits: Times that the host waits for the device; None where that is not known.
        peak_bytes: Of memory, above what gradients take; None where that is not known.
    """

    algorithm: str
    milliseconds: float
    copies: float
    timed_steps: int
    launches: int | None
    host_waits: int | None
    peak_bytes: int | None


@dataclass
class DevicePage:
    """All that was found so far. It is true at any time: what has not ended stands on it as such.

    Attributes:
        setting: Versions, device and group.
        copied_bytes_per_second: Of a copy of the gradients, bytes read and written; None if there was none.
        kernels: Errors by matrix rank.
        steps: Costs by algorithm.
        failures: What raised an error on this process, or was ended, by part, and why.
        not_run: What was left out, by part, and why.
        under_way: The part that has begun and not ended, if any.
        to_come: Parts that have not begun.
    """

    setting: dict[str, str]
    copied_bytes_per_second: float | None = None
    kernels: list[KernelError] = field(default_factory=list)
    steps: list[StepCost] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    under_way: str | None = None
    to_come: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether all parts have ended, and well."""
        return not (self.failures or self.not_run or self.under_way or self.to_come)

    def ended(self, why: str, *, in_a_part: str | None = None) -> DevicePage:
        """Return the page as it is if nothing more is run.

        Args:
            why: What has ended it, for the parts that have not begun.
            in_a_part: The same for the one under way; None for the same words.
        """
        failures, not_run = dict(self.failures), {**self.not_run, **dict.fromkeys(self.to_come, why)}
        if self.under_way is not None:
            failures[self.under_way] = in_a_part or why
        return replace(self, failures=failures, not_run=not_run, under_way=None, to_come=[])

    def as_plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    def as_markdown(self) -> str:
        """Return it as a page to paste into an issue."""
        lines = [f"- {name}: {value}" for name, value in self.setting.items()]
        if self.copied_bytes_per_second is not None:
            lines.append(f"- a copy: {self.copied_bytes_per_second / 1e9:,.0f} GB/s")
        for rows, number in ((self.kernels, "{:.1e}"), (self.steps, "{:,.2f}")):
            lines += ["", *_table([asdict(each) for each in rows], number)] if rows else []
        gaps = [
            f"- **{mark}**: {name}: {why}"
            for mark, found in (("failed", self.failures), ("not run", self.not_run))
            for name, why in found.items()
        ]
        return "\n".join([*lines, "", *gaps] if gaps else lines)


def _table(rows: Sequence[Mapping[str, object]], number: str) -> list[str]:
    def cell(value: object) -> str:
        if value is None:
            return ""
        if isinstance(value, float):
            return number.format(value)
        return f"{value:,}" if isinstance(value, int) else str(value)

    heads = [name.replace("_", " ") for name in rows[0]]
    marks = ["---", *["--:"] * (len(heads) - 1)]
    cells = [[cell(value) for value in row.values()] for row in rows]
    return [f"| {' | '.join(line)} |" for line in [heads, marks, *cells]]
