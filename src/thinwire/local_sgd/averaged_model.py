"""The user's model: its wrapper, this process's part of it, its optimizers and its averaged tensors."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp_model import ddp_inside, is_fsdp2, is_sharded, names_of, way_in
from thinwire.checks import shown
from thinwire.comm import ProcessGroupTransport, Transport
from thinwire.errors import AttachError, ConfigError, GradientError, StepError
from thinwire.local_sgd.fragment import Averaged, Fragment
from thinwire.local_sgd.inner_optimizers import Optimizers, checked_optimizers
from thinwire.local_sgd.outer import Outer
from thinwire.local_sgd.replica import Replica
from thinwire.local_sgd.training_loop import LOADED, Hook
from thinwire.sync.state import DTYPES, digest_of
from thinwire.tensors.layout import local_tensor
from thinwire.torch_private import non_persistent_buffers, uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

WRITTEN = -1  # in place of a checksum: the weights had changed before it could be computed


@dataclass(eq=False)
class AveragedModel:
    """A model and its fragments. Tensors are looked up each time: the user may freeze or replace some."""

    module: nn.Module  # not wrapped
    replica: Replica = field(default_factory=Replica)  # this process's part of it
    ddp: DistributedDataParallel | None = None  # its wrapper, which may ignore some parameters
    buffers: bool = True  # whether saved floating buffers are averaged
    optimizers: Sequence[torch.optim.Optimizer] = ()  # in step order: the steps of the last one are counted
    entered: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # see `_identities`; empty before
    frozen: Mapping[str, float] = field(default_factory=dict)  # see `frozen_norms`; empty once compared
    fragments: Sequence[Fragment] = ()  # in the order in which they are averaged; none before entry
    make_outer: Outer | None = None
    outer: torch.optim.Optimizer | None = None  # steps the last averages
    shows_average: bool = False  # whether it holds the last average now, not its own values
    before_load: int | None = None  # the checksum before weights were loaded, or WRITTEN; None if none were

    @cached_property
    def device(self) -> torch.device:
        """The model's device; if it is on several, that of its first averaged tensor."""
        return self.tensors()[0].tensor.device

    @property
    def ignored(self) -> Collection[str]:
        """Names of what the DDP model leaves alone, such as experts that differ between processes."""
        return () if self.ddp is None else self.ddp.parameters_to_ignore

    @property
    def lasts(self) -> list[tuple[Averaged, torch.Tensor]]:
        """Each averaged tensor with its last average."""
        return [pair for fragment in self.fragments for pair in fragment.lasts]

    def tensors(self) -> list[Averaged]:
        """Return the averaged tensors as they are now: trainable parameters, and with `buffers` saved floats.

        Integer buffers (BatchNorm's `num_batches_tracked`) have no mean, and those of 8 bits or fewer hold
        fixed weights; buffers that the module does not save (masks, position tables) are constants.
        """
        # After an evaluation FSDP2 may still hold whole parameters, whose shapes are not those of the shards.
        self.replica.show_shards()
        averaged = []
        # In model order, which is the same on every process and determines the layout of messages.
        for parameter, name in names_of(self.module, self.ignored).items():
            if not parameter.requires_grad:
                continue
            if nn.parameter.is_lazy(parameter):
                raise ConfigError(f"{name} has no shape yet; run one forward pass before averaging the model")
            if hasattr(parameter, "to_local") and not self.replica.is_sharded:
                raise GradientError(
                    f"{name} is in parts (a DTensor), and LocalSGD has no replicas; pass replicas, the "
                    "processes with the same part, and shard before you create LocalSGD"
                )
            averaged.append(Averaged(name, parameter, is_buffer=False))
        if not averaged:
            raise AttachError("no parameter of the model is trained, so there is nothing to average")
        # Module by module: only the owner knows which buffers are not saved. A shared one is averaged once.
        seen: set[int] = set()
        for prefix, part in self.module.named_modules() if self.buffers else ():
            for own_name, buffer in part.named_buffers(recurse=False):
                name = f"{prefix}.{own_name}" if prefix else own_name
                if id(buffer) not in seen and own_name not in non_persistent_buffers(part):
                    seen.add(id(buffer))
                    if buffer.dtype in DTYPES and name not in self.ignored:
                        averaged.append(Averaged(name, buffer, is_buffer=True))
        _check_values(averaged)
        return averaged

    def set_optimizers(self, optimizer: Optimizers) -> None:
        """Set the optimizers; raise if they do not train this model."""
        sharded = self.replica.is_sharded
        self.optimizers = checked_optimizers(optimizer, self.tensors(), self.module, is_sharded=sharded)

    def transports(self, subgroup: object) -> tuple[Transport, Transport | None]:
        """Return the transport of the group, and that of the subgroup if there is one."""
        device, ddp, replicas = self.device, self.ddp, self.replica.replicas

        def transport_of(processes: Any) -> Transport:
            return processes if isinstance(processes, Transport) else ProcessGroupTransport(processes, device)

        group = transport_of(ddp.process_group if ddp is not None and replicas is None else replicas)
        if ddp is not None and getattr(group, "group", None) is not ddp.process_group:
            raise ConfigError(
                "replicas differs from the DDP model's group; leave it out, or build both with the same group"
            )
        inner = None if subgroup is None else transport_of(subgroup)
        # Other transports do not say which processes they connect.
        if isinstance(group, ProcessGroupTransport) and isinstance(inner, ProcessGroupTransport):
            members, local = (set(dist.get_process_group_ranks(it.group)) for it in (group, inner))
            if local - members:
                raise ConfigError(
                    f"processes {sorted(local - members)} of the subgroup are not in the process group; "
                    "make subgroups within it: torch.distributed.new_subgroups(group_size=…)"
                )
        return group, inner

    @contextmanager
    @torch.inference_mode(False)
    def holding_average(self) -> Iterator[None]:
        """Make the model hold the last averages inside this context, and restore its values afterwards."""
        lasts = self.lasts
        values = [tensor.value.clone() for tensor, _ in lasts]
        self.shows_average = True
        try:
            for fragment in self.fragments:
                fragment.restore_last()
            yield
        finally:
            # Parameters gathered inside the context hold the average, and FSDP2 would use them again.
            self.replica.show_shards()
            for (tensor, _), value in zip(lasts, values, strict=True):
                tensor.value.copy_(value)
            self.shows_average = False

    def enter(self, averaged: Iterable[Averaged]) -> None:
        """Record which tensors are averaged from now on."""
        self.entered = _identities(averaged)

    def frozen_norms(self) -> dict[str, float]:
        """Return the norm of each frozen parameter's values on this process."""
        norms = {}
        for parameter, name in names_of(self.module, self.ignored).items():
            values = local_tensor(parameter.detach())
            # A quantized tensor, whose class has a dtype of its own, may have no norm.
            if not parameter.requires_grad and type(values) is torch.Tensor and values.dtype in DTYPES:
                dtype = torch.promote_types(values.dtype, torch.float32)
                norms[name] = float(torch.linalg.vector_norm(values, dtype=dtype))
        return norms

    def compare_frozen(self) -> None:
        """Warn, once, of frozen parameters that the user's loop has changed since entry.

        Of a momentum teacher, which follows each process's own model (BYOL, DINO, MoCo).
        """
        before, self.frozen = self.frozen, {}
        now = self.frozen_norms() if before else {}
        # NaN is unequal to itself.
        if changed := [name for name in now if repr(now[name]) != repr(before.get(name, now[name]))]:
            logger.warning(
                "frozen parameters have changed in the loop: %s; they are never averaged, so processes may "
                "end with different ones. To average those of a teacher, make them buffers, or leave "
                "requires_grad=True (out of the optimizer, run under no_grad; not in DDP)",
                changed[:4],
            )

    def check_unchanged(self) -> None:
        """Raise if the model has other tensors than on entry."""
        # A message is flat: with other tensors, its parts would be assigned to the wrong ones.
        tensors = list(self.tensors())
        before, now = self.entered, _identities(tensors)
        parameters = {tensor.name for tensor in tensors if not tensor.is_buffer} & before.keys()
        replaced = sorted(name for name in parameters if before[name][0] != now[name][0])
        if replaced:
            raise StepError(
                f"parameters were replaced inside the context: {replaced[:4]}, as by "
                "load_state_dict(assign=True), so the old ones would be trained; leave the context first, "
                "then make a new optimizer and a new context"
            )
        changed = sorted({name for name, _ in before.items() ^ now.items()})
        if changed:
            raise StepError(
                "the model's trainable parameters or buffers have changed since the context was entered: "
                f"{changed[:4]}; leave it before you freeze, unfreeze, convert, replace or resize any, and "
                "enter a new one"
            )

    # Weights that were changed by loading, not by a step.

    def note_loads(self, attached: ExitStack) -> None:
        """Notice, until `attached` is closed, when weights are loaded."""
        for part in self.module.modules():  # each may be loaded separately
            register: Any = part.register_load_state_dict_pre_hook
            attached.enter_context(register(Hook(self._note_load)))

    def _note_load(self, part: nn.Module, state: Mapping[str, Any], *_: object) -> None:
        if self.before_load is None:
            trained = {item.value.data_ptr() for item in self.tensors() if not item.is_buffer} - {0}
            tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
            # torch.distributed.checkpoint writes to the model's own tensors, and then has it load them.
            is_written = any(local_tensor(tensor).data_ptr() in trained for tensor in tensors)
            self.before_load = WRITTEN if is_written else self._checksum()

    def has_loaded(self) -> bool:
        """Return whether the weights differ from those before loading."""
        # The user may have loaded other weights for an evaluation, and then the model's own again.
        if self.before_load is not None and self.before_load == self._checksum():
            self.before_load = None
        return self.before_load is not None

    def check_loads(self) -> None:
        """Raise if loaded weights have changed the model."""
        if self.has_loaded():
            raise StepError(LOADED)

    def _checksum(self) -> int:
        self.check_unchanged()  # loading may have replaced parameters
        return digest_of([tensor.value for tensor in self.tensors() if not tensor.is_buffer])


