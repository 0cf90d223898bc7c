"""PowerSGD, layer by layer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from thinwire.algorithms.alternating import alternate
from thinwire.algorithms.base import Bucket, Memory, Replanning, Rounds
from thinwire.algorithms.budget import measured, within_bytes, within_error
from thinwire.algorithms.exact import keep_unpaid, with_owed
from thinwire.algorithms.lowrank import LowRank
from thinwire.algorithms.matrices import MatrixGroup, remember, round_into
from thinwire.algorithms.passes import settle, stacked
from thinwire.algorithms.rounds import approximate
from thinwire.checks import number, true_or_false, whole_count, whole_number
from thinwire.errors import ConfigError
from thinwire.plan import BUCKET_SEPARATOR, ParameterSpec, Plan, Route

__all__ = ["PowerSGD"]


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRank):
    """Send two low-rank factors of every gradient matrix instead of the matrix.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019, arXiv 1905.13727), algorithms 1 and 2,
    with one change: a process's error is what remains of its own gradient, M − P̂ P̂ᵀ M, not of the mean.

    Gradients of any floating type: factors are computed, and the error kept, in fp32 (of fp64 gradients
    in fp64, by PyTorch's products). Vectors,
    scalars and matrices that would shrink too little ride along whole in the first message.

    Args:
        matrix_rank: Rank r of the factors; more is more exact and costs proportionally more bytes.
        min_compression_ratio: A matrix is compressed only if that shrinks it more than this, in bytes:
            (rows + columns) · r · power_iterations · ratio < rows · columns, with half of the right side
            where gradients of 16 bits have factors of 32. With 0 every matrix is. A bucket that would not
            shrink at all (with a ratio of 1 or more) travels whole, in its own type.
        warmup_steps: Steps at the start that average whole gradients.
        error_feedback: Add to each gradient what earlier steps did not transmit of it. Without it
            the result is biased and training usually stalls.
        warm_start: Start each step's power iteration from the last step's right factor.
        seed: Of the random factors, the same on every process.
        wire_dtype: "fp16" or "bf16" to send every message in 16 bits; None for fp32 (fp64 of
            fp64 gradients). "bf16" has fp32's range. "fp16" is for gradients that a loss
            scale keeps in its range: of factors, what is above 65 504 is cut off and what is below
            6e-8 vanishes (both stay owed); gradients that ride along overflow as with `Cast`. A process goes
            on owing what it rounds off its own factors. Lost for good are the rounding of their sum and all
            rounding of gradients that travel whole.
        power_iterations: How often the two rounds are repeated in a step. With `alternating`, how
            many single rounds a step takes; their results add up.
        matrix_ranks: Of single parameters, by name, where it is another than `matrix_rank`.
        bytes_per_step: Choose the matrix ranks by what the run itself measures, so that a step sends at
            most so many bytes (`alternating`: two steps twice so many) and leaves out the least energy of
            the mean gradient and what is owed on it. Until the first choice the settings above hold as far as
            they send no more; else no matrix rank is above the highest at which a step does not.
        max_relative_error: The same, with the smallest matrix ranks that leave out at most this share of each
            matrix's norm, above 0 and below 1.
        replan_every_steps: Committed steps from one choice to the next, which goes at most a quarter up or
            down. Each costs a message of 4 · rows numbers a matrix, a pass over the error and two host
            synchronisations.
        chosen_ranks: The choice, by parameter; not to be given.
        alternating: One round instead of two: project on the left factor in one step, on the right in
            the next. Half the bytes and messages at the same matrix rank, and a rougher approximation.

    Cost a step: two rounds, the second of all buckets together, of r · (rows + columns) elements a
    matrix; an fp32 error of the size of the gradients (fp64 of fp64) and, of gradients in 16 bits, an fp32
    copy until the step's end; one host synchronisation, for the finite check (none
    without `host_check`).

    Raises:
        ConfigError: A setting is of the wrong type or out of range.

    Examples:
        >>> print(PowerSGD(matrix_rank=2).plan([ParameterSpec("weight", (64, 32), (32, 1), torch.float32)]))
        parameter  matrix shape  matrix rank  bytes before  bytes after
        weight            64×32            2         8,192          768
        total                                        8,192          768
        compression ratio 10.7
    """

    matrix_rank: int = 4
    alternating: bool = False
    matrix_ranks: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    bytes_per_step: int | None = None
    max_relative_error: float | None = None
    replan_every_steps: int = 100
    chosen_ranks: tuple[tuple[str, int], ...] = ()

    @property
    def factor_pairs(self) -> float:
        """How many left and right factors of a matrix a step sends, on average."""
        return self.power_iterations / 2 if self.alternating else self.power_iterations

    def factor_bytes(self, shape: tuple[int, int], matrix_rank: int, dtype: torch.dtype) -> int:
        """Bytes of a step's factors of one (rows, columns) matrix; alternating, the mean of two steps."""
        if not self.alternating:
            return super().factor_bytes(shape, matrix_rank, dtype)
        return matrix_rank * sum(shape) * self.message_dtype(dtype).itemsize * self.power_iterations // 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._keep("alternating", true_or_false("alternating", self.alternating))
        try:
            ranks = dict(self.matrix_ranks)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"matrix_ranks must map names to matrix ranks, got {self.matrix_ranks!r}"
            ) from error
        checked = [(str(n), whole_number(f"the matrix rank of {n}", r, least=1)) for n, r in ranks.items()]
        self._keep("matrix_ranks", tuple(sorted(checked)))
        self._keep("replan_every_steps", whole_count("replan_every_steps", self.replan_every_steps, least=1))
        if self.bytes_per_step is not None:
            self._keep("bytes_per_step", whole_count("bytes_per_step", self.bytes_per_step, least=1))
        self._check_budget()

    def _check_budget(self) -> None:
        error = self.max_relative_error
        if error is not None:
            self._keep("max_relative_error", number("max_relative_error", error, least=0))
            if not 0 < error < 1:
                raise ConfigError(f"max_relative_error must be above 0 and below 1, got {error!r}")
        if self.bytes_per_step is not None and error is not None:
            raise ConfigError("got bytes_per_step and max_relative_error, expected one of them")
        if self._has_budget and not (self.error_feedback and self.warm_start):
            raise ConfigError(
                "bytes_per_step and max_relative_error choose by what error_feedback and warm_start keep; "
                "leave both on"
            )
        if self._has_budget and self.alternating and self.power_iterations > 1:
            raise ConfigError(
                "bytes_per_step and max_relative_error do not go with alternating and power_iterations above "
                "1: a step's factors then tell only a part of the matrix"
            )

    @property
    def _has_budget(self) -> bool:
        return self.bytes_per_step is not None or self.max_relative_error is not None

    def plan(self, specs: Sequence[ParameterSpec]) -> Plan:
        """How each parameter of a bucket travels once past the warm-up."""
        ranks = dict(self.matrix_ranks) | dict(self.chosen_ranks)
        plan = Plan(tuple(self._route(spec, ranks.get(spec.name)) for spec in specs))
        whole = self.whole_plan(specs)
        compresses = any(route.matrix_rank is not None for route in plan.routes)
        shrinks = plan.message_bytes * min(1.0, self.min_compression_ratio) < whole.message_bytes
        return plan if compresses and shrinks else whole

    def _route(self, spec: ParameterSpec, wanted: int | None) -> Route:
        shape = spec.matrix_shape
        if self._has_budget:
            wanted = min(wanted or self.matrix_rank, self._most_rank(spec))
        matrix_rank = self.matrix_rank_of(shape, spec.dtype, wanted) if shape else None
        if shape is None or matrix_rank is None:
            return self.rider(spec)
        sent = self.factor_bytes(shape, matrix_rank, spec.dtype)
        return Route((spec.name,), spec.gradient_bytes, sent, shape, matrix_rank)

    def check_model(self, specs: Sequence[ParameterSpec]) -> None:
        """Refuse matrix ranks of parameters that the model does not have, and too few bytes."""
        super().check_model(specs)
        unknown = sorted(dict(self.matrix_ranks).keys() - {spec.name for spec in specs})
        if specs and unknown:
            raise ConfigError(f"matrix_ranks has {unknown[0]!r}, which is no parameter of the model")
        routes = replace(self, matrix_rank=1, matrix_ranks=(), chosen_ranks=()).plan(specs).routes
        # In a bucket of its own what is not compressed travels in its own type.
        least = sum(min(route.message_bytes, route.gradient_bytes) for route in routes)
        if self.bytes_per_step is not None and least > self.bytes_per_step:
            raise ConfigError(
                f"bytes_per_step is {self.bytes_per_step}, but this model sends {least} at matrix rank 1"
            )

    def starting(self, specs: Sequence[ParameterSpec]) -> PowerSGD:
        """With `bytes_per_step`, cut off at the highest matrix rank that keeps to it, if any is above."""
        if self.bytes_per_step is None or self.plan(specs).message_bytes <= self.bytes_per_step:
            return self
        ranks = {route.label: route.matrix_rank for route in self.plan(specs).routes if route.matrix_rank}

        def cut(most: int) -> PowerSGD:
            return self._with_choice({name: min(matrix_rank, most) for name, matrix_rank in ranks.items()})

        highest = range(1, max(ranks.values(), default=1) + 1)
        fitting = bisect_right(highest, self.bytes_per_step, key=lambda r: cut(r).plan(specs).message_bytes)
        return cut(max(fitting, 1))

    def replans_after(self, step: int) -> bool:
        """With a budget, every `replan_every_steps`, once past the warm-up."""
        return self._has_budget and step > self.warmup_steps and step % self.replan_every_steps == 0

    def replanning(self, specs: Mapping[str, ParameterSpec], memory: Memory) -> Replanning:
        """Choose the matrix ranks by the last factors and what is owed; no message if nothing has factors."""
        plan = self.plan(tuple(specs.values()))
        known = [r for r in plan.routes if r.matrix_rank is not None and r.label in memory.factor]
        if not known:
            return self
        most_ranks = {route.label: self._most_rank(specs[route.label]) for route in known}
        spectra = yield from measured(known, most_ranks, memory)
        if self.bytes_per_step is None:
            ranks = within_error(spectra, self.max_relative_error or 1.0)
        else:
            others = sum(route.message_bytes for route in plan.routes if route.label not in spectra)
            ranks = within_bytes(spectra, self.bytes_per_step - others)
        return self._with_choice(dict(self.chosen_ranks) | ranks)

    def _with_choice(self, ranks: Mapping[str, int]) -> PowerSGD:
        return replace(self, chosen_ranks=tuple(sorted(ranks.items())))

    def _most_rank(self, spec: ParameterSpec) -> int:
        """The largest matrix rank at which a matrix is worth compressing."""
        shape = spec.matrix_shape or (1, 1)
        ranks = range(1, min(shape) + 1)
        return bisect_left(ranks, True, key=lambda r: self.matrix_rank_of(shape, spec.dtype, r) is None) or 1

    def resumed(self, factors: Mapping[str, torch.Tensor], specs: Mapping[str, ParameterSpec]) -> PowerSGD:
        """With a budget, the matrix ranks chosen last are those of the factors, unless they exceed it."""
        if not self._has_budget:
            return self
        parameters = tuple(specs.values())
        start = self._with_choice({}).starting(parameters)
        ranks = {name: len(factor) for name, factor in factors.items() if BUCKET_SEPARATOR not in name}
        chosen = self._with_choice(dict(start.chosen_ranks) | ranks)
        fits = self.bytes_per_step is None or chosen.plan(parameters).message_bytes <= self.bytes_per_step
        return chosen if fits else start

    def exchange(self, bucket: Bucket, memory: Memory) -> Rounds:
        """One or two rounds an iteration; one in the warm-up, and where there is nothing to compress."""
        layout = _layout(self, bucket.specs)
        if self.travels_whole(bucket, memory) or not layout.families:
            yield from self.exchange_uncompressed(bucket, memory)
            return
        names, gradients = [spec.name for spec in bucket.specs], bucket.gradients()
        groups = [self._group(bucket, memory, family) for family in layout.families]
        payment = with_owed(bucket, memory, layout.whole, self.message_dtype(bucket.flat.dtype))
        rounds = alternate if self.alternating else approximate
        terms, whole_means = yield from rounds(self, groups, payment.parts, memory, bucket)
        errors = self._errors(bucket, memory, layout)
        yield None
        for family, group, found in zip(layout.families, groups, terms, strict=True):
            owed = [errors[name].view(family.shape) for name in group.labels] if errors else None
            settle(group, owed, found, bucket.loss_scale)
            remember(self, memory, group.labels, found, bucket.loss_scale)
            for index, matrix in zip(family.indices, group.matrices, strict=True):
                if gradients[index].dtype != matrix.dtype:
                    error = errors.get(names[index])
                    round_into(gradients[index], matrix.view(-1), error, bucket.loss_scale)
        memory.error.update(errors)
        count = len(layout.whole)
        if count:
            torch._foreach_copy_([gradients[index] for index in layout.whole], list(whole_means[:count]))
        remaining = torch.cat([bucket.flat[:0], *whole_means[count:]])
        keep_unpaid(memory, [names[index] for index in layout.whole], payment, remaining)

    def _group(self, bucket: Bucket, memory: Memory, family: _Family) -> MatrixGroup:
        """Gradients and errors as matrices: views unless the gradient is of 16 bits."""
        names, gradients = [bucket.specs[index].name for index in family.indices], bucket.gradients()
        errors = [memory.error.get(name) for name in names]
        dtype = bucket.specs[0].memory_dtype
        return MatrixGroup(
            names,
            matrices=[gradients[index].to(dtype).view(family.shape) for index in family.indices],
            errors=[None if error is None else error.view(family.shape) for error in errors],
            matrix_rank=family.matrix_rank,
        )

    def _errors(self, bucket: Bucket, memory: Memory, layout: _Layout) -> dict[str, torch.Tensor]:
        """Where to write what stays owed, by name: the tensors of memory, or new ones, one batch a family."""
        errors: dict[str, torch.Tensor] = {}
        for family in layout.families if self.error_feedback else ():
            labels = [bucket.specs[index].name for index in family.indices]
            kept = [memory.error[label] for label in labels if label in memory.error]
            like = bucket.gradients()[family.indices[0]]
            if len(kept) < len(labels) or (like.device.type != "cpu" and stacked(kept) is None):
                kept = list(like.new_empty(len(labels), like.numel(), dtype=bucket.specs[0].memory_dtype))
            errors.update(zip(labels, kept, strict=True))
        return errors


class _Family(NamedTuple):
    """Parameters of a bucket with the same matrix shape and matrix rank, by index."""

    shape: tuple[int, int]
    matrix_rank: int
    indices: tuple[int, ...]


class _Layout(NamedTuple):
    """Which parameters of a bucket are compressed together, and which travel whole."""

    families: tuple[_Family, ...]
    whole: tuple[int, ...]


@lru_cache(maxsize=1024)
def _layout(algorithm: PowerSGD, specs: tuple[ParameterSpec, ...]) -> _Layout:
    """Group a bucket's parameters; made once a bucket layout."""
    families: dict[tuple[tuple[int, int], int], list[int]] = defaultdict(list)
    whole = []
    for index, route in enumerate(algorithm.plan(specs).routes):
        if route.matrix_shape is None or route.matrix_rank is None:
            whole.append(index)
        else:
            families[route.matrix_shape, route.matrix_rank].append(index)
    return _Layout(tuple(_Family(*key, tuple(indices)) for key, indices in families.items()), tuple(whole))
