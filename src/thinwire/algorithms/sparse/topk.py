"""Top-k: of each chunk of a gradient only the largest entries, in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Literal

import torch

from thinwire.algorithms.base import (
    Algorithm,
    Bucket,
    BucketPlan,
    Diagnosis,
    Memory,
    Slot,
)
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.requests import AllFinite, AllGather, Commit, Requests
from thinwire.algorithms.sparse.message import Entries, Message
from thinwire.checks import number, whole_number
from thinwire.errors import ConfigError
from thinwire.kernels.base import SentEntries
from thinwire.kernels.dispatch import all_finite, entry_kernels_for
from thinwire.kernels.matrices import round_into
from thinwire.plan import ParameterSpec, Route
from thinwire.tensors import accelerators
from thinwire.tensors.blocks import chunks_of

BITS = (2, 4, 8, 16)
MAX_CHUNK = 1 << 16

Merge = Literal["members", "senders"]
MERGES = ("members", "senders")

REDUCTION = Slot("reduction", is_local=True, is_saved=False)
"""By how much sending has reduced the squared norm of this member's residual, one number for each parameter:
shows how much was not sent."""


@dataclass(frozen=True, kw_only=True)
class TopK(Algorithm):
    """Send the largest entries of each chunk of a gradient, in few bits, and remember the rest.

    Each member adds its residual, weakened by `error_decay`, to its gradient, and sends the entries of
    largest magnitude of each chunk: where they stand and what they are. What is not sent, and what the few
    bits round off, is its new residual. With `LocalSGD(…, algorithm=TopK())` this is SparseLoCo.

    Sources: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (arXiv 2508.15706), for
    chunks, decay and few bits; Lin et al., "Deep Gradient Compression" (arXiv 1712.01887), for sparse
    gradients with error feedback.

    **Bytes grow with the group.** Every member receives what each of the others sends (an all-gather), so
    what a step costs grows in proportion to the members, where an average costs about the same in any group.
    The plan counts that: bytes as of an all-reduce, see `Stats`. With the defaults, fp32 and large
    parameters the compression ratio is about 390 / members.

    Args:
        density: Share of the entries of each chunk that is sent, above 0 and at most 1; at least one entry.
        bits: Of each entry that is sent, its sign among them. With 2 an entry is one of two magnitudes, which
            each chunk has of its own: the two that leave the least squared error. With 4 or 8, one of 8 or
            128 that lie evenly between the smallest and the largest that is sent of the chunk. With 16, bf16.
        chunk: Entries of a chunk, at most 65,536. Chunks begin anew at each parameter, in the order of
            memory, so results do not depend on buckets.
        error_decay: What the residual is multiplied by in each step, above 0 and at most 1. Below 1, what is
            not sent is forgotten by and by: it is worth something only as long as it still says where to go.
        merge: "senders" for the mean over those that have sent an entry, "members" for the mean over all,
            where what was not sent counts as zero. With "senders" an entry that only one member has sent
            moves by all of that member's, as many times farther as there are members. A byte GPT of 0.18 M
            parameters, averaged every 15 steps of AdamW by 4 members for 600 steps (2 seeds), came
            0.8 % below and just to the loss of averaging whole changes with "senders", and 5.4 % above with
            "members"; 2 % above where the outer rate was 2.5.

    The residual is what a member has not sent itself. With "members" and an `error_decay` of 1, the sum of
    results and the mean residual is the sum of true means: nothing is lost. With "senders" results are larger
    than the mean of what was sent, so the residual does not tell what they lack; and where uneven inputs are
    divided by the contributors (`thinwire.join`), which raises what goes in, they are too large: use
    "members" there.

    Cost per step: one round, an all-gather of (bits + 8) · density bits for each element, and 32 for
    each chunk; the residual, fp32 (fp64 of fp64 gradients), of the size of the gradients; arithmetic of about
    13 copies of the gradients on one CPU thread with Numba (25 without), of two members, and one or two more
    for each other one; one host synchronisation, for the finite check (none without `host_check`).

    Raises:
        ConfigError: A setting is of the wrong type or out of range.

    Examples:
        >>> specs = [ParameterSpec("weight", (64, 64), (64, 1), torch.float32)]
        >>> plan = TopK().prepare(specs, num_members=4)
        >>> plan.routes[0].detail, plan.routes[0].message_bytes
        ('64 of 4,096 entries, 2 bits, from each of 4 members', 168)
    """

    slots = (ERROR, REDUCTION)
    always_shown = ("density",)
    sends_few_entries = True

    density: float = 1 / 64
    _: KW_ONLY
    bits: int = 2
    chunk: int = 4096
    error_decay: float = 0.95
    merge: Merge = "senders"

    def __post_init__(self) -> None:
        for name in ("density", "error_decay"):
            share = float(number(name, getattr(self, name), minimum=0))
            if not 0 < share <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, got {getattr(self, name)!r}")
            object.__setattr__(self, name, share)
        bits = whole_number("bits", self.bits, minimum=2)
        if bits not in BITS:
            raise ConfigError(f"bits must be 2, 4, 8 or 16, got {self.bits!r}")
        chunk = whole_number("chunk", self.chunk, minimum=1)
        if chunk > MAX_CHUNK:
            raise ConfigError(f"chunk must be at most {MAX_CHUNK}, got {self.chunk!r}")
        if self.merge not in MERGES:
            raise ConfigError(f'merge must be "members" or "senders", got {self.merge!r}')
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "chunk", chunk)

    @property
    def indivisible(self) -> int:
        """As `Algorithm.indivisible`: a chunk."""
        return self.chunk

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        """As `Algorithm.prepare`: of every parameter its largest entries, in one message for the bucket."""
        message = Message(chunks_of(specs, self.chunk, self.density), self.density, self.bits)
        bits_of, entries = [0] * len(specs), [0] * len(specs)
        for chunks in message.parts:
            for run in chunks.runs:
                bits_of[run.parameter] += run.num_chunks * message.bits_of(chunks)
                entries[run.parameter] += run.num_chunks * chunks.kept
        # Streams are of the whole bucket, so no parameter has bytes of its own; what is divided here adds up.
        own_bytes = [bits // 8 for bits in bits_of]
        largest_one = max(range(len(specs)), key=bits_of.__getitem__)
        own_bytes[largest_one] += message.num_bytes - sum(own_bytes)  # and what fills up the last bytes
        message_bytes = _halves(own_bytes, num_members)
        routes = tuple(
            Route(
                (spec.name,),
                spec.gradient_bytes,
                sent_bytes,
                f"{entries[index]:,} of {spec.numel:,} entries, {self.bits} bits, from each of "
                f"{num_members} members",
                is_compressed=True,
            )
            for index, (spec, sent_bytes) in enumerate(zip(specs, message_bytes, strict=True))
        )
        return TopKPlan(tuple(specs), routes, self, message)


def _halves(handed_bytes: Sequence[int], num_members: int) -> list[int]:
    """Return bytes that are gathered from each member, counted as of an all-reduce, with the same total."""
    ends = [0]
    for each in handed_bytes:
        ends.append(ends[-1] + each)
    counted = [end * num_members // 2 for end in ends]
    return [after - before for before, after in pairwise(counted)]


@dataclass(frozen=True)
class TopKPlan(BucketPlan):
    """The largest entries of a bucket's chunks.

    Attributes:
        config: The settings.
        message: How they are packed.
    """

    config: TopK
    message: Message

    def exchange(self, bucket: Bucket, memory: Memory) -> Requests:
        """As `BucketPlan.exchange`: one round; none for a bucket without elements."""
        if not self.message.parts:
            yield Commit(all_finite, writes=False)
            return
        scale = bucket.loss_scale
        wanted = bucket.flat.to(self.specs[0].memory_dtype)  # the bucket itself, if it is of this type
        # What is wanted becomes the residual, so it is in its units: of the unscaled loss.
        if scale is not None:
            wanted.div_(scale)
        self._add_residual(bucket, memory, wanted)
        gathered = yield AllGather(self.message.packed(wanted))
        sent = self.message.unpacked(gathered, wanted.dtype)
        yield Commit(AllFinite((sent.scales,)))
        own, values = sent.places[bucket.rank], sent.values[bucket.rank]
        before = wanted[own]
        after = before - values
        self._note(memory, before, after)
        wanted[own] = after
        # In fp32 the bucket itself is the residual until it becomes the mean, so it is copied out first. Of
        # other types, what rounding to the gradient's own loses is added to the residual before.
        if wanted is bucket.flat:
            self._remember(bucket, memory, wanted)
            self._merge(wanted.zero_(), sent, scale)
            return
        mean = self._merge(torch.zeros_like(wanted), sent, scale)
        round_into(bucket.flat, mean, wanted, scale)
        self._remember(bucket, memory, wanted)

    def _add_residual(self, bucket: Bucket, memory: Memory, wanted: torch.Tensor) -> None:
        kept = [
            (part, memory[ERROR][spec.name])
            for part, spec in zip(bucket.split(wanted), self.specs, strict=True)
            if spec.name in memory[ERROR]
        ]
        if kept:
            parts, errors = zip(*kept, strict=True)
            torch._foreach_add_(parts, errors, alpha=self.config.error_decay)

    def _merge(self, result: torch.Tensor, sent: Entries, loss_scale: torch.Tensor | None) -> torch.Tensor:
        """Add what members have sent to zeros."""
        values = sent.values if loss_scale is None else sent.values * loss_scale
        by_senders = self.config.merge == "senders"
        if not by_senders:
            values = values / len(sent.places)
        kept = self.message.kept(result.device)
        entries = SentEntries(sent.places, values, sent.values, kept, by_senders)
        entry_kernels_for(result).add(result, entries)
        return result

    def _note(self, memory: Memory, before: torch.Tensor, after: torch.Tensor) -> None:
        """Keep, for each parameter, how much less remains of it than there was."""
        parameters, sizes = zip(*self.message.runs, strict=True)
        # By run, which lie one behind the other: to add entry by entry to their parameters would be to add in
        # an order that CUDA does not promise. In double: the difference of two large squares may be small.
        if accelerators.pays_per_launch(before.device):
            parts = [*before.split_with_sizes(sizes), *after.split_with_sizes(sizes)]
            squares = torch.stack(
                torch._foreach_norm(parts, 2, accelerators.widest_dtype(before.device))
            ).square_()
            reduced = list((squares[: len(sizes)] - squares[len(sizes) :]).unbind())
        else:
            difference = before.double().square().sub_(after.double().square())
            reduced = [part.sum() for part in difference.split_with_sizes(sizes)]
        reductions: dict[str, torch.Tensor] = {}
        first_ones, second_ones = [], []
        for parameter, of_run in zip(parameters, reduced, strict=True):
            first = reductions.setdefault(self.specs[parameter].name, of_run)
            # The last chunk of a parameter may be shorter, and then is a run of its own.
            if first is not of_run:
                first_ones.append(first)
                second_ones.append(of_run)
        if second_ones:
            torch._foreach_add_(first_ones, second_ones)
        memory[REDUCTION].update(reductions)

    def _remember(self, bucket: Bucket, memory: Memory, residual: torch.Tensor) -> None:
        """Copy the residual to where the last one is, if there is one."""
        names = [spec.name for spec in self.specs]
        if not memory[ERROR].keys() >= set(names):
            memory[ERROR].update(zip(names, bucket.split(torch.empty_like(residual)), strict=True))
        torch._foreach_copy_([memory[ERROR][name] for name in names], list(bucket.split(residual)))

    def diagnose(self, memory: Memory) -> Diagnosis | None:
        """Return how much of gradient and residual was not sent. Cost: one norm for each parameter."""
        names = [
            spec.name for spec in self.specs if {spec.name} <= memory[ERROR].keys() & memory[REDUCTION].keys()
        ]
        if not names:
            return None
        dtype = accelerators.widest_dtype(memory[ERROR][names[0]].device)
        remaining = torch.stack([memory[ERROR][name].to(dtype).norm() for name in names])
        # What few bits round up may leave more than there was.
        reduced = torch.stack([memory[REDUCTION][name] for name in names]).clamp_min_(0)
        wanted = (remaining.square() + reduced).sqrt_()
        return Diagnosis(names, torch.where(wanted > 0, remaining / wanted, 0.0), remaining)
