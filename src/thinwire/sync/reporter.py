"""Reporter: prints the plan, counts steps and messages, warns, and has the observers of steps."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from thinwire.plan import Plan, Route
from thinwire.sync.bucket_plans import BucketPlans
from thinwire.sync.clock import StepClock
from thinwire.sync.stats import Stats

logger = logging.getLogger(__name__)

Errors = tuple[dict[str, float], dict[str, float]]
"""Relative errors and error norms, by route."""


class Reporter:
    """Reports on an engine, for users, watches and hooks."""

    def __init__(self, buckets: BucketPlans, clock: StepClock) -> None:
        self.observers: list[Callable[[bool], None]] = []  # called after every step: was it committed?
        # A `LocalSGD` counts the optimizer's steps, also those between averagings.
        self.adjusted: Callable[[Stats], Stats] = lambda stats: stats
        self._buckets, self._state, self._clock = buckets, buckets.state, clock
        self.gradient_bytes = 0  # of all steps, without compression
        self._has_warned = False
        self._kept_errors: tuple[int, Errors] | None = None  # with the step after which they were kept
        self._printed: tuple[object, Plan] = (None, Plan(()))  # with the bucket plans that it was made from

    @property
    def steps(self) -> int:
        """Steps so far, including those that were not finite."""
        return self._state.steps

    # In print.

    def __str__(self) -> str:
        buckets, plan = self._buckets, self.plan
        group, partition, shards = buckets.transport, buckets.partition, buckets.settings.health_group
        where = f"{group.size} processes, of which this is {group.rank}"
        if group.size == 1:
            where = "this process alone"
        if partition is not None:
            inter_node, intra_node = buckets.inter_node, partition.intra_node
            where = f"{inter_node.size} machines of {intra_node.size} processes, of which this is process "
            where += f"{intra_node.rank} of machine {inter_node.rank}"
        elif shards is not None:
            where = f"{group.size * shards.size} processes, {group.size} replicas of {shards.size} "
            where += f"shards, of which this is shard {shards.rank} of replica {group.rank}"
        lines = [f"{buckets.algorithm} over {where}"]
        if plan.routes and group.size > 1:
            num_compressed = sum(len(route.names) for route in plan.routes if route.is_compressed)
            lines.append(
                f"plan: {num_compressed} of {len(buckets.specs)} parameters compressed, "
                f"{plan.gradient_bytes:,} bytes per step become {plan.message_bytes:,}: "
                f"compression ratio {plan.compression_ratio:.1f}, rounds: {plan.rounds}"
            )
        return "\n".join([*lines, f"so far: {self.counts()}"])

    @property
    def plan(self) -> Plan:
        """How each parameter is sent, in model order."""
        plans, partition = self._buckets.plans, self._buckets.partition
        if plans is not self._printed[0]:  # read in every step, but rarely new
            order = {name: position for position, name in enumerate(self._state.specs)}
            printed = (route for plan in plans for route in plan.routes)
            routes = sorted(
                self._routes_of_machine() if partition else printed, key=lambda route: order[route.names[0]]
            )
            self._printed = plans, Plan(tuple(routes), 1 if partition is None else partition.intra_node.size)
        return self._printed[1]

    def _routes_of_machine(self) -> Iterator[Route]:
        """Yield the routes of parameters, with the bytes of all local ranks."""
        buckets, partition = self._buckets, self._buckets.partition
        assert partition is not None
        if not buckets.specs_of_last:
            partition = partition.preview()
        for specs in buckets.specs_of_last or buckets.model_buckets():
            by_label, parts = defaultdict[str, list[tuple[int, Route]]](list), partition.parts(specs)
            for local_rank in range(partition.intra_node.size):
                for route in buckets.plan(parts.specs_of(local_rank)).routes:
                    by_label[route.label].append((local_rank, route))
            whole = {route.label: route for route in buckets.plan(specs).routes}
            for label, routes in by_label.items():
                if len(routes) == 1:
                    ((local_rank, route),) = routes
                    yield replace(route, detail=f"{route.detail}, by process {local_rank}")
                else:
                    sent_bytes = sum(route.message_bytes for _, route in routes)
                    detail = f"{whole[label].detail}, by {len(routes)} processes"
                    yield replace(whole[label], message_bytes=sent_bytes, detail=detail)

    def warn_of_nonfinite(self) -> None:
        """Log once what happens to a step that is not finite; for adapters whose user applies the means."""
        settings = self._buckets.settings
        # A scaler raises its scale until steps are not finite, and skips them.
        if self._has_warned or settings.scaler_skips:
            return
        self._has_warned = True
        became, then = "zeros", "stats().nonfinite_steps counts such steps"
        if settings.on_nonfinite != "zero":
            became, then = (
                "NaN",
                "A GradScaler skips such a step; without one the optimizer makes the model NaN. If you use "
                'one, pass it as grad_scaler=; if not, choose on_nonfinite="zero" or "raise"',
            )
        words = (
            "one of the first %d steps had mean gradients that were not finite: they became %s on all "
            "processes, and the residual is unchanged. %s. This warning appears only once"
        )
        logger.warning(words, self.steps, became, then)

    # Figures.

    def stats(self) -> Stats:
        """Return the statistics so far. Cost: a norm of each residual, and a host synchronisation."""
        relative_error, error_norm = self._errors()
        unseen_steps, counts = int(self._state.unseen_nonfinite_steps), self.counts()
        if unseen_steps:
            self.warn_of_nonfinite()
        nonfinite_steps = self._state.nonfinite_steps + unseen_steps
        return replace(
            counts, nonfinite_steps=nonfinite_steps, relative_error=relative_error, error_norm=error_norm
        )

    def counts(self) -> Stats:
        """Return `stats()` without errors, and without non-finite steps that the host has not seen."""
        traffic = self._clock.traffic
        counts = Stats(
            steps=self.steps,
            averagings=self.steps,
            members=traffic.members,
            nonfinite_steps=self._state.nonfinite_steps,
            messages=traffic.messages,
            rounds=traffic.rounds,
            message_bytes=traffic.message_bytes if self._buckets.partition is None else traffic.machine_bytes,
            inside_bytes=traffic.inside_bytes,
            gradient_bytes=self.gradient_bytes,
            waiting_seconds=traffic.waiting_seconds,
            arithmetic_seconds=self._clock.arithmetic_seconds,
            exposed_seconds=self._clock.exposed_seconds,
        )
        return self.adjusted(counts)

    def keep_errors(self) -> None:
        """Keep the errors of the last step until the next one, before residuals are averaged."""
        self._kept_errors = self.steps, self._errors()

    def forget_errors(self) -> None:
        """Compute errors from memory again."""
        self._kept_errors = None

    def _errors(self) -> Errors:
        """Return the last step's relative errors and error norms by route, read back together."""
        if self._kept_errors is not None and self._kept_errors[0] == self.steps:
            return self._kept_errors[1]
        diagnoses = [plan.diagnose(self._state.memory) for plan in self._buckets.plans]
        found = [diagnosis for diagnosis in diagnoses if diagnosis is not None]
        if not found:
            return {}, {}
        # All in one tensor: reading each number by itself would make the host wait each time.
        device = found[0].error_norms.device
        numbers = [torch.stack([one.relative_errors, one.error_norms]).to(device) for one in found]
        labels = [label for one in found for label in one.labels]
        relative, norms = (dict(zip(labels, row, strict=True)) for row in torch.cat(numbers, dim=1).tolist())
        return relative, norms
