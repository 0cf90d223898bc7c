"""Statistics of a `GradientSync`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.plan import compression_ratio


@dataclass(frozen=True)
class Stats:
    """Statistics of a `GradientSync` so far, on this process. Printing them gives a summary.

    In a resumed run, steps and averagings include earlier ones; messages, bytes and seconds do not.

    Attributes:
        steps: Optimizer steps, including those that were not finite.
        averagings: How often gradients were averaged (in each of these steps), or models (every few steps
            after the warm-up, each fragment by itself).
        members: The most members that have averaged together: processes, machines that send once, or
            replicas. 1 if there was no other, so that nothing was sent.
        nonfinite_steps: Steps found not to be finite; they left memory as it was. Only a `GradScaler` knows
            whether the optimizer skipped them. With `on_nonfinite="nan"`, algorithms that keep no state
            (`AllReduce`, `Cast`, `Quantize` without error feedback) have nothing to undo. They do not check,
            unless the shards of a model must agree, and such a step counts as any other.
        messages: Collectives of steps; saving a state adds none.
        rounds: How many of the messages had to wait for the one before. Each costs at least one round trip of
            the network; messages sent at the same time are one round.
        message_bytes: Bytes of the messages, counted as for an all-reduce (the size of its input). An
            all-gather or an all-to-all counts as the ring all-reduce that sends as many bytes. If the
            processes of a machine share its messages (`attach(machines=…)`), bytes of all of them, which
            leave the machine's NIC; otherwise of this process: a machine with several may send more in all.
        inside_bytes: Bytes this process has sent to others of its machine so that they can share messages.
        gradient_bytes: Bytes that would have been contributed without compression. For averaged models: the
            bytes of averaging gradients in every step.
        waiting_seconds: Time the host was blocked: until means arrived, processes had agreed, or an
            accelerator had reported whether all is finite.
        arithmetic_seconds: Time the host spent in Thinwire without being blocked. With an accelerator, the
            time to issue the work.
        exposed_seconds: Time from each step's last gradient being ready until all means had arrived, which
            did not overlap the backward pass. Accelerators measure it with their own events; steps that have
            not ended on the device yet are left out.
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
        """Return a summary with the compression ratio; `repr` has every figure."""
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
            lines.insert(2, f"inside the machine this process sent {self.inside_bytes:,} bytes")
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