def _identities(averaged: Iterable[Averaged]) -> dict[str, tuple[object, ...]]:
    """Return each tensor's properties that must not change: object, shape, dtype and device."""
    return {
        name: (id(tensor), tuple(value.shape), value.dtype, value.device)
        for name, tensor, value in ((item.name, item.tensor, item.value) for item in averaged)
    }


def _check_values(averaged: Iterable[Averaged]) -> None:
    for item in averaged:
        if item.value.dtype not in DTYPES:
            raise GradientError(
                f"{item.name} is trained in {item.value.dtype}, which can't be averaged, expected 16 bits "
                "or more; keep it in bf16 or fp32, or freeze it: requires_grad_(False)"
            )
        if item.tensor.is_meta:
            raise AttachError(
                f"{item.name} is on the meta device and has no values yet; call model.to_empty(device=…) and "
                "initialise or load it, then average the model"
            )


def unwrapped(model: object) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Return the module, and the DDP model around it if there is one."""
    ddp, inner = ddp_inside(model), uncompiled(model)
    if ddp is not None:
        return ddp.module, ddp
    if not isinstance(inner, nn.Module):
        way = way_in(model)
        raise ConfigError(f"expected a torch.nn.Module, got {shown(model)}{way and f'; {way}'}")
    # Its shards are cut from flattened, concatenated parameters, so they have no parameter names.
    if is_sharded(inner) and not is_fsdp2(inner):
        raise AttachError(
            f"{type(inner).__name__} is sharded by FullyShardedDataParallel (FSDP1); shard it with "
            "torch.distributed.fsdp.fully_shard instead, or pass the plain module if it fits on each device"
        )
    return inner, None


def replica_of(
    module: nn.Module, replicas: dist.ProcessGroup | Transport | DeviceMesh | None, *, has_subgroup: bool
) -> Replica:
    """Describe this process's replica of a model."""
    # DTensor and DeviceMesh take seconds to import, so they are recognised by their attributes.
    has_parts = any(hasattr(parameter, "to_local") for parameter in module.parameters())
    if not hasattr(replicas, "get_group") and not ((replicas is not None and has_parts) or is_fsdp2(module)):
        return Replica(replicas)
    if has_subgroup:
        raise ConfigError(
            "subgroup can't be combined with a sharded model, whose replicas are its fast groups; leave it "
            "out"
        )
    replica: Replica = import_module("thinwire.local_sgd.sharded_replica").new_replica(module, replicas)
    return replica
