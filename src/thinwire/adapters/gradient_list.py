"""The adapter for lists of gradients after the backward pass: a bucket for each device and dtype."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from thinwire.adapters import setup
from thinwire.adapters.ddp_model import DIVIDED
from thinwire.algorithms import Algorithm, Bucket
from thinwire.comm import InProcessTransport, Layout, ProcessGroupTransport, Transport, copy_from
from thinwire.comm.process_group import members_over_contributors
from thinwire.errors import AttachError, ConfigError, GradientError, StepError
from thinwire.plan import ParameterSpec
from thinwire.sync import GradientSync, Settings
from thinwire.sync.handle import not_copied
from thinwire.sync.settings import HostCheck, OnNonfinite
from thinwire.sync.weights import Weight, multiply
from thinwire.torch_private import not_compiled

Gradients: TypeAlias = Sequence["torch.Tensor | None"]


class GradientListAdapter(Joinable):
    """Averages lists of gradients over a process group, through an `Engine`.

    Cost: that of the algorithm; a copy of the gradients while they are averaged; and a message of 1 byte per
    parameter, with a host synchronisation, to find which have a gradient anywhere.
    """

    _names_given: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        algorithm: Algorithm,
        *,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: object = None,
        host_check: HostCheck = True,
        on_nonfinite: OnNonfinite = "nan",
        machines: Layout = False,
        weight: Weight | None = None,
    ) -> None:
        super().__init__()
        self.parameters = _checked(parameters)
        self._specs = [ParameterSpec.of(f"parameter[{i}]", p) for i, p in enumerate(self.parameters)]
        transport: Transport = InProcessTransport.group(1)[0]
        # If torchrun has started several processes, each would silently train by itself: this raises.
        if process_group is not None or dist.is_initialized() or os.environ.get("WORLD_SIZE", "1") != "1":
            transport = ProcessGroupTransport(process_group, self.parameters[0].device)
        settings = Settings.of(
            grad_scaler=grad_scaler,
            host_check=host_check,
            on_nonfinite=on_nonfinite,
            names_given=self._names_given,
            weight=weight,
        )
        self.engine = setup.new_engine(algorithm, transport, self._specs, settings, machines)
        self.sync = GradientSync(self.engine)
        self._divides_by_initial = True
        setup.log_start(self.engine, self.parameters)

    def __reduce__(self) -> NoReturn:
        raise not_copied(f"a {type(self).__name__}")

    @not_compiled
    @torch.inference_mode(False)
    @torch.no_grad()
    def average(self, gradients: Gradients) -> tuple[list[torch.Tensor | None], bool]:
        """Return the means of the gradients over the group, and whether the step was committed. Collective.

        The means are new tensors in the layout of the parameters, None if no process has a gradient. A
        gradient that only this process lacks counts as zeros.
        """
        self._check(gradients)
        setup.refuse_averaged_twice(self.parameters, self.engine.transport, StepError)
        # All of this is exposed time: the gradients are ready from the beginning, and the caller waits.
        with self.engine.clock.inside():
            # Before all other collectives of the step: a shadowing process starts with this one.
            scale = members_over_contributors(self)
            self.engine.buckets.agree(self.parameters[0].device)
            # A gradient that is None everywhere stays so: the optimizer then leaves the parameter alone.
            means: list[torch.Tensor | None] = [None] * len(gradients)
            # Buckets must be the same everywhere: a parameter used by any process is in them on all, in
            # parameter order.
            used = torch.tensor([gradient is not None for gradient in gradients], device="cpu")
            work, flags = self.engine.send_used(used)
            work.wait()
            indices_of, buckets = defaultdict[tuple[torch.device, torch.dtype], list[int]](list), []
            for index in flags.nonzero().flatten().tolist():
                indices_of[self.parameters[index].device, self._specs[index].dtype].append(index)
            for (device, dtype), indices in indices_of.items():
                specs = tuple(self._specs[index] for index in indices)
                flat = torch.zeros(sum(spec.numel for spec in specs), dtype=dtype, device=device)
                # Views: the engine averages in place, so these tensors hold the means afterwards.
                for index, part in zip(indices, Bucket(specs, flat).gradients, strict=True):
                    means[index] = mean = self.in_layout(index, part)
                    gradient = gradients[index]
                    if gradient is not None:
                        mean.copy_(gradient)
                # Scale the input, not the mean, so that the residual keeps one unit.
                if scale is not None and not self._divides_by_initial:
                    multiply(flat, scale)
                buckets.append((specs, flat))
            return means, self.engine.average(buckets) if buckets else True

    def in_layout(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor, in a parameter's memory order, as a view of the parameter's shape."""
        spec = self._specs[index]
        strided = flat.as_strided(spec.shape, spec.stride, flat.storage_offset())
        return torch.view_as_complex(strided) if self.parameters[index].is_complex() else strided

    def _check(self, gradients: Gradients) -> None:
        is_alone = isinstance(self.engine.transport, InProcessTransport)
        if is_alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise StepError(
                "this was created for this process alone, before torch.distributed.init_process_group(); "
                "create it afterwards, on every process"
            )
        if len(gradients) != (count := len(self.parameters)):
            raise ConfigError(f"expected {count} gradients, one per parameter, got {len(gradients)}")
        for index, (gradient, parameter) in enumerate(zip(gradients, self.parameters, strict=True)):
            if gradient is not None and gradient.shape != parameter.shape:
                words = f"has shape {tuple(gradient.shape)}, its parameter {tuple(parameter.shape)}"
                raise ConfigError(f"gradient {index} {words}; pass gradients in the order of the parameters")
            if gradient is not None and gradient.is_sparse:
                words = "is sparse and can't be averaged; build the embedding with sparse=False"
                raise GradientError(f"gradient {index} {words}")

    # Uneven inputs: see thinwire.join.

    def join_hook(self, **options: Any) -> JoinHook:
        divides_by_initial = options.get("divide_by_initial_world_size", True)
        if not divides_by_initial:
            setup.refuse_weight_of_contributors(self.engine)
        self._divides_by_initial = divides_by_initial
        return setup.Shadow(
            self,
            step=lambda: self.average([None] * len(self.parameters)),
            # A process that shadowed others has made no optimizer steps meanwhile.
            end=lambda is_last: copy_from(is_last, self.parameters, self.engine.transport),
        )

    @property
    def join_device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        transport = self.engine.transport
        if not isinstance(transport, ProcessGroupTransport):
            raise AttachError(
                "there is no process group to join: this averages over this process alone; call "
                "torch.distributed.init_process_group() before you create it"
            )
        return transport.group


def _checked(parameters: object) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable):
        raise ConfigError(f"expected the model's parameters, got {type(parameters).__name__}")
    tensors = list(parameters)
    wrong = [parameter for parameter in tensors if not isinstance(parameter, torch.Tensor)]
    if wrong or not tensors:
        got = f"a {type(wrong[0]).__name__} among them; pass model.parameters()" if wrong else "none"
        raise ConfigError(f"expected the model's parameters, got {got}")
    if any(hasattr(tensor, "to_local") for tensor in tensors):
        raise ConfigError(f"expected whole parameters, got DTensors; attach a fully_shard model, {DIVIDED}")
    if len(set(map(id, tensors))) < len(tensors):
        raise ConfigError("a parameter is passed more than once; pass model.parameters()")
    return tensors
