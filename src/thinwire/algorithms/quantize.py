"""Gradients in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from thinwire.algorithms.base import Algorithm, Bucket, BucketPlan, Granularity, Memory
from thinwire.algorithms.eigenbasis import COVARIANCE, EIGENVECTORS, VARIANCES, Eigenbasis, is_in
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.exact import average_uncompressed
from thinwire.algorithms.requests import AllFinite, AllGather, AllToAll, Commit, Requests, RunPart
from thinwire.checks import true_or_false, whole_number
from thinwire.errors import ConfigError
from thinwire.kernels.backend import MeanArgs, ResidualArgs
from thinwire.kernels.dispatch import all_finite, code_kernels_for, name_of_results
from thinwire.plan import ParameterSpec, Route
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import CODEBOOKS, Coded, block_bytes

# With this unit a block's codes, of any number of bits, and its scale fill an even number of bytes.
BLOCK_UNIT = 16
# At this length a scale adds 0.004 bits to an element. Longer blocks would make messages of biases longer:
# the last block of a parameter is sent whole.
MAX_BLOCK = 4096
# So many members exchange all codes. Among more it would be more bytes than codes and coded means of shares.
PAIR = 2


@dataclass(frozen=True, kw_only=True)
class Quantize(Algorithm):
    """Average gradients in few bits: a code for each element, a scale for each block of them.

    Every member averages a share of the blocks: it receives their codes from all, adds them up in fp32 (fp64
    for fp64 gradients), encodes the mean again, and sends it to all. All members decode the same bytes.
    Two members send each other all their codes instead, which are as many bytes: the mean is not rounded.

    Meant for Adam-like optimizers, which need no error feedback at these precisions and work badly with
    low-rank approximation. With 4 bits or more, zeros stay zeros; with fewer, a zero in a block with other
    values becomes a small number.

    Args:
        bits: 8, 6, 5, 4, 3, 2 or 1. Codes of 4 bits and more are fractions of the block's largest element.
            Codes of 3 and 2 bits are the optimal levels for a Gaussian, with the scale that fits the block
            best. 1 bit is the sign times the block's mean magnitude.
        block: Elements that share a scale, a multiple of 16, at most 4,096. Every parameter begins a new
            block. Shorter ones are more exact: with 64, a scale adds a quarter of a bit to each element.
        error_feedback: Keep what was not transmitted and add it to the next gradient. SGD gains from it in
            2 and 1 bits; Adam loses below 4.
        eigenbasis: A pattern of names, such as "blocks.*": matrices that Muon trains. They are encoded in the
            eigenbases of Ḡ Ḡᵀ and Ḡᵀ Ḡ, of their mean gradients, and errors are relative to each direction's
            own size. Members compute the bases from the same means, so nothing more is sent; all of them must
            compute the same bits, so their processors must be of one kind.

    Cost per step: two rounds (one if there are two members), together of (bits + 16 / block) / 32 of the
    bytes of an fp32 all-reduce. Error feedback keeps an fp32 residual of the size of the gradients (fp64 for
    fp64) and makes a host synchronisation, for the finite check (none without `host_check`). Eigenbases make
    one too, keep 2 (m² + n²) numbers in fp32 for a matrix of m × n, multiply it by squares of its sides four
    times and by itself twice, and decompose two squares in every tenth step. Sides above 512 are cut into
    equal pieces, with smaller squares.

    A scale has fp32's range: fp64 gradients beyond it are not finite. For any dtype, values beyond half of
    that range (1.7e38) may not be finite either, since below 8 bits a level may exceed the number it stands
    for. Blocks whose scale would be below 1.2e-38 become zeros. In all others both roundings leave an error
    smaller than the value, so that a residual does not grow. After an algorithm with error feedback
    (`GradientSync.use`), the first step without it sends gradients and residual uncompressed.

    Raises:
        ConfigError: A setting is of the wrong type or out of range.

    Examples:
        >>> import torch
        >>> print(Quantize(bits=4).plan([ParameterSpec("weight", (64, 32), (32, 1), torch.float32)]))
        parameter              travels as  bytes before  bytes after
        weight     4 bits in blocks of 64         8,192        1,088
        total                                     8,192        1,088
        compression ratio 7.5 (of each process), 2 rounds a step
    """

    slots = (ERROR, COVARIANCE, EIGENVECTORS, VARIANCES)
    always_shown = ("bits",)
    pipelines_buckets = True

    bits: int = 4
    block: int = 64
    error_feedback: bool = False
    eigenbasis: str = ""

    def __post_init__(self) -> None:
        bits = whole_number("bits", self.bits, minimum=1)
        if bits not in CODEBOOKS:
            raise ConfigError(f"bits must be 8, 6, 5, 4, 3, 2 or 1, got {self.bits!r}")
        block = whole_number("block", self.block, minimum=1)
        if block % BLOCK_UNIT or block > MAX_BLOCK:
            raise ConfigError(
                f"block must be a multiple of {BLOCK_UNIT} and at most {MAX_BLOCK:,}, got {self.block!r}"
            )
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "error_feedback", true_or_false("error_feedback", self.error_feedback))
        if not isinstance(self.eigenbasis, str):
            raise ConfigError(f'eigenbasis must be a pattern of names, "blocks.*", got {self.eigenbasis!r}')
        if self.eigenbasis and self.error_feedback:
            raise ConfigError(
                "eigenbasis can't be combined with error_feedback: a residual would be of an earlier basis; "
                "choose one"
            )

    @property
    def remembers(self) -> bool:
        return self.error_feedback or bool(self.eigenbasis)

    @property
    def split_granularity(self) -> Granularity:
        return "parameter" if self.eigenbasis else self.block

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        numels = [spec.numel for spec in specs]
        blocks = Blocks(tuple(numels), self.block, num_members)
        # Every member averages the same number of blocks, so the last ones may be empty. They are sent all
        # the same, and count in the largest parameter's route.
        counts = list(blocks.counts)
        counts[numels.index(max(numels))] += blocks.share * num_members - blocks.total
        routes = [
            Route(
                (spec.name,),
                spec.gradient_bytes,
                count * block_bytes(self.block, self.bits),
                f"{self.bits} bits in blocks of {self.block}",
                is_compressed=True,
                rounds=1 if num_members == PAIR else 2,
            )
            for spec, count in zip(specs, counts, strict=True)
        ]
        eigenbasis = Eigenbasis.of(specs, self.eigenbasis) if self.eigenbasis else None
        return QuantizePlan(tuple(specs), tuple(routes), self, blocks, eigenbasis)

    def check_model(self, specs: Sequence[ParameterSpec]) -> None:
        super().check_model(specs)
        if self.eigenbasis and specs and not any(is_in(self.eigenbasis, spec) for spec in specs):
            raise ConfigError(
                f"eigenbasis={self.eigenbasis!r} matches no matrix of the model; its parameters have names "
                f"like {specs[0].name!r}"
            )


@dataclass(frozen=True)
class QuantizePlan(BucketPlan):
    """The plan of a bucket in blocks, each with a scale; each member averages a share of them."""

    config: Quantize
    blocks: Blocks
    eigenbasis: Eigenbasis | None = None

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic and of residuals."""
        return self.specs[0].memory_dtype

    def kernels(self, device: torch.device) -> set[str]:
        # Every member computes the eigenbasis from the same means, so all must find the same vectors.
        return set() if self.eigenbasis is None else {name_of_results("eigenvectors", device)}

    def on_state_loaded(self, memory: Memory) -> str:
        if self.eigenbasis is not None:
            self.eigenbasis.forget_misfits(memory, self.dtype)
        return ""

    def run(self, bucket: Bucket, memory: Memory) -> Requests:
        """Average in few bits; exactly, in one round, if a residual is left from another algorithm.

        1. With error feedback: values ← gradient + residual. With eigenbases: values ← X of each matrix.
        2. Encode the values, and send them to be averaged (`_average_shares`; two members: `_exchange`).
        3. After the commit: gradient ← decoded mean; residual ← what this member has not sent of its values,
           plus what encoding its mean has lost. With eigenbases: gradient ← the decoded mean, turned back;
           the bases follow it.
        """
        scale, keeps_residual = bucket.loss_scale, self.config.error_feedback
        if not keeps_residual and memory.slots and not memory[ERROR].keys().isdisjoint(self.names):
            yield from average_uncompressed(self.names, bucket, memory, None, always_checks=True)
            return
        if not self.blocks.total:  # the same on all members: none sends, so none waits
            yield Commit(all_finite, writes=False)
            return
        values = bucket.flat
        if keeps_residual:
            # In 16 bits the sum would lose the residual: it is often below a gradient's last bit.
            values = values.to(self.dtype)
            errors = memory[ERROR]
            named = zip(bucket.split(values), self.names, strict=True)
            owed = [(part, errors[name]) for part, name in named if name in errors]
            if owed:
                parts, added = zip(*owed, strict=True)
                torch._foreach_add_(parts, added if scale is None else torch._foreach_mul(added, scale))
        elif self.eigenbasis is not None:
            values = self.eigenbasis.turned(bucket, memory, self.dtype)

        kernels, codebook = code_kernels_for(values), CODEBOOKS[self.config.bits]
        sent, lost = kernels.encoded(values, self.blocks, codebook), None
        if self.blocks.num_members == PAIR:
            messages = yield from self._exchange(sent, bucket.rank)
        else:
            coded, lost = yield from self._average_shares(sent, values, bucket.rank)
            messages = [coded]

        # All members have these scales: with others, some would commit and some not.
        scales = tuple(message.scales for message in messages)
        yield Commit(AllFinite(scales), writes=self.config.remembers)
        if self.eigenbasis is not None:
            kernels.decode(messages, self.blocks, codebook, values)
            self.eigenbasis.turn_back(values, bucket, memory)
        elif not keeps_residual:
            kernels.decode(messages, self.blocks, codebook, bucket.flat)
        else:
            share = self.blocks.shares[bucket.rank]
            args = ResidualArgs(
                messages, self.blocks, codebook, bucket.flat, values, sent, lost, share, scale
            )
            residual = kernels.decode_and_keep(args)
            memory[ERROR].update(zip(self.names, bucket.split(residual), strict=True))

    def _average_shares(
        self, sent: Coded, values: torch.Tensor, rank: int
    ) -> RunPart[tuple[Coded, torch.Tensor | None]]:
        """Return the coded mean, and what encoding this member's share of it has lost, to keep a residual.

        1. Send to each member the blocks that it averages (first round).
        2. Decode this member's blocks from all members, average them in full precision, encode the mean.
        3. Gather the coded means of all blocks (second round). All members decode the same bytes.
        """
        # A ring all-reduce of codes would round every partial sum again. This way each number is rounded only
        # twice (by its member, and as a mean), and the sum has full precision.
        blocks, share, codebook = self.blocks, self.blocks.shares[rank], CODEBOOKS[self.config.bits]
        received = Coded.arrived((yield AllToAll(sent.message)), blocks.share)
        lost = None
        if self.config.error_feedback:
            lost = values.new_empty(share.stop - share.start, blocks.block)
        args = MeanArgs(received, blocks, share, codebook, lost, self.dtype)
        mean = code_kernels_for(values).averaged(args)
        return Coded.arrived((yield AllGather(mean.message.view(-1))), blocks.share), lost

    def _exchange(self, sent: Coded, rank: int) -> RunPart[list[Coded]]:
        """Return the codes of both of two members, whose mean is then not rounded.

        Instead of the coded mean of its share (3) a member sends its codes of it: as many bytes, and neither
        message waits for the other.
        """
        mine, theirs = yield AllToAll(sent.message), AllGather(sent.message[rank])  # by shares
        rows = [mine[1 - rank], theirs[1 - rank]]
        return [sent, Coded(torch.stack(rows if rank == 0 else rows[::-1]), self.blocks.share)]

    def squared_norm(self, sent: torch.Tensor, rank: int, answers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of squares of a member's share of the means, before the second round.

        Of two members, `sent` has this one's codes, and `answers` those that it received in the first round.
        """
        rows = [sent] if self.blocks.num_members != PAIR else [sent, answers[0][1 - rank]]
        messages = []
        for row in rows:
            # The other members' blocks get scale 0, which decodes any code to zero.
            alone = row.new_zeros(self.blocks.num_members, len(row))
            alone[rank] = row
            messages.append(Coded.arrived(alone, self.blocks.share))
        means = sent.new_empty(sum(self.blocks.numels), dtype=self.dtype)
        code_kernels_for(means).decode(messages, self.blocks, CODEBOOKS[self.config.bits], means)
        norm: torch.Tensor = torch.linalg.vector_norm(means, dtype=torch.float64)
        return norm.square()
