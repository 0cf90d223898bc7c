"""Top-k: of each chunk of a gradient only the largest entries, in few bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

import torch

from thinwire.algorithms.base import Algorithm, Bucket, BucketPlan, Diagnosis, Memory, Slot
from thinwire.algorithms.error_feedback import ERROR, parts_with_residual
from thinwire.algorithms.requests import AllFinite, AllGather, Commit, Requests
from thinwire.algorithms.topk_message import SCALE_DTYPE, TopKMessage
from thinwire.checks import number, whole_number
from thinwire.errors import ConfigError
from thinwire.kernels.base import EntryLayout, EntryPasses, ScatterArgs, SentEntries, TopKQuery
from thinwire.kernels.dispatch import all_finite, entry_passes_for
from thinwire.kernels.matrices import round_into
from thinwire.kernels.torch_entries import add, largest
from thinwire.plan import ParameterSpec, Route
from thinwire.tensors import accelerators
from thinwire.tensors.blocks import chunks_of
from thinwire.tensors.layout import concat_view

BITS = (2, 4, 8, 16)
MAX_CHUNK = 1 << 16

# In how many parts of a chunk's largest magnitude the others are counted where sums must not depend on their
# order. The sum of the 65,536 that a chunk has at most is below 2^63.
PARTS = 1 << 46

REDUCTION = Slot("reduction", is_local=True, is_saved=False)
"""How much sending has reduced the squared norm of this member's residual: shows how much was not sent.

A number for each parameter or, by some kernels, for each of its chunks.
"""


@dataclass(frozen=True, kw_only=True)
class TopK(Algorithm):
    """Send the largest entries of each chunk of a gradient, in few bits, and remember the rest.

    Each member adds its residual, weakened by `error_decay`, to its gradient, and sends the entries of
    largest magnitude of each chunk: where they stand and what they are. What is not sent, and what the few
    bits round off, is its new residual. With `LocalSGD(…, algorithm=TopK())` this is SparseLoCo.

    Sources: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (arXiv 2508.15706), for
    chunks, decay and few bits; Lin et al., "Deep Gradient Compression" (arXiv 1712.01887), for sparse
    gradients with error feedback.

    **Bytes grow with the group.** Every member receives what each of the others sends (an all-gather), while
    an average costs about the same in any group. The plan counts that: bytes as of an all-reduce, see
    `Stats`. With the defaults, fp32 and large parameters the compression ratio is about 390 / members.

    Args:
        density: Share of the entries of each chunk that is sent, above 0 and at most 1; at least one entry.
        bits: Of each entry that is sent, its sign among them. With 2 an entry is one of two magnitudes of its
            chunk: the two that leave the least squared error. With 4 or 8, one of 8 or 128 that lie evenly
            between the smallest and the largest that is sent of the chunk. With 16, bf16.
        chunk: Entries of a chunk, at most 65,536. Each parameter begins a new one, in the order of memory, so
            results do not depend on buckets.
        error_decay: What the residual is multiplied by in each step, above 0 and at most 1. Below 1, what is
            not sent is slowly forgotten: it is worth something only as long as it still says where to go.
        merge: "senders" for the mean over those that have sent an entry, "members" for the mean over all,
            in which what was not sent counts as zero. With "senders" an entry that only one member has sent
            moves by all of that member's. A byte GPT of 0.18 M parameters, averaged every 15 steps of AdamW
            by 4 members for 600 steps (2 seeds), came 0.8 % below and just to the loss of averaging whole
            changes with "senders", and 5.4 % above with "members"; 2 % above with an outer rate of 2.5.

    With "members" and an `error_decay` of 1, the sum of results and the mean residual is the sum of true
    means: nothing is lost. With "senders" results are larger than the mean of what was sent; if uneven inputs
    are divided by the contributors (`thinwire.join`), they are too large: use "members" then.

    Cost per step: one round, an all-gather of (bits + 8) · density bits for each element, and 32 for each
    chunk; the residual, fp32 (fp64 of fp64 gradients), of the size of the gradients; arithmetic of about 13
    copies of the gradients on one CPU thread with Numba (25 without), and one or two more for each member
    beyond two, or five launches a bucket by Triton, for chunks up to 4,096 of which at most 1,024 entries are
    sent; one host synchronisation, for the finite check (none without `host_check`).

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
    merge: Literal["members", "senders"] = "senders"

    def __post_init__(self) -> None:
        for name in ("density", "error_decay"):
            share = float(number(name, getattr(self, name), minimum=0))
            if not 0 < share <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, got {getattr(self, name)!r}")
            object.__setattr__(self, name, share)
        bits, chunk = (whole_number(name, getattr(self, name), minimum=1) for name in ("bits", "chunk"))
        if bits not in BITS:
            raise ConfigError(f"bits must be 2, 4, 8 or 16, got {self.bits!r}")
        if chunk > MAX_CHUNK:
            raise ConfigError(f"chunk must be at most {MAX_CHUNK}, got {self.chunk!r}")
        if self.merge not in ("members", "senders"):
            raise ConfigError(f'merge must be "members" or "senders", got {self.merge!r}')
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "chunk", chunk)

    @property
    def split_granularity(self) -> int:
        return self.chunk

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        """Send the largest entries of every parameter, in one message for the bucket."""
        message = TopKMessage(chunks_of(specs, self.chunk, self.density), self.density, self.bits)
        routes = [
            Route(
                (spec.name,),
                spec.gradient_bytes,
                message_bytes,
                f"{sent:,} of {spec.numel:,} entries, {self.bits} bits, from each of {num_members} members",
                is_compressed=True,
            )
            for spec, (sent, message_bytes) in zip(
                specs, message.shares(len(specs), num_members), strict=True
            )
        ]
        return TopKPlan(tuple(specs), tuple(routes), self, message)


