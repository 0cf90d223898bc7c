"""epfml-compatible PowerSGD (`from thinwire.powersgd import PowerSGD, Config, optimizer_step`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from typing_extensions import Unpack

from thinwire import algorithms
from thinwire.adapters.gradient_list import GradientListAdapter, Gradients
from thinwire.algorithms.lowrank.config import ELSEWHERE, LowRankRoute, translated
from thinwire.checks import shown
from thinwire.errors import ConfigError, StepError
from thinwire.plan import ParameterSpec, Plan
from thinwire.sync.settings import StepOptions, checked_on_nonfinite, checked_scaler
from thinwire.sync.stats import Stats
from thinwire.sync.weights import Weight, checked_weight
from thinwire.torch_private import was_unscaled


class Aggregator(ABC):
    """Averages gradients over processes; derive your own from it."""

    @abstractmethod
    def aggregate(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the (approximate) mean gradients; leave in the input what was not sent, zeros if nothing."""


class Config(NamedTuple):
    """Settings of `PowerSGD`, with the reference's names and defaults.

    Attributes:
        rank: Matrix rank of the factors; lower sends fewer bytes.
        min_compression_rate: A matrix is compressed only if it has more elements than this times
            0.5 · num_iters_per_step · rank · sum(shape), with a rank of at most the smallest size in the
            shape. For a matrix that product is the elements sent in a step; for a convolution it is fewer, as
            in the reference. (16-bit gradients, whose factors have 32, count half. With a rate of 1 or more,
            gradients that would not shrink as a whole are sent uncompressed.)
        num_iters_per_step: Rounds per step. Each sends one factor of what earlier rounds left over, left and
            right in turn, and their results add up.
        start_compressing_after_num_steps: Steps at the start that average uncompressed gradients.
    """

    rank: int
    min_compression_rate: float = 2
    num_iters_per_step: int = 1
    start_compressing_after_num_steps: int = 100


class AggregatorOptions(StepOptions, total=False):
    """Keyword options of aggregators over all of a model's parameters."""

    process_group: dist.ProcessGroup | None
    grad_scaler: GradScaler | None
    weight: Weight | None


