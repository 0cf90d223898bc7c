"""The adapter between FSDP2's sharded gradients and an engine: a step in each backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from thinwire import torch_private
from thinwire.adapters.ddp_model import DIVIDED, plain_name
from thinwire.adapters.setup import allow_steps_inside, log_start, refuse_averaged_twice, refuse_steps_inside
from thinwire.adapters.sharded.sync import ShardedSync
from thinwire.adapters.sharded.view import Piece, ShardedModel, pieces_of, replicas_of, sharded_like
from thinwire.algorithms import Algorithm
from thinwire.comm import ProcessGroupTransport, Transport, agree, copy_from, gather_values
from thinwire.comm.agreement import alike_on_all_shards
from thinwire.errors import AttachError, StepError
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, GradientSync, Settings
from thinwire.sync.bucket_plans import BucketState
from thinwire.sync.step import Step
from thinwire.sync.streams import CommStream
from thinwire.tensors.layout import local_tensor, split_as


def attach_sharded(
    model: torch.nn.Module,
    algorithm: Algorithm,
    replicas: dist.ProcessGroup | DeviceMesh | None,
    settings: Settings,
) -> GradientSync:
    """Implement `thinwire.attach` for an FSDP2 model."""
    sharded = ShardedModel(model)
    group = replicas_of(sharded, replicas)
    pieces = pieces_of(model, sharded)
    refuse_attached(pieces, "switch its algorithm with sync.use(…); sync is what attach returned")
    trained = {piece.name: piece for piece in pieces if piece.parameter.requires_grad}
    if not trained:
        raise AttachError("no parameter of the model is trained, so there is nothing to average")
    device = local_tensor(next(iter(trained.values())).parameter).device
    transport = ProcessGroupTransport(group, device)
    refuse_averaged_twice((piece.parameter for piece in trained.values()), transport, AttachError)
    if device.type == "cpu" and ProcessGroupTransport(group).control_device.type != "cpu":
        raise AttachError(
            "the replicas' group can't send gradients from the CPU (CPUOffloadPolicy); call "
            'init_process_group("cpu:gloo,cuda:nccl")'
        )
    # A step is committed on all shards or on none, so they must agree.
    shards = sharded.shards()
    settings = replace(settings, health_group=shards)
    engine = Engine(algorithm, transport, specs_of(pieces), settings)
    # Buffers as well: replicas start equal in everything that the model holds.
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = {plain_name(name): tensor for name, tensor in named}
    described = {**_described(shards, tensors, pieces), "algorithm": repr(algorithm)}
    alike_on_all_shards(
        shards,
        "attach()",
        {"replica": f"{transport.rank} of {transport.size}", "algorithm": repr(algorithm)},
        lambda: agree(transport, described, "attach()"),
    )
    # Only after all checks: from here on PyTorch averages nothing itself.
    if sharded.is_averaged_by_torch:
        sharded.stop_averaging()
    # After everything is compared: replicas of different shapes would hang here.
    copy_from(transport.rank == 0, map(local_tensor, tensors.values()), transport)
    adapter = FSDPAdapter(engine, shards, sharded, pieces)
    # Last: hooks of a failed attach would stay on the model.
    adapter.register(model)
    log_start(engine, (piece.parameter for piece in pieces))
    return ShardedSync(engine, shards, trained, adapter.forget_pass, adapter.detach)


def _described(shards: Transport, tensors: dict[str, torch.Tensor], pieces: list[Piece]) -> dict[str, str]:
    """Describe this replica by subject, for all replicas to compare."""
    described = {"shard": f"{shards.rank} of {shards.size}"}
    piece_of = {piece.name: piece for piece in pieces}
    # The parameters of one fully_shard are a bucket: replicas with different ones would send different
    # messages. In reverse order, so that the first name of each bucket stays.
    first_of = {piece.group: piece.name for piece in reversed(pieces)}
    for name, tensor in tensors.items():
        local, piece = local_tensor(tensor), piece_of.get(name)
        shapes = f"of shape {tuple(tensor.shape)} ({tuple(local.shape)} here, "
        described[name] = f"{shapes}cut along {piece and piece.dim}), {local.dtype}"
        if piece is not None:
            trained = ", trained" if piece.parameter.requires_grad else ""
            described[name] += f"{trained}, held with {first_of[piece.group]}"
    return described


def specs_of(pieces: Iterable[Piece]) -> list[ParameterSpec]:
    """Return the specs of this process's trained shards, in model order."""
    return [piece.spec for piece in pieces if piece.parameter.requires_grad]