class Entries(NamedTuple):
    """The entries of a bucket that all members have sent."""

    indices: torch.Tensor  # in the bucket, int64, (members, entries); of each member no index twice
    values: torch.Tensor  # (members, entries)
    scales: torch.Tensor  # what values were made of: not finite if something of a member was not


@dataclass(frozen=True)
class TopKPlan(BucketPlan):
    """The largest entries of a bucket's chunks."""

    config: TopK
    message: TopKMessage

    def run(self, bucket: Bucket, memory: Memory) -> Requests:
        """Average the bucket by the largest entries of each chunk, in one round; in none without elements.

        1. values ← gradient + error_decay · residual.
        2. Of each chunk take the entries of largest magnitude, in few bits, with their positions.
        3. Gather what all members have taken.
        4. Behind the commit: residual ← values less what this member has sent; gradient ← the sum of what was
           sent of an entry, over those that have sent it, or over all members (`merge`).
        """
        if not self.message.parts:
            yield Commit(all_finite, writes=False)
            return
        layout = self.message.layout_on(bucket.flat.device)
        passes = entry_passes_for(bucket.flat)
        if passes is not None and passes.serves(layout):
            yield from self._in_passes(bucket, memory, passes, layout)
            return
        scale = bucket.loss_scale
        wanted = bucket.flat.to(self.specs[0].memory_dtype)  # the bucket itself, if it is of this type
        # The wanted values become the residual, so they are in its units: of the unscaled loss.
        if scale is not None:
            wanted.div_(scale)
        parts, errors = parts_with_residual(bucket, memory, wanted)
        if errors:
            torch._foreach_add_(parts, errors, alpha=self.config.error_decay)
        chunk = self.message.chunk_of_entries(wanted.device)
        gathered = yield AllGather(self._largest(wanted, chunk))
        sent = self._entries(gathered, chunk, wanted.dtype)
        yield Commit(AllFinite((sent.scales,)))
        own, values = sent.indices[bucket.rank], sent.values[bucket.rank]
        before = wanted[own]
        after = before - values
        self._note(memory, before, after)
        wanted[own] = after
        # In fp32 the bucket itself is the residual until it becomes the mean, so it is copied out first. With
        # other types, the residual first takes what is lost by rounding to the gradient's type.
        if wanted is bucket.flat:
            self._remember(bucket, memory, wanted)
            self._merge(wanted.zero_(), sent, scale)
            return
        mean = self._merge(torch.zeros_like(wanted), sent, scale)
        round_into(bucket.flat, mean, wanted, scale)
        self._remember(bucket, memory, wanted)

    def _in_passes(
        self, bucket: Bucket, memory: Memory, passes: EntryPasses, layout: EntryLayout
    ) -> Requests:
        """Take the same steps by kernels that read the gradients and residuals themselves."""
        names, sizes = [spec.name for spec in self.specs], [spec.numel for spec in self.specs]
        error = _joined(names, memory[ERROR], sizes, bucket.flat.new_empty(0, dtype=torch.float32))
        wanted = TopKQuery(bucket.flat, error, self.config.error_decay, bucket.loss_scale)
        sent = passes.decoded((yield AllGather(passes.encoded(wanted, layout))), layout)
        is_healthy = yield Commit(AllFinite((sent[1],)), commits_on_device=True)
        counts = [-(-size // self.config.chunk) for size in sizes]
        less = _joined(names, memory[REDUCTION], counts, error.new_empty(0, dtype=torch.float64))
        merging = ScatterArgs(wanted, bucket.rank, self.config.merge == "senders", less, is_healthy)
        passes.merge(merging, sent, layout)
        memory[ERROR].update(zip(names, error.split_with_sizes(sizes), strict=True))
        memory[REDUCTION].update(zip(names, less.split_with_sizes(counts), strict=True))

    def _largest(self, wanted: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        """Return the largest entries of each chunk as a message."""
        bits = self.config.bits
        # Chunks of one length at a time.
        found = [largest(wanted, chunks) for chunks in self.message.parts]
        positions, values = (
            torch.cat([tensor.view(-1) for tensor in side]) for side in zip(*found, strict=True)
        )
        if bits == 16:
            return self.message.packed(positions, values, on_the_wire(values), chunk)
        scales = on_the_wire(torch.cat([end_levels(rows, bits) for _, rows in found]))
        return self.message.packed(positions, codes_of(values, chunk, scales, bits), scales, chunk)

    def _entries(self, gathered: torch.Tensor, chunk: torch.Tensor, dtype: torch.dtype) -> Entries:
        """Return the entries that all members have sent."""
        indices, codes, scales = self.message.unpacked(gathered, chunk)
        if self.config.bits == 16:
            return Entries(indices, scales.to(dtype), scales)
        scales = scales.view(len(gathered), -1, 2)
        return Entries(indices, values_of(codes, chunk, scales, self.config.bits, dtype), scales)

    def _merge(self, result: torch.Tensor, sent: Entries, loss_scale: torch.Tensor | None) -> torch.Tensor:
        """Add what members have sent to zeros."""
        values = sent.values if loss_scale is None else sent.values * loss_scale
        by_senders = self.config.merge == "senders"
        if not by_senders:
            values = values / values.new_full((), len(sent.indices))  # as in `_steps`
        add(result, SentEntries(sent.indices, values, sent.values, by_senders))
        return result

    def _note(self, memory: Memory, before: torch.Tensor, after: torch.Tensor) -> None:
        """Keep, for each parameter, how much less remains of it than there was."""
        # In double: the difference of two large squares may be small.
        dtype = accelerators.widest_dtype(before.device)
        less = before.to(dtype).square() - after.to(dtype).square()
        reductions: dict[str, torch.Tensor] = {}
        # Run by run, as they lie: to add entry by entry to their parameters would be to add in
        # an order that CUDA does not promise.
        parameters, sizes = zip(*self.message.runs, strict=True)
        for parameter, of_run in zip(parameters, less.split_with_sizes(sizes), strict=True):
            # The last chunk of a parameter may be shorter, and then is a run by itself.
            name = self.specs[parameter].name
            reductions[name] = reductions[name] + of_run.sum() if name in reductions else of_run.sum()
        memory[REDUCTION].update(reductions)

    def _remember(self, bucket: Bucket, memory: Memory, residual: torch.Tensor) -> None:
        """Copy the residual to where the last one is, if there is one."""
        names = [spec.name for spec in self.specs]
        if not memory[ERROR].keys() >= set(names):
            memory[ERROR].update(zip(names, bucket.split(torch.empty_like(residual)), strict=True))
        torch._foreach_copy_([memory[ERROR][name] for name in names], list(bucket.split(residual)))

    def diagnose(self, memory: Memory) -> Diagnosis | None:
        """Return how much of gradient and residual was not sent. Cost: one norm for each parameter."""
        known = memory[ERROR].keys() & memory[REDUCTION].keys()
        names = [spec.name for spec in self.specs if spec.numel and spec.name in known]
        if not names:
            return None
        dtype = accelerators.widest_dtype(memory[ERROR][names[0]].device)
        remaining = torch.stack([memory[ERROR][name].to(dtype).norm() for name in names])
        # Rounding up to few bits may leave more than there was.
        reduced = torch.stack([memory[REDUCTION][name].sum() for name in names]).clamp_min_(0)
        wanted = (remaining.square() + reduced).sqrt_()
        return Diagnosis(names, torch.where(wanted > 0, remaining / wanted, 0.0), remaining)


def _joined(
    names: Sequence[str], kept: Mapping[str, torch.Tensor], sizes: Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    """Return kept tensors as one, with zeros for missing ones: mostly they lie so already."""
    parts = [kept.get(name) for name in names]
    # A different bucket may have left it in a different shape.
    fit = [part is not None and len(part) == size for part, size in zip(parts, sizes, strict=True)]
    rooms = () if all(fit) else like.new_zeros(sum(sizes)).split_with_sizes(list(sizes))
    return concat_view(
        [rooms[number] if part is None or not fit[number] else part for number, part in enumerate(parts)]
    )


# Levels: few bits for the entries that are sent of a chunk.


def on_the_wire(values: torch.Tensor) -> torch.Tensor:
    """Return values in bf16; finite ones stay finite."""
    # Rounded up, the largest numbers of fp32 and all above of fp64 would be infinite, and the step skipped.
    limit = torch.finfo(SCALE_DTYPE).max
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(SCALE_DTYPE)


def end_levels(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the lowest and the highest level of each row, (rows, 2); not finite if something of it is not.

    Examples:
        >>> end_levels(torch.tensor([[1.0, -1.5, 7.0, -9.0]]), bits=2).tolist()
        [[1.25, 8.0]]
    """
    magnitudes = rows.abs()
    peaks = magnitudes.amax(1, keepdim=True)
    if bits == 2 and rows.shape[1] > 1:
        return _two_means(magnitudes, peaks)
    return torch.cat([magnitudes.amin(1, keepdim=True), peaks], dim=1)


def codes_of(values: torch.Tensor, chunk: torch.Tensor, ends: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the number of each value's nearest level, and its sign in the bit above: uint8, (entries,)."""
    lowest, step, highest_code = _steps(ends, bits, values.dtype)
    # If all that is sent of a chunk has one magnitude there is no step, and any code stands for it.
    divisor = step.where(step > 0, 1).index_select(0, chunk)
    codes = values.abs().sub_(lowest.index_select(0, chunk)).div_(divisor)
    # A value that is not finite has no code, and needs none: the levels of its chunk show it.
    codes.round_().clamp_(0, highest_code).nan_to_num_(0)
    return codes.to(torch.uint8) | ((values < 0).to(torch.uint8) << bits - 1)


def values_of(
    codes: torch.Tensor, chunk: torch.Tensor, ends: torch.Tensor, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the values that codes stand for."""
    lowest, step, highest_code = _steps(ends, bits, dtype)
    magnitudes = step.index_select(1, chunk).mul_(codes & highest_code).add_(lowest.index_select(1, chunk))
    return torch.where(codes > highest_code, -magnitudes, magnitudes)


def _steps(ends: torch.Tensor, bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the lowest level, how far levels lie apart, and the number of the highest."""
    lowest, highest = ends.to(dtype).unbind(-1)
    highest_code = (1 << bits - 1) - 1
    step = highest - lowest
    if highest_code > 1:
        # A tensor: CUDA would not divide by a number of the host's, but multiply by one over it, rounded.
        step /= step.new_full((), highest_code)
    return lowest, step, highest_code


def _two_means(magnitudes: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Return the two levels of each row, (rows, 2), from which its magnitudes lie least far, squared.

    They are the means of those below some border and of those above it, and all borders are tried.
    """
    # So that no square overflows. What is not finite shows by its unit, whatever becomes of it before.
    units = peaks + (peaks == 0)
    ordered = (magnitudes / units).sort(1).values
    if accelerators.is_accelerator(ordered.device):
        # Whole numbers have the same sum in any order, and CUDA does not promise one.
        sums = ordered.mul_(PARTS).to(torch.int64).cumsum(1).to(ordered.dtype).div_(PARTS)
    else:
        sums = ordered.cumsum(1)
    below, total = sums[:, :-1], sums[:, -1:]
    num_below = torch.arange(1, magnitudes.shape[1], dtype=sums.dtype, device=sums.device).expand_as(below)
    num_above = magnitudes.shape[1] - num_below
    above = total - below
    spread = torch.addcdiv(below.square() / num_below, above.square(), num_above)
    border = spread.argmax(1, keepdim=True)
    means = [(side / number).gather(1, border) for side, number in ((below, num_below), (above, num_above))]
    return torch.cat(means, dim=1) * units
