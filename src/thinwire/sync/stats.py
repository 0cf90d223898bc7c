"""Figures of a `GradientSync`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.plan import compression_ratio


@dataclass(frozen=True)
class Stats:
    """Figures of a `GradientSync` so far, on this process. Printing them gives some lines to read.

    Attributes:
        steps: Optimizer steps, those that were not finite included.
        averagings: How often gradients were averaged (in each of these steps), or models (every few steps
            after the warm-up, each fragment by itself).
        members: How many have averaged together, at most: processes, machines that send once, or replicas.
            1 if there was no other, so that nothing was sent.
        nonfinite_steps: Steps that were found not to be finite, and which left memory as it was. Whether the
            optimizer skipped them is a `GradScaler`'s to know. With `on_nonfinite="nan"`, algorithms that
            remember nothing (`AllReduce`, `Cast`, `Quantize` without error feedback) have nothing to take
            back: they do not look, unless shards of a model must agree, and such a step counts as any other.
        messages: Collectives of steps; saving a state adds none.
        rounds: Of the messages, how many had to wait for the one before. Each costs a round trip of the
            network at least; messages that travel side by side are one round.
        message_bytes: Their bytes, counted as of an all-reduce (of which a process hands over as many): what
            an all-gather or an all-to-all sends is converted to what would be as much on a ring. If the
            processes of a machine share its messages (`attach(machines=…)`), those of all of them, which
            leave the machine's card; else of this process, and what leaves a machine of several may be more.
        inside_bytes: What this process has sent to others of its machine for that.
        gradient_bytes: Bytes that would have been contributed without compression; also of averaged models,
            those of averaging gradients in every step.
        waiting_seconds: Time the host was blocked: until means had come back, processes had agreed, or an
            accelerator had made known whether all is finite.
        arithmetic_seconds: Time the host spent in Thinwire without being blocked. With an accelerator, that
            of issuing the work.
        exposed_seconds: Time from each step's last gradients being ready until all means were there: what
            did not overlap the backward pass. With an accelerator by its own events, without the steps that
            it has not ended yet.
        relative_error: By route, ‖M − P̂P̂ᵀM‖ / ‖M‖ of this process at the last step; M is gradient plus
            error. Only with error feedback.
        error_norm: By route, ‖M − P̂P̂ᵀM‖: this process's residual after the last step, unscaled.
    """

    steps: int = 0
    averagings: int = 0
    members: int = 1
    nonfinite_steps: int = 0
    messages: int = 0
    rounds: int = 0
    message_bytes: int = 0
    inside_bytes: int = 0
    gradient_bytes: int = 0
    waiting_seconds: float = 0.0
    arithmetic_seconds: float = 0.0
    exposed_seconds: float = 0.0
    relative_error: Mapping[str, float] = field(default_factory=dict)
    error_norm: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return some lines to read, the compression ratio among them; `repr` has every figure."""
        if not self.steps:
            return "no step yet"
        steps = f"{self.steps:,} {'step' if self.steps == 1 else 'steps'}"
        if self.nonfinite_steps:
            steps += f", {self.nonfinite_steps:,} of them not finite"
        if self.averagings != self.steps:
            steps += f", {self.averagings:,} {'averaging' if self.averagings == 1 else 'averagings'}"
        sent = "averaged with no other process, so nothing was sent"
        if self.members > 1:
            sent = (
                f"sent {self.message_bytes:,} bytes in {self.messages:,} messages ({self.rounds:,} rounds), "
                f"in place of {self.gradient_bytes:,} bytes: compression ratio {self.compression_ratio:.1f}"
            )
        lines = [
            steps,
            sent,
            f"seconds: {self.waiting_seconds:.2f} waiting, {self.arithmetic_seconds:.2f} arithmetic; "
            f"{self.exposed_seconds:.2f} not hidden behind the backward pass",
        ]
        if self.inside_bytes:
            lines.insert(2, f"inside of the machine this process sent {self.inside_bytes:,} bytes")
        if self.relative_error:
            # The extremes and one name: a model has hundreds of routes.
            worst = max(self.relative_error, key=lambda label: self.relative_error[label])
            smallest, largest = min(self.relative_error.values()), self.relative_error[worst]
            lines.append(
                f"relative error of the last step: {smallest:.2f} to {largest:.2f}, most that of {worst}"
            )
        return "\n".join(lines)

    @property
    def compression_ratio(self) -> float:
        """Uncompressed over compressed bytes, warm-up included; 1.0 before the first step."""
        return compression_ratio(self.gradient_bytes, self.message_bytes)