def refuse_attached(pieces: Iterable[Piece], what_to_do: str) -> None:
    """Raise if an adapter already averages the model's gradients."""
    if any(attached_to(piece.parameter) for piece in pieces):
        raise AttachError(f"the model is already attached; {what_to_do}")


def attached_to(parameter: torch.Tensor) -> bool:
    """Return whether an adapter averages a parameter's gradients."""
    # The adapter leaves no trace on the module, but each of its hooks calls its method.
    hooks = torch_private.post_accumulate_hooks(parameter)
    return any(getattr(hook, "func", None) is FSDPAdapter.arrived for hook in hooks)


NOT_AVERAGED = "gradients would not be averaged over the replicas"
REENTRANT = "inside a reentrant activation checkpoint: use use_reentrant=False"
RESTART = "restart all processes from a checkpoint"


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients FSDP2 reduces together, of one device and dtype."""

    pieces: Sequence[Piece]  # trained ones, in the order of their gradients
    device: torch.device
    state: BucketState
    flat: torch.Tensor | None = None  # their gradients, from the start of the bucket until they are means
    num_arrived: int = 0  # gradients that were ready in this pass, counting parts

    def gradients(self) -> torch.Tensor:
        """Return a flat copy of the gradients; zeros for those that this replica lacks."""
        specs = self.state.specs
        flat = torch.zeros(sum(spec.numel for spec in specs), dtype=specs[0].dtype, device=self.device)
        for piece, part in zip(self.pieces, split_as(flat, [spec.shape for spec in specs]), strict=True):
            if piece.parameter.grad is not None:
                part.copy_(local_tensor(piece.parameter.grad))
        return flat


class FSDPAdapter:
    """Averages the sharded gradients of an FSDP2 model over its replicas, inside `backward()`.

    FSDP2 calls its parameters' post-accumulate hooks when gradients are ready. The first call in a pass
    queues the end of the step after FSDP2's own end of the pass, so gradients are means when `backward()`
    returns, before they are clipped. The first pass shows in which order buckets become ready. Later passes
    start them in this order, each as soon as it is complete, while the pass continues.
    """

    def __init__(
        self, engine: Engine, shards: Transport, sharded: ShardedModel, pieces: Iterable[Piece]
    ) -> None:
        self.engine, self.shards = engine, shards
        self._sharded = sharded
        self._buckets = _buckets_of(pieces, engine)
        # Looked up by id: parameters compare element by element.
        self._bucket_of = {id(piece.parameter): bucket for bucket in self._buckets for piece in bucket.pieces}
        self._has_order = False
        # How many buckets, in order, may be started before the end of a pass.
        self._num_early = 0
        self._handles: list[RemovableHandle] = []
        self._comm_stream = CommStream()
        # Parameters whose gradients have changed since the last step. Others may have old gradients.
        self._changed: set[int] = set()
        self.forget_pass()

    def register(self, model: torch.nn.Module) -> None:
        # Weakly: Python's garbage collector does not see a cycle through a parameter's hooks, so the model
        # would never be freed. The model's own hook, below, keeps this object.
        hook = partial(FSDPAdapter.arrived, weakref.proxy(self))
        self._handles = [
            piece.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for piece in self._pieces
        ]
        # After FSDP2's own hook, which comes first and may have just taken new parameters.
        check = torch_private.closure_not_compiled(lambda root, _: self.check_before_forward(root))
        self._handles.append(model.register_forward_pre_hook(check))
        refuse_steps_inside(self, (piece.parameter for piece in self._pieces))

    def detach(self) -> None:
        allow_steps_inside(self)
        for handle in self._handles:
            handle.remove()
        self._sharded.resume_averaging()

    def check_before_forward(self, model: torch.nn.Module) -> None:
        """Raise if gradients would silently not be averaged."""
        sharded = self._sharded
        # Inside a backward pass: an activation checkpoint recomputes the whole model.
        if torch_private.backward_pass() != -1:
            # A reentrant checkpoint runs a nested pass, and no gradient shows the end of the outer one.
            inside = type(torch_private.running_node()).__name__
            if inside == "CheckpointFunctionBackward" and not sharded.waits_for_more:
                raise StepError(f"{NOT_AVERAGED}: the whole model is {REENTRANT}, and restart all processes")
            return
        # Left by an exception: FSDP2 would never end a pass again, and the optimizer would find no gradient.
        if self._arrived or sharded.is_in_pass:
            raise StepError(
                f"{NOT_AVERAGED}: the last backward pass has raised (call the model's reset_iter_state() "
                f"and abandon()), or a part is {REENTRANT}, and restart"
            )
        # FSDP2 takes no more modules after its first pass.
        if not self._has_order and len(torch_private.fsdp_states(model)) != len(sharded.states):
            raise StepError(
                "fully_shard was called again after attach; call fully_shard on all parts, then attach"
            )
        if sharded.is_finalized_by_hand:
            raise StepError(
                f"{NOT_AVERAGED}: passes are finalized by hand, as in torch.distributed.pipelining; call "
                f"set_manual_backward_finalization(False), {DIVIDED}"
            )
        # After the check above: a root that was sharded later turns earlier roots into its parts.
        if sharded.is_inside_another:
            raise StepError("the attached model is a part of a larger sharded model; attach the whole model")
        for name, parameter in sharded.parameters:
            if parameter.requires_grad and id(parameter) not in self._bucket_of:
                if name in {piece.name for piece in self._pieces}:
                    was = "replaced (as by load_state_dict(assign=True)) after"
                else:
                    was = "frozen or missing when"
                raise StepError(
                    f"the model trains {name}, which was {was} the model was attached; attach after all "
                    "parameters are loaded and unfrozen"
                )

    def forget_pass(self) -> None:
        self._queued_in = -1
        self._step: Step | None = None
        self._num_started = 0
        # Parameters with ready gradients, until these are averaged.
        self._arrived: set[int] = set()
        # An ordered set: in the order in which gradients became ready.
        self._completed: dict[_Bucket, None] = {}
        for bucket in self._buckets:
            bucket.flat, bucket.num_arrived = None, 0

    # A pass.

    @torch_private.not_compiled
    def arrived(self, parameter: torch.Tensor) -> None:
        """Record a ready gradient, and start complete buckets: the hook of each parameter."""
        self._changed.add(id(parameter))
        # The gradients of this pass accumulate, and are averaged with those of the step's last pass.
        if self._sharded.waits_for_more:
            return
        current = torch_private.backward_pass()
        if current == -1:
            self._abandon()
            raise StepError(
                f"{NOT_AVERAGED}: they came after backward(), as in torch.distributed.pipelining; "
                f"{DIVIDED.removeprefix('or ')}"
            )
        if current != self._queued_in:
            if torch_private.is_pass_compiled():
                raise StepError(f"{NOT_AVERAGED}: compiled autograd runs the backward pass; switch it off")
            self._queued_in = current
            torch_private.at_end_of_backward(self.average)
        bucket = self._bucket_of[id(parameter)]
        if bucket.flat is not None:
            self._abandon()
            why = "the pass also went through forward passes of earlier steps"
            words = f"the gradient of {bucket.state.specs[0].name} arrived again after it was sent"
            raise StepError(f"{words}: {why}; call backward() once a step, and {RESTART}")
        self._arrived.add(id(parameter))
        # A module that is called several times gets its gradients in parts. In the first pass all parts
        # count, since only that pass shows which one is the last.
        if self._has_order and self._sharded.has_calls_to_come(bucket.pieces[0].group):
            return
        bucket.num_arrived += 1
        if bucket.num_arrived % len(bucket.pieces) == 0:
            self._completed.pop(bucket, None)
            self._completed[bucket] = None
            self._start_complete()

    def _start_complete(self) -> None:
        """Start complete buckets in the same order on all replicas, whichever are ready first."""
        # Opening buckets is collective, and processes are at different points of their passes.
        if not self._are_all_open:
            return
        # A complete bucket waits for those before it, or replicas would send in different orders.
        while self._num_started < self._num_early:
            bucket = self._buckets[self._num_started]
            if bucket.num_arrived < len(bucket.pieces):
                return
            with self._working():
                self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        # An optimizer that consumes a gradient before it is averaged has stepped with that of one replica.
        for piece in bucket.pieces:
            if piece.parameter.grad is None and id(piece.parameter) in self._arrived:
                words = f"the gradient of {piece.name} was set to None before it was averaged"
                by = "by an optimizer inside the backward pass?"
                raise StepError(f"{words} ({by}); step after backward(), and {RESTART}")
        self._step = self._step or self.engine.begin()
        # A copy: if the step fails, the gradients are as FSDP2 left them.
        bucket.flat = bucket.gradients()
        self._step.start(bucket.state, bucket.flat)
        self._num_started += 1

    @torch_private.not_compiled
    def average(self) -> None:
        """Replace gradients that any replica has by their means. Collective over shards and replicas."""
        # A nested pass: the outer one will bring more gradients.
        if torch_private.running_node() is not None:
            return
        engine = self.engine
        try:
            with self._working():
                if not self._are_all_open:
                    self._open_all()
                for bucket in self._buckets[self._num_started :]:
                    self._start(bucket)
                used = [
                    id(piece.parameter) in self._changed and piece.parameter.grad is not None
                    for piece in self._pieces
                ]
                step = cast(Step, self._step)
                committed = step.finish(torch.tensor(used, device="cpu"))
                self._write_gradients(step.unused)
                if not self._has_order:
                    self._learn_order()
        finally:
            # Clipping and the optimizer come next, on the user's stream, and read what ours has written.
            self._comm_stream.current_waits()
        # First: what follows may raise, and the next pass must find nothing of this one.
        self.forget_pass()
        self._changed.clear()
        if not committed:
            engine.reporter.warn_of_nonfinite()
        engine.raise_unless(committed)

    def _abandon(self) -> None:
        self.engine.abandon()
        self.forget_pass()

    def _learn_order(self) -> None:
        """Put buckets that were complete before the pass ended first, in the first process's order."""
        self._has_order = True
        early = [self._buckets.index(bucket) for bucket in self._completed]
        # Over the shards too: the state of the whole model lists buckets in this order. In the second turn,
        # all replicas already have the same input, and so get the same result.
        for members in (self.engine.transport, self.shards):
            first, *others = gather_values(early, members, "the order in which gradients come")
            # Only buckets that were complete on all: for others, some processes would wait in mid-pass.
            early = [number for number in first if all(number in other for other in others)]
        late = [number for number in range(len(self._buckets)) if number not in early]
        self._num_early = len(early)
        self._buckets = [self._buckets[number] for number in [*early, *late]]

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Launch on the communication stream; an error ends the step."""
        # In a hook the current stream is FSDP2's own, which has waited for the user's stream.
        comm_stream = self._comm_stream.wait_for_current(self._buckets[0].device)
        try:
            with self.engine.clock.inside(), torch.no_grad(), comm_stream:
                yield
        except BaseException:
            self._abandon()
            raise

    @property
    def _pieces(self) -> list[Piece]:
        return [piece for bucket in self._buckets for piece in bucket.pieces]

    @property
    def _are_all_open(self) -> bool:
        return all(bucket.state.is_open and bucket.state.is_current for bucket in self._buckets)

    def _open_all(self) -> None:
        engine = self.engine
        # Over the shards as well: if replicas of one shard differ and raise, the other shards would continue
        # without them, and hang in FSDP2's next gather.
        alike_on_all_shards(
            self.shards,
            f"step {engine.steps}",
            {"algorithm": repr(engine.algorithm), "steps": str(engine.steps)},
            lambda: engine.buckets.agree(self._buckets[0].device),
        )
        for bucket in self._buckets:
            bucket.state = engine.open(bucket.state.specs, bucket.device)

    def _write_gradients(self, unused: set[str]) -> None:
        for bucket in self._buckets:
            # Free the copies bucket by bucket.
            flat, bucket.flat = cast(torch.Tensor, bucket.flat), None
            means = split_as(flat, [spec.shape for spec in bucket.state.specs])
            for piece, mean in zip(bucket.pieces, means, strict=True):
                parameter = piece.parameter
                if piece.name in unused:
                    continue
                if parameter.grad is None:
                    # A clone: a view would keep the bucket's memory alive as long as the gradient.
                    parameter.grad = sharded_like(parameter, mean.clone())
                else:
                    # In place: it may be a view of what FSDP2 has reduced as one.
                    local_tensor(parameter.grad).copy_(mean)


def _buckets_of(pieces: Iterable[Piece], engine: Engine) -> list[_Bucket]:
    """Return buckets in the order in which they probably become ready: from the model's end."""
    grouped: dict[tuple[int, torch.device, torch.dtype], list[Piece]] = {}
    for piece in pieces:
        if piece.parameter.requires_grad:
            local = local_tensor(piece.parameter)
            grouped.setdefault((piece.group, local.device, local.dtype), []).append(piece)
    return [
        _Bucket(group, device, engine.buckets.bucket(tuple(specs_of(group))))
        for (_, device, _), group in reversed(grouped.items())
    ]
