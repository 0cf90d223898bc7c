"""PowerSGD, layer by layer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from thinwire.algorithms.base import NO_CHOICES, BucketPlan, Choices, Memory, Replanning
from thinwire.algorithms.lowrank.budget import measured, within_bytes, within_error
from thinwire.algorithms.lowrank.config import LowRank, LowRankRoute
from thinwire.algorithms.lowrank.plan import LowRankPlan
from thinwire.algorithms.lowrank.powersgd_plan import PowerSGDPlan
from thinwire.algorithms.lowrank.slots import FACTOR
from thinwire.algorithms.lowrank.wire import FactorWire, coded_bytes, num_blocks
from thinwire.checks import number, true_or_false, whole_count, whole_number
from thinwire.errors import ConfigError
from thinwire.plan import BUCKET_SEPARATOR, ParameterSpec

__all__ = ["PowerSGD"]

# With fewer it was not measured what training loses.
FACTOR_BITS = 8


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRank):
    """Send two low-rank factors of every gradient matrix instead of the matrix.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019, arXiv 1905.13727), algorithms 1 and 2,
    with one change: a process's error is what remains of its own gradient, M − P̂ P̂ᵀ M, not of the mean.

    Gradients of any floating type: factors are computed, and the error kept, in fp32 (of fp64 gradients
    in fp64, by PyTorch's products). Vectors, scalars and matrices that would shrink too little travel
    uncompressed in the first message.

    Args:
        matrix_rank: Rank r of the factors; more is more exact and costs proportionally more bytes.
        min_compression_ratio: A matrix is compressed only if that shrinks it more than this, in bytes:
            (rows + columns) · r · power_iterations · ratio < rows · columns, with half of the right side
            where gradients of 16 bits have factors of 32. With 0 every matrix is. A bucket that would not
            shrink at all (with a ratio of 1 or more) travels uncompressed, in its own type.
        warmup_steps: Steps at the start that average uncompressed gradients.
        error_feedback: Add to each gradient what earlier steps did not transmit of it. Without it
            the result is biased and training usually stalls.
        warm_start: Start each step's power iteration from the last step's right factor.
        seed: Of the random factors, the same on every process.
        wire_dtype: "fp16" or "bf16" to send every message in 16 bits; None for fp32 (fp64 of
            fp64 gradients). "bf16" has fp32's range. "fp16" is for gradients that a loss
            scale keeps in its range: of factors, what is above 65 504 is cut off and what is below
            6e-8 vanishes (both stay in the residual, as does what a process rounds off its own factors);
            uncompressed gradients overflow as with `Cast`. Lost for good are the rounding of the factors' sum
            and all rounding of uncompressed gradients.
        power_iterations: How often the two rounds are repeated in a step. With `alternating`, how
            many single rounds a step takes; their results add up.
        matrix_ranks: Of single parameters, by name, where it is another than `matrix_rank`.
        bytes_per_step: Choose the matrix ranks by what the run itself measures, so that a step sends at
            most so many bytes (`alternating`: two steps twice so many) and leaves out the least energy of
            the mean gradient and its residual. Until the first choice the settings above hold as far as
            they send no more; else no matrix rank is above the highest at which a step does not.
        max_relative_error: The same, with the smallest matrix ranks that leave out at most this share of each
            matrix's norm, above 0 and below 1.
        replan_every_steps: Committed steps from one choice to the next, which goes at most a quarter up or
            down. Each costs a message of 4 · rows numbers for each matrix, a pass over the error and two host
            synchronisations.
        alternating: One round instead of two: project on the left factor in one step, on the right in
            the next. Half the bytes and messages at the same matrix rank, and a rougher approximation.
        factor_bits: 8 to send factors in 8 bits, in blocks of 64 elements with a scale of their own: about a
            quarter of fp32's bytes, and twice the rounds. What that rounds off stays in the residual. What
            travels uncompressed does so as without it. None for `wire_dtype`. (Of a `bytes_per_step` the
            first choice leaves out what fills up the members' shares: at most 132 bytes for each member,
            bucket and iteration.)

    Cost per step: two rounds, the second of all buckets together, of r · (rows + columns) elements for
    each matrix; an fp32 error of the size of the gradients (fp64 of fp64) and, of gradients in 16 bits, an
    fp32 copy until the step's end; one host synchronisation, for the finite check (none without
    `host_check`).

    Raises:
        ConfigError: A setting is of the wrong type or out of range.

    Examples:
        >>> print(PowerSGD(matrix_rank=2).plan([ParameterSpec("weight", (64, 32), (32, 1), torch.float32)]))
        parameter     travels as  bytes before  bytes after
        weight     64×32, rank 2         8,192          768
        total                            8,192          768
        compression ratio 10.7
    """

    matrix_rank: int = 4
    alternating: bool = False
    factor_bits: int | None = None
    matrix_ranks: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    bytes_per_step: int | None = None
    max_relative_error: float | None = None
    replan_every_steps: int = 100

    @property
    def factor_pairs(self) -> float:
        """Left and right factors of a matrix that a step sends, on average."""
        return self.power_iterations / 2 if self.alternating else self.power_iterations

    def factor_bytes(self, shape: tuple[int, int], matrix_rank: int, dtype: torch.dtype) -> int:
        """As `LowRank.factor_bytes`; of coded factors those of whole blocks."""
        if self.factor_bits is None:
            return super().factor_bytes(shape, matrix_rank, dtype)
        blocks = sum(num_blocks(side, matrix_rank) for side in shape)
        return int(coded_bytes(blocks, self.factor_bits) * self.factor_pairs)

    @property
    def sees_buckets(self) -> bool:
        """As `Algorithm.sees_buckets`: with coded factors and error feedback they do."""
        # Who averages a block keeps what coding its mean loses, and which blocks those are depends on the
        # bucket.
        return self.factor_bits is not None and self.error_feedback

    def __post_init__(self) -> None:
        super().__post_init__()
        self._keep("alternating", true_or_false("alternating", self.alternating))
        if self.factor_bits is not None:
            self._keep("factor_bits", whole_number("factor_bits", self.factor_bits, minimum=1))
            if self.factor_bits != FACTOR_BITS:
                raise ConfigError(f"factor_bits must be {FACTOR_BITS} or None, got {self.factor_bits!r}")
        try:
            ranks = dict(self.matrix_ranks)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"matrix_ranks must map names to matrix ranks, got {self.matrix_ranks!r}"
            ) from error
        # Sorted: settings are compared as text, and may have been given in any order.
        checked = [(str(n), whole_number(f"the matrix rank of {n}", r, minimum=1)) for n, r in ranks.items()]
        self._keep("matrix_ranks", tuple(sorted(checked)))
        self._keep(
            "replan_every_steps", whole_count("replan_every_steps", self.replan_every_steps, minimum=1)
        )
        if self.bytes_per_step is not None:
            self._keep("bytes_per_step", whole_count("bytes_per_step", self.bytes_per_step, minimum=1))
        self._check_budget()

    def _check_budget(self) -> None:
        error = self.max_relative_error
        if error is not None:
            self._keep("max_relative_error", number("max_relative_error", error, minimum=0))
            if not 0 < error < 1:
                raise ConfigError(f"max_relative_error must be above 0 and below 1, got {error!r}")
        if self.bytes_per_step is not None and error is not None:
            raise ConfigError("got bytes_per_step and max_relative_error, expected one of them")
        if self.chooses_ranks and not (self.error_feedback and self.warm_start):
            raise ConfigError(
                "bytes_per_step and max_relative_error choose by what error_feedback and warm_start keep; "
                "leave both on"
            )
        if self.chooses_ranks and self.alternating and self.power_iterations > 1:
            raise ConfigError(
                "bytes_per_step and max_relative_error do not go with alternating and power_iterations above "
                "1: a step's factors then tell only a part of the matrix"
            )

    @property
    def chooses_ranks(self) -> bool:
        """Whether the matrix ranks follow what the run measures."""
        return self.bytes_per_step is not None or self.max_relative_error is not None

    def prepare(
        self, specs: Sequence[ParameterSpec], choices: Choices = NO_CHOICES, *, num_members: int = 1
    ) -> BucketPlan:
        """As `Algorithm.prepare`: every matrix that shrinks enough is compressed.

        Nothing is, if the bucket as a whole does not shrink.
        """
        ranks = {**dict(self.matrix_ranks), **choices}
        # Of whole parameters, where these are shards: the shards of a replica must decide alike.
        wholes = [spec.whole for spec in specs]
        uncompressed = tuple(
            self.uncompressed_route(spec, self.uncompressed_dtype(spec.dtype)) for spec in wholes
        )
        routes = tuple(
            # What has one row is seen as its transpose, of which a shard is no part.
            route
            if spec.cut is not None and spec.cut.shape[0] == 1
            else self._route(whole, ranks.get(spec.name))
            for spec, whole, route in zip(specs, wholes, uncompressed, strict=True)
        )
        compresses = any(route.is_compressed for route in routes)
        # Beside factors all of a bucket travels in their type: gradients of 16 bits grow to 32 by that.
        before = sum(route.message_bytes for route in uncompressed)
        shrinks = sum(route.message_bytes for route in routes) * min(1.0, self.min_compression_ratio) < before
        chosen = tuple(map(_of_shard, specs, routes if compresses and shrinks else uncompressed))
        wire = FactorWire(self.wire_dtype, self.factor_bits, num_members, self.error_feedback)
        filled = self._filled(chosen, num_members)
        return PowerSGDPlan(tuple(specs), filled, self, wire, self.alternating)

    def _filled(self, routes: tuple[LowRankRoute, ...], num_members: int) -> tuple[LowRankRoute, ...]:
        """Let the largest of coded routes bear what fills up the members' shares of the blocks."""
        kinds = [(each.matrix_shape, each.matrix_rank) for each in routes if each.is_compressed]
        if self.factor_bits is None or not kinds:
            return routes
        missing = 0
        # Left and right factors travel by themselves, so each of the two is filled up.
        for side in (0, 1):
            blocks = sum(num_blocks(shape[side], rank) for shape, rank in kinds if shape and rank)
            missing += -blocks % num_members
        fill_bytes = int(coded_bytes(missing, self.factor_bits) * self.factor_pairs)
        # Some route must bear it, so that the plan's total is what a step sends.
        largest = max((each for each in routes if each.is_compressed), key=lambda each: each.message_bytes)
        filled = replace(largest, message_bytes=largest.message_bytes + fill_bytes)
        return tuple(filled if each is largest else each for each in routes)

    def _route(self, spec: ParameterSpec, wanted: int | None) -> LowRankRoute:
        shape = spec.matrix_shape
        if self.chooses_ranks:
            wanted = min(wanted or self.matrix_rank, self._max_rank(spec))
        matrix_rank = self.matrix_rank_of(shape, spec.dtype, wanted) if shape else None
        if shape is None or matrix_rank is None:
            return self.uncompressed_route(spec, self.message_dtype(spec.dtype))
        route = self.compressed_route([spec], shape, matrix_rank)
        coding = "" if self.factor_bits is None else f", {self.factor_bits} bits"
        return replace(route, detail=route.detail + coding)

    def _max_rank(self, spec: ParameterSpec) -> int:
        """Return the largest matrix rank at which a matrix is worth compressing."""
        shape = spec.matrix_shape or (1, 1)
        ranks = range(1, min(shape) + 1)
        # By bisection, for bytes grow with the matrix rank: a model may have thousands of matrices.
        return bisect_left(ranks, True, key=lambda r: self.matrix_rank_of(shape, spec.dtype, r) is None) or 1

    def check_model(self, specs: Sequence[ParameterSpec]) -> None:
        """As `Algorithm.check_model`; refuse matrix ranks of unknown parameters, and too few bytes."""
        super().check_model(specs)
        unknown = sorted(dict(self.matrix_ranks).keys() - {spec.name for spec in specs})
        if specs and unknown:
            raise ConfigError(f"matrix_ranks has {unknown[0]!r}, which is no parameter of the model")
        if any(spec.cut is not None for spec in specs) and (self.alternating or self.chooses_ranks):
            raise ConfigError(
                "alternating, bytes_per_step and max_relative_error do not go with whole_matrices=True; "
                "leave them out, or attach without whole_matrices"
            )
        if any(spec.cut is not None for spec in specs) and self.factor_bits is not None:
            raise ConfigError("factor_bits does not go with whole_matrices=True; leave out one of them")
        # A budget never goes below matrix rank 1.
        routes = replace(self, matrix_rank=1, matrix_ranks=()).plan(specs).routes
        # In a bucket of its own what is not compressed travels in its own type.
        lowest = sum(min(route.message_bytes, route.gradient_bytes) for route in routes)
        if self.bytes_per_step is not None and lowest > self.bytes_per_step:
            raise ConfigError(
                f"bytes_per_step is {self.bytes_per_step}, but this model sends {lowest} at matrix rank 1"
            )

    def first_choices(self, specs: Sequence[ParameterSpec]) -> Choices:
        """As `Algorithm.first_choices`: none, but for a `bytes_per_step` that the settings exceed.

        Then matrix ranks are cut off at the highest that keeps to it.
        """
        if self.bytes_per_step is None or not specs:
            return NO_CHOICES
        plan = cast(LowRankPlan, self.prepare(specs))
        if _sent_bytes(plan) <= self.bytes_per_step:
            return NO_CHOICES
        # Nothing is measured yet, so all are cut alike.
        ranks = {route.label: route.matrix_rank or 1 for route in plan.compressed}

        def cut(highest: int) -> Choices:
            return {name: min(matrix_rank, highest) for name, matrix_rank in ranks.items()}

        fitting = bisect_right(
            range(1, max(ranks.values(), default=1) + 1),
            self.bytes_per_step,
            key=lambda highest: _sent_bytes(self.prepare(specs, cut(highest))),
        )
        return cut(max(fitting, 1))

    def resumed_choices(
        self, saved: Choices | None, memory: Memory, specs: Sequence[ParameterSpec]
    ) -> Choices:
        """As `Algorithm.resumed_choices`: those chosen last, unless they exceed the budget.

        Where the state has none, they are the matrix ranks of the factors. Without a budget there are none.
        """
        if not self.chooses_ranks:
            return NO_CHOICES
        first = self.first_choices(specs)
        if not saved:
            saved = {name: len(each) for name, each in memory[FACTOR].items() if BUCKET_SEPARATOR not in name}
        resumed = {**first, **saved}
        # The state may be of a run that was allowed more.
        fits = self.bytes_per_step is None or _sent_bytes(self.prepare(specs, resumed)) <= self.bytes_per_step
        return resumed if fits else first

    @property
    def plans_anew(self) -> bool:
        """As `Algorithm.plans_anew`: with a budget."""
        return self.chooses_ranks

    def is_replan_due(self, step: int) -> bool:
        """Return whether it is time: with a budget, every `replan_every_steps`, once past the warm-up."""
        return self.chooses_ranks and step > self.warmup_steps and step % self.replan_every_steps == 0

    def replan(self, plans: Sequence[BucketPlan], memory: Memory) -> Replanning:
        """As `Algorithm.replan`: by the last factors and the residual; no message if nothing has factors."""
        specs = {spec.name: spec for plan in plans for spec in plan.specs}
        # Statistics travel by a plan without factors.
        factored = [plan for plan in plans if isinstance(plan, PowerSGDPlan)]
        routes = [route for plan in factored for route in plan.routes]
        known = [route for route in routes if route.is_compressed and route.label in memory[FACTOR]]
        if not known:
            return NO_CHOICES
        max_ranks = {route.label: self._max_rank(specs[route.label]) for route in known}
        # Of coded factors as many blocks as each rank could take by itself: together they take no more.
        rank_bytes = {
            route.label: self.factor_bytes(route.matrix_shape or (0, 0), 1, specs[route.label].dtype)
            for route in known
        }
        spectra = yield from measured(known, rank_bytes, max_ranks, memory)
        if self.bytes_per_step is None:
            return within_error(spectra, self.max_relative_error or 1.0)
        uncompressed = [route for plan in plans for route in plan.routes if route.label not in spectra]
        others = sum(route.message_bytes for route in uncompressed)
        if self.factor_bits is not None:
            # At most so much fills up the shares, of the left factors and of the right ones.
            missing = sum(2 * (plan.wire.num_members - 1) for plan in factored)
            others += int(coded_bytes(missing, self.factor_bits) * self.factor_pairs)
        return within_bytes(spectra, self.bytes_per_step - others)


def _sent_bytes(plan: BucketPlan) -> int:
    return sum(route.message_bytes for route in plan.routes)


def _of_shard(spec: ParameterSpec, route: LowRankRoute) -> LowRankRoute:
    """Return the route of this process's shard of a parameter, given that of the whole one."""
    if spec.cut is None:
        return route
    whole_bytes = route.message_bytes
    if route.matrix_shape is None:
        message_bytes = whole_bytes * spec.numel // max(1, spec.whole.numel)
        return replace(route, gradient_bytes=spec.gradient_bytes, message_bytes=message_bytes)
    rows, columns = route.matrix_shape
    # Of the left factor a shard averages its own rows; of the right one, which all shards have, a share.
    share = spec.numel // columns + -(-columns // spec.cut.num_shards)
    return replace(
        route,
        gradient_bytes=spec.gradient_bytes,
        message_bytes=whole_bytes * share // (rows + columns),
        detail=f"{route.detail}, with {spec.cut.num_shards} shards",
    )