class AlgorithmAggregator(GradientListAdapter, Aggregator):
    """Averages gradients by any of Thinwire's algorithms, such as `thinwire.Quantize(bits=4)`.

    Args:
        params: The model's parameters, in the same order in every run: saved state identifies them by
            position.
        algorithm: How gradients become their mean over the group.
        options: All by name.
            `process_group`: None for the default one; if there is none, this process is the only worker.
            `grad_scaler`: The `GradScaler` that scales the loss, if there is one. The residual is then kept
            in unscaled units, and `optimizer_step` steps through the scaler.
            `host_check`: As in `thinwire.attach`, but True by default. If False, `optimizer_step` can't skip
            a step that is not finite: pass a `GradScaler`, which can, or use "zero".
            `on_nonfinite`: What `aggregate` returns if a mean is not finite: NaN, or zeros ("zero").
            `optimizer_step` then skips the step on all processes; with "nan" only if the algorithm keeps a
            residual: otherwise only a `GradScaler` checks. With "raise" both raise `NonfiniteError`.
            `machines`: As in `thinwire.attach`, but False by default, as in the reference.
            `weight`: As in `thinwire.attach`. A direct `aggregate` then leaves zeros in its input, and the
            residual stays in memory.

    A direct `aggregate` leaves the residual in its input, to be added in full to the next gradients: the
    `error_decay` of `TopK` needs `optimizer_step`.

    Raises:
        ConfigError: A setting is of the wrong type or out of range, or there are no parameters.
        AttachError: This process is not in the group, or `torchrun` has started several and
            `torch.distributed` is not initialised.

    Cost per step: that of the algorithm and of `GradientListAdapter`.

    Examples:
        >>> import thinwire
        >>> layer = torch.nn.Linear(64, 32)  # in a process group
        >>> aggregator = AlgorithmAggregator(layer.parameters(), thinwire.Quantize(bits=4))
        >>> layer(torch.ones(1, 64)).sum().backward()
        >>> optimizer_step(torch.optim.AdamW(layer.parameters()), aggregator)
        True
        >>> aggregator.stats().compression_ratio > 7
        True
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        algorithm: algorithms.Algorithm,
        **options: Unpack[AggregatorOptions],
    ) -> None:
        self.grad_scaler = checked_scaler(options.get("grad_scaler"))
        super().__init__(params, algorithm, **options)

    @torch.no_grad()
    def aggregate(self, gradients: Gradients) -> list[Any]:
        """Return the mean gradients; leave the residual in the input, for the next gradients to be added to.

        For loops that keep the error in `p.grad`, as the reference does: pass the same tensors again. The
        part of the error that 16-bit gradients can't hold stays in memory. The error in your tensors is not
        in the state: to save and resume, use `optimizer_step`.

        Args:
            gradients: One for each parameter, None if it has none on this process; overwritten.

        Returns:
            New tensors; None if no process has a gradient. If a mean is not finite, they are NaN (zeros,
            with `on_nonfinite="zero"`), and the input is as it was.

        Raises:
            NonfiniteError: A mean is not finite, and `on_nonfinite` is "raise"; the input is as it was.
            ConfigError: The number of gradients or a shape differs from that of the parameters.
            GradientError: A gradient is sparse.
            CommunicationError: A collective failed; memory is as it was.
        """
        means, committed = self.average(gradients)
        if not committed:
            self.engine.reporter.warn_of_nonfinite()
        # A step that was not committed has sent nothing, so the input stays.
        for index, gradient in enumerate(gradients if committed else ()):
            if gradient is not None:
                self._leave_error(index, gradient)
        return means

    def _leave_error(self, index: int, gradient: torch.Tensor) -> None:
        state, name = self.engine.state, self._specs[index].name
        # With a weight the residual stays in memory: the next step would scale it again.
        error = None if self.engine.settings.weight is not None else state.take_error(name)
        if error is None:
            gradient.zero_()
            return
        # In the units and dtype of the gradient: the loop adds the next gradient to it.
        scale = 1.0 if self.grad_scaler is None else self.grad_scaler.scale(torch.ones_like(error[:1]))
        gradient.copy_(self.in_layout(index, error * scale))
        held = torch.empty_like(error)
        self.in_layout(index, held).copy_(gradient)
        residual = error - held / scale
        # The part that the gradient's dtype can't hold stays in memory.
        if gradient.dtype.itemsize < error.dtype.itemsize and residual.any():
            state.put_error(name, residual)

    @property
    def step_counter(self) -> int:
        """Steps so far, including warm-up and skipped steps."""
        return self.sync.steps

    @property
    def plan(self) -> Plan:
        """How each parameter is sent."""
        return self.sync.plan

    def stats(self) -> Stats:
        """Return the statistics so far; see `thinwire.Stats`."""
        return self.sync.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the memory, the same on every process. Collective; see `GradientSync.state_dict`."""
        return self.sync.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load a saved state, on any number of processes; see `GradientSync.load_state_dict`."""
        self.sync.load_state_dict(state, strict=strict)


class AllReduce(Aggregator):
    """Averages uncompressed gradients.

    Args:
        options: As in `AlgorithmAggregator`; with `on_nonfinite="nan"` the means are not checked.

    Raises:
        ConfigError: An option is not valid, or `on_nonfinite` conflicts with the scaler.
    """

    def __init__(self, **options: Unpack[AggregatorOptions]) -> None:
        checked_on_nonfinite(options.get("on_nonfinite", "nan"), checked_scaler(options.get("grad_scaler")))
        checked_weight(options.get("weight"))
        self._options = options
        self._aggregator: AlgorithmAggregator | None = None

    def aggregate(self, gradients: Gradients) -> list[Any]:
        """See `AlgorithmAggregator.aggregate`; without gradients, nothing is sent or returned."""
        return self.over(gradients).aggregate(gradients) if gradients else []

    def over(self, tensors: Gradients) -> AlgorithmAggregator:
        """Return an aggregator over tensors like these. It has no state, so other tensors get a new one."""
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) < len(tensors):
            raise ConfigError(
                "AllReduce got None as a gradient, whose shape it can't know; leave that gradient out"
            )

        def kinds(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
            return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]

        if self._aggregator is None or kinds(self._aggregator.parameters) != kinds(present):
            self._aggregator = AlgorithmAggregator(present, algorithms.AllReduce(), **self._options)
        return self._aggregator


class PowerSGD(AlgorithmAggregator):
    """Sends low-rank factors of every gradient matrix; what is not sent is added to the next gradients.

    Source: Vogels et al., "PowerSGD" (arXiv 1905.13727), in the form of the reference implementation, which
    is algorithm 2 of "PowerGossip" (arXiv 2008.01425): one round for each iteration, left and right in turn.
    Each matrix is normalised on its own. Gradients may have any floating dtype.

    Args:
        params: As in `AlgorithmAggregator`, like the options.
        config: The settings.
        options: By name.

    Raises:
        ThinwireError: See `AlgorithmAggregator`.

    Cost per step: `num_iters_per_step` rounds of r · (rows or columns) elements for each matrix, and that of
    `GradientListAdapter`.
    """

    _names_given: ClassVar[Mapping[str, str]] = {ELSEWHERE.get(name, name): name for name in Config._fields}

    def __init__(
        self, params: Iterable[torch.Tensor], config: Config, **options: Unpack[AggregatorOptions]
    ) -> None:
        if not isinstance(config, Config):
            raise ConfigError(f"expected thinwire.powersgd.Config(rank=…), got {shown(config)}")
        algorithm = EpfmlPowerSGD(**translated(config._asdict()), alternating=True)
        super().__init__(params, algorithm, **options)
        self.config = config


def optimizer_step(optimizer: torch.optim.Optimizer, aggregator: Aggregator) -> bool:
    """Average the gradients in `p.grad` over the processes, and step the optimizer with the means.

    Thinwire's aggregators keep the error in their memory, and `p.grad` is None afterwards: the loop may call
    `optimizer.zero_grad()` or not. With your own aggregator, as with the reference, `p.grad` becomes the
    error that it left in its input: do not zero it.

    Args:
        optimizer: Any optimizer, with any number of parameter groups, over the aggregator's parameters.
        aggregator: Averages the gradients. If it has a `grad_scaler`, that makes the step; call its
            `update()` as usual. Do not call `unscale_` before: the gradients are not averaged yet.

    Returns:
        False if the step was skipped, on all processes: a mean was not finite.

    Raises:
        ConfigError: It is not an aggregator, or its parameters are not the optimizer's.
        StepError: The gradients were unscaled already.
        NonfiniteError: A mean is not finite, and the aggregator's `on_nonfinite` is "raise"; memory, `p.grad`
            and parameters are as they were.
        CommunicationError: A collective failed; memory is as it was.
    """
    if not isinstance(aggregator, Aggregator):
        raise ConfigError(f"expected an Aggregator such as PowerSGD(params, config), got {shown(aggregator)}")
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if isinstance(aggregator, AllReduce):
        aggregator = aggregator.over(parameters)
    elif isinstance(aggregator, AlgorithmAggregator):
        parameters = _in_order_of(aggregator, parameters)
    else:
        return _step_keeping_error(optimizer, aggregator, [p for p in parameters if p.grad is not None])
    scaler = aggregator.grad_scaler
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    if scaler is not None and was_unscaled(scaler, optimizer):
        words = "grad_scaler.unscale_(optimizer) was called before optimizer_step, when the gradients are not"
        raise StepError(f"{words} averaged yet; leave out unscale_")
    means, committed = aggregator.average([parameter.grad for parameter in parameters])
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad = mean
    # Call the scaler even for a skipped step: it lowers its scale if the means are not finite.
    if scaler is not None:
        scaler.step(optimizer)
    elif committed:
        optimizer.step()
    # The means are used: if they stayed, the next backward pass would add to them.
    for parameter in parameters:
        parameter.grad = None
    return committed


def _in_order_of(aggregator: AlgorithmAggregator, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    # The aggregator's state identifies parameters by this order.
    here = set(map(id, parameters))
    there = {id(parameter) for parameter in aggregator.parameters if parameter.requires_grad}
    if here != there:
        raise ConfigError(
            f"the optimizer has {len(here - there)} parameters that the aggregator lacks, and lacks "
            f"{len(there - here)} of the aggregator's; create one aggregator per optimizer, with all its "
            "parameters"
        )
    return aggregator.parameters


def _step_keeping_error(
    optimizer: torch.optim.Optimizer, aggregator: Aggregator, parameters: list[torch.Tensor]
) -> bool:
    """Step as in the reference: between steps, `p.grad` is the error that the aggregator left."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    means = aggregator.aggregate(gradients)
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad = mean
    optimizer.step()
    # The error, to which the next backward pass adds its gradients.
    for parameter, left in zip(parameters, gradients, strict=True):
        parameter.grad = left
    return True


class EpfmlPowerSGD(algorithms.PowerSGD):
    """`thinwire.PowerSGD`, except that it compresses the parameters that the reference compresses."""

    def _route(self, spec: ParameterSpec) -> LowRankRoute:
        shape, dtype = spec.matrix_shape, self.message_dtype(spec.dtype)
        if shape is None:
            return self.uncompressed_route(spec, dtype)
        # The reference's `avg_compressed_size` counts by the parameter's shape, not the matrix's.
        elements = self.factor_pairs * min(self.matrix_rank, *spec.shape) * sum(spec.shape)
        uncompressed_bytes = spec.numel * self.uncompressed_dtype(spec.dtype).itemsize
        if elements * dtype.itemsize * self.min_compression_ratio >= uncompressed_bytes:
            return self.uncompressed_route(spec, dtype)
        return self.compressed_route([spec], shape, min(self.matrix_rank, *shape))
