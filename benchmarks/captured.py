"""Trainings on a GPU, a whole step of which is one CUDA graph, so that several run side by side on streams.

A step is each member's pass, the algorithm's arithmetic and messages, and AdamW. All members receive the same
mean, so they share one model. On the CPU the same steps are made one by one.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from pages import cpu_model
from thinwire.algorithms import AllGather, AllReduce, AllToAll, Bucket, Commit, Mean, Memory
from thinwire.algorithms.base import Algorithm
from thinwire.demo.model import Text, fixed_batches, next_byte_loss
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation
from trainings import cosine, text

KINDS = ("embeddings", "vectors", "matrices")
CONTEXT_LENGTH = 128
MAX_GRADIENT_NORM = 1.0
WARMUP_SHARE = 0.05
HELDOUT_BATCHES, HELDOUT_WINDOWS = 16, 64  # 1,024 windows
FIRST_TUNING_SEED = 1_000
CURVE_PARTS = 10
# Steps that are handed to the device at a time, twice: it is busy while the host prepares the next training.
CHUNK = 40
MIN_FREE_SHARE = 0.25
# Read when CUDA starts: with fewer, streams wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Run:
    """One training."""

    model: str  # by name
    method: str  # by name
    seed: int  # of the start and the batches
    steps: int
    rate: float = 0.0  # AdamW's peak; 0 for the best one for exact averaging, times `times_rate`
    members: int = 2
    windows: int = 32  # of a step, of all members together
    times_rate: float = 1.0

    @property
    def is_tuning(self) -> bool:
        return self.seed >= FIRST_TUNING_SEED

    def __str__(self) -> str:
        return f"{self.model}, {self.method}, seed {self.seed}, rate {self.rate:g}, {self.steps} steps"


@dataclass(frozen=True)
class Outcome:
    """What came of a training."""

    loss: float  # on held-out text, in nats a byte
    curve: list[float]  # of training, over tenths of the steps
    errors: dict[str, float]  # squared, relative, of the means of the last step, by kind of parameter
    bytes_a_step: float  # that leave a member, as of a ring
    times_fewer: float  # than bf16
    seconds: float  # with others on the same device
    preparing: float  # seconds of it, of the host
    device: str
    versions: str

    def __str__(self) -> str:
        errors = ", ".join(f"{kind} {error:.4f}" for kind, error in self.errors.items())
        return f"{self.loss:.4f} in {self.seconds:.1f} s, {self.preparing:.1f} to prepare; errors: {errors}"


def kind_of(spec: ParameterSpec) -> str:
    """Return one of `KINDS`; the head counts as an embedding, biases and LayerNorms as vectors."""
    if len(spec.shape) < 2:
        return "vectors"
    return "embeddings" if spec.name.partition(".")[0] in ("bytes", "positions", "head") else "matrices"


class Lockstep:
    """The exchanges of all members, in step, as the engines of a group in this process make them.

    Without their threads, clocks and agreements, which a CUDA graph can't hold. `Training` compares both.
    Algorithms remember nothing.
    """

    def __init__(
        self, algorithm: Algorithm, buckets: Sequence[Sequence[ParameterSpec]], members: int
    ) -> None:
        self._plans = [algorithm.prepare(specs, num_members=members) for specs in buckets]

    def average(self, gradients: Tensor) -> None:
        """Turn each row, the gradients of a member, into the mean."""
        sizes = [sum(spec.numel for spec in plan.specs) for plan in self._plans]
        for plan, parts in zip(self._plans, gradients.split_with_sizes(sizes, dim=1), strict=True):
            exchanges = [
                plan.run(Bucket(plan.specs, part, rank=rank), Memory()) for rank, part in enumerate(parts)
            ]
            requests = [next(each) for each in exchanges]
            while not isinstance(requests[0], Commit):
                answers = answered(requests)
                requests = [each.send(answer) for each, answer in zip(exchanges, answers, strict=True)]
            for exchange in exchanges:
                next(exchange, None)


def answered(requests: Sequence[Any]) -> list[Tensor]:
    """Return what each member is answered, to the bit as `InProcessTransport` does it."""
    tensors = [request.tensor for request in requests]
    first, members = requests[0], len(requests)
    if isinstance(first, AllGather):
        return [torch.stack(tensors)] * members
    if isinstance(first, AllToAll):
        return [torch.stack([tensor[rank] for tensor in tensors]) for rank in range(members)]
    assert isinstance(first, Mean)
    total = tensors[0].div_(members)
    for tensor in tensors[1:]:
        total += tensor.div_(members)
    for tensor in tensors[1:]:
        tensor.copy_(total)
    return tensors


class Training:
    """A run under way, of members that share a model, on a stream of its own."""

    def __init__(
        self, run: Run, new_model: Callable[[], nn.Module], algorithm: Algorithm, *, captures: bool
    ) -> None:
        self._start_seconds = time.monotonic()
        self.run, self._algorithm, self._done = run, algorithm, 0
        self._stream = new_stream()
        self._ends: list[Any] = []  # of chunks on their way
        self._advance: Callable[[], None] = self._step
        with self._on_stream():
            self._make_model(new_model)
            self._make_tables()
            self._check()
            if captures:
                self._capture()
        self.preparing = time.monotonic() - self._start_seconds

    def _on_stream(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _make_model(self, new_model: Callable[[], nn.Module]) -> None:
        torch.manual_seed(self.run.seed)
        with DEVICE:
            self._model = new_model()
        named = {ParameterSpec.of(name, each.detach()): each for name, each in self._model.named_parameters()}
        self._buckets = [tuple(spec for spec in named if kind_of(spec) == kind) for kind in KINDS]
        self._parameters = [named[spec] for bucket in self._buckets for spec in bucket]
        self._values = torch.cat([each.detach().flatten() for each in self._parameters])
        sizes = [each.numel() for each in self._parameters]
        for parameter, value in zip(self._parameters, self._values.split_with_sizes(sizes), strict=True):
            parameter.data = value.view_as(parameter)
        self._gradients = self._values.new_zeros(self.run.members, len(self._values))
        # The optimizer reads it: the mean, clipped.
        self._gradient = self._values.grad = torch.zeros_like(self._values)
        self._exchange = Lockstep(self._algorithm, self._buckets, self.run.members)

    def _make_tables(self) -> None:
        """Put what steps differ in on the device: windows, rates, and the number of the step."""
        run, self._text = self.run, text_on(DEVICE)
        last = len(self._text.train) - CONTEXT_LENGTH
        generator = torch.Generator().manual_seed(run.seed)
        self._starts = torch.randint(last, (run.steps, run.windows), generator=generator).to(DEVICE)
        shares = [cosine(step, run.steps, warmup_share=WARMUP_SHARE) for step in range(run.steps)]
        self._rates = run.rate * torch.tensor(shares, device=DEVICE)
        self._losses = torch.zeros(run.steps, device=DEVICE)
        self._now = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self._places = torch.arange(CONTEXT_LENGTH + 1, device=DEVICE)
        self._rate = torch.zeros((), device=DEVICE)
        self._optimizer = AdamW([self._values], lr=self._rate, fused=True, capturable=DEVICE.type == "cuda")

    def _batch(self) -> tuple[Tensor, Tensor]:
        starts = self._starts.index_select(0, self._now).view(-1, 1)
        window = self._text.train[starts + self._places].long()
        return window[:, :-1], window[:, 1:]

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return next_byte_loss(self._model, inputs, targets)

    def _backward(self) -> Tensor:
        """Make each row the gradient of a member's loss, of its share of the windows; return their loss."""
        inputs, targets = self._batch()
        losses = []
        for row, *batch in zip(
            self._gradients, inputs.chunk(self.run.members), targets.chunk(self.run.members), strict=True
        ):
            loss = self._loss(*batch)
            gradients = torch.autograd.grad(loss, self._parameters)
            torch.cat([each.flatten() for each in gradients], out=row)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def _step(self) -> None:
        self._losses.index_copy_(0, self._now, self._backward().view(1))
        self._exchange.average(self._gradients)
        mean = self._gradients[0]
        shrink = (MAX_GRADIENT_NORM / (mean.norm() + 1e-6)).clamp_(max=1.0)
        torch.mul(mean, shrink, out=self._gradient)
        self._rate.copy_(self._rates.index_select(0, self._now).view(()))
        self._optimizer.step()
        self._now += 1

    def _check(self) -> None:
        """Raise unless gradients are those of a plain pass, and means those of Thinwire's engines."""
        self._backward()
        plain = torch.autograd.grad(self._loss(*self._batch()), self._parameters)
        difference = self._gradients.mean(0) - torch.cat([each.flatten() for each in plain])
        assert difference.norm() < 0.05 * self._gradients.mean(0).norm(), "members' gradients are wrong"
        sizes = [sum(spec.numel for spec in bucket) for bucket in self._buckets]
        rows = [list(row.clone().split_with_sizes(sizes)) for row in self._gradients]
        # Its members are threads, which have the device's own stream.
        self._wait()
        simulation = Simulation(self._algorithm, self._buckets, num_workers=self.run.members)
        assert simulation.step(rows), "a mean was not finite"
        if self._stream is not None:
            torch.cuda.default_stream().synchronize()
        self._exchange.average(self._gradients)
        assert torch.equal(self._gradients, torch.stack([torch.cat(row) for row in rows])), "not an engine's"
        stats = simulation.syncs[0].stats()
        self._bytes_a_step, self._times_fewer = stats.message_bytes, stats.compression_ratio / 2
        is_exact = isinstance(self._algorithm, AllReduce)
        assert is_exact or stats.compression_ratio > 1.9, "nothing was compressed"

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _capture(self) -> None:
        """Capture a step as a graph, and compare it with one that was not captured."""
        start = self._values.clone()
        # Torch gives the memory of earlier trainings back neither during a capture nor to other processes.
        free, total = torch.cuda.mem_get_info()
        if free < MIN_FREE_SHARE * total:
            torch.cuda.empty_cache()
        self._step()  # allocates what stays, and compiles
        expected = self._gradient.clone()
        self._begin_again(start)
        graph = torch.cuda.CUDAGraph()
        # Other threads are free: autograd's launches what is captured as well.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            self._step()
        finally:
            graph.capture_end()
        graph.replay()
        difference = (self._gradient - expected).norm() / expected.norm()
        # Passes differ in their last bits, so some codes tip over: of 2 bits, by a root mean square.
        assert difference < 0.3, f"a captured step's gradient is {difference:.3f} away from a plain one's"
        self._advance = graph.replay
        self._begin_again(start)

    def _begin_again(self, start: Tensor) -> None:
        self._values.copy_(start)
        self._now.zero_()
        for tensor in self._optimizer.state[self._values].values():
            tensor.zero_()

    def advance(self) -> bool:
        """Hand the device some more steps if it is about to have none; return whether it took any."""
        self._ends = [end for end in self._ends if not end.query()]
        count = min(CHUNK, self.run.steps - self._done)
        if len(self._ends) > 1 or not count:
            return False
        with self._on_stream():
            for _ in range(count):
                self._advance()
            if self._stream is not None:
                self._ends.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                self._ends[-1].record()
        self._done += count
        return True

    def is_over(self) -> bool:
        return self._done == self.run.steps and all(end.query() for end in self._ends)

    def outcome(self) -> Outcome:
        """Return what came of it, once it is over."""
        with self._on_stream():
            first = self._gradients[0]
            assert all(torch.equal(first, other) for other in self._gradients[1:]), "members' means differ"
            parts = min(CURVE_PARTS, self.run.steps)
            curve = [float(part.mean()) for part in self._losses.tensor_split(parts)]
            gpu = cpu_model() if self._stream is None else torch.cuda.get_device_name()
            loss, errors = self._heldout_loss(), self._errors()
            assert math.isfinite(loss), f"diverged: {curve}"
            if self._stream is not None:
                FREE_STREAMS.append(self._stream)
            size = sum(len(part) for part in self._text)
            of_text = f"Python {platform.python_version()} ({size:,} bytes of text)"
            return Outcome(
                loss=loss,
                curve=[round(each, 5) for each in curve],
                errors=errors,
                bytes_a_step=self._bytes_a_step,
                times_fewer=round(self._times_fewer, 3),
                seconds=round(time.monotonic() - self._start_seconds, 2),
                preparing=round(self.preparing, 2),
                device=gpu,
                versions=f"{of_text}, PyTorch {torch.__version__}",
            )

    @torch.no_grad()
    def _heldout_loss(self) -> float:
        batches = fixed_batches(
            self._text.heldout,
            batches=HELDOUT_BATCHES,
            batch_size=HELDOUT_WINDOWS,
            context_length=CONTEXT_LENGTH,
        )
        losses = [self._loss(inputs.to(DEVICE), targets.to(DEVICE)) for inputs, targets in batches]
        return float(torch.stack(losses).mean())

    def _errors(self) -> dict[str, float]:
        """Return how far the means of one more step are from the true ones."""
        self._now.fill_(self.run.steps - 1)
        self._backward()
        true = self._gradients.mean(0)
        self._exchange.average(self._gradients)
        sizes = [sum(spec.numel for spec in bucket) for bucket in self._buckets]
        pairs = zip(
            KINDS,
            (self._gradients[0] - true).split_with_sizes(sizes),
            true.split_with_sizes(sizes),
            strict=True,
        )
        return {kind: float((error.norm() / norm.norm()) ** 2) for kind, error, norm in pairs}


def new_stream() -> torch.cuda.Stream | None:
    if DEVICE.type == "cpu":
        return None
    return FREE_STREAMS.pop() if FREE_STREAMS else torch.cuda.Stream()  # type: ignore[no-untyped-call]


# Trainings that are over have left them. Torch has 32, and would give two trainings the same one.
FREE_STREAMS: list[torch.cuda.Stream] = []


@cache
def text_on(device: torch.device) -> Text:
    return Text(*(part.to(device) for part in text()))
