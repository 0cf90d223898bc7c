"""Hugging Face Accelerate: its DDP handler, with Thinwire behind it.

Change two imports, and leave the rest of the script as it is:

    from thinwire.integrations.accelerate import DDPCommunicationHookType, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD,
        comm_state_option={"matrix_approximation_rank": 4, "start_powerSGD_iter": 100},
    )
    accelerator = Accelerator(kwargs_handlers=[handler])

docs/migrating.md says what behaves differently.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from weakref import WeakKeyDictionary

import torch
from packaging.version import Version
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.attach import attach
from thinwire.adapters.setup import live_objects
from thinwire.algorithms import Algorithm, BatchedPowerSGD, Cast, PowerSGD
from thinwire.algorithms.exact import WireDtype
from thinwire.errors import AttachError, ConfigError, MissingExtraError, StateError
from thinwire.hooks import PowerSGDState
from thinwire.integrations import SAVED_WITHOUT
from thinwire.sync import GradientSync, engine_of
from thinwire.sync.settings import StepOptions

try:
    import accelerate
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType
    from accelerate.utils import DistributedDataParallelKwargs as StockKwargs
except ImportError as error:
    raise MissingExtraError(
        "thinwire.integrations.accelerate needs accelerate 1.6 or later: "
        "pip install '.[accelerate]' in a clone of Thinwire"
    ) from error
try:
    from accelerate.parallelism_config import ParallelismConfig as StockParallelismConfig
except ImportError:  # Accelerate has it from 1.10 on
    StockParallelismConfig = object

logger = logging.getLogger(__name__)

__all__ = ["DDPCommunicationHookType", "DistributedDataParallelKwargs", "ParallelismConfig"]

Hook = DDPCommunicationHookType
LOW_RANK: dict[object, type[PowerSGD] | type[BatchedPowerSGD]]
LOW_RANK = {Hook.POWER_SGD: PowerSGD, Hook.BATCHED_POWER_SGD: BatchedPowerSGD}
CASTS: dict[object, WireDtype] = {Hook.FP16: "fp16", Hook.BF16: "bf16"}


class ParallelismConfig(StockParallelismConfig):  # type: ignore[misc] # accelerate is untyped
    """Accelerate's own class, but it leaves replicas to Thinwire: FSDP2 gets only the shard dimension.

    Accelerate gives FSDP2 both dimensions, so that PyTorch averages whole gradients between replicas. With
    this class replicas are not averaged until you attach the prepared model, with
    `replicas=accelerator.torch_device_mesh["dp_replicate"]` (docs/sharded-frameworks.md). It takes the
    arguments of Accelerate's class.

    Raises:
        MissingExtraError: Accelerate is older than 1.15.

    Examples:
        >>> ParallelismConfig(dp_replicate_size=4, dp_shard_size=8).fsdp_dim_names
        ['dp_shard_cp']
    """

    def __new__(cls, *args: Any, **settings: Any) -> ParallelismConfig:
        """Refuse versions of Accelerate with which this is not tested."""
        if Version(accelerate.__version__).release < (1, 15):
            raise MissingExtraError(
                f"ParallelismConfig needs accelerate 1.15 or later, and this is {accelerate.__version__}; "
                "pip install 'accelerate>=1.15', or shard and attach the model yourself (docs/sharded.md)"
            )
        return super().__new__(cls)  # type: ignore[no-any-return] # accelerate is untyped

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimension over which FSDP2 shards."""
        return ["dp_shard_cp"]


class _FoundAsStock(type):
    """Makes a class equal to Accelerate's own as a dictionary key, where a subclass would not be found."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is StockKwargs

    def __hash__(cls) -> int:
        return hash(StockKwargs)


@dataclass
class DistributedDataParallelKwargs(StockKwargs, metaclass=_FoundAsStock):  # type: ignore[misc] # untyped
    """Accelerate's handler of the same name; models prepared with it are attached to Thinwire.

    It uses the parameters' names and the Accelerator's `GradScaler`, and registers Thinwire's state with the
    Accelerator: `save_state` and `load_state` include it. One handler serves one Accelerator and any number
    of models. In a run of one process there is nothing to attach.

    Args:
        comm_hook: The hook that averages gradients. NO leaves it to DDP. (Other arguments are DDP's own.)
        comm_wrapper: With FP16 or BF16, the messages of POWER_SGD and BATCHED_POWER_SGD are sent in 16 bits.
            The hooks FP16 and BF16 do so anyway.
        comm_state_option: Settings of POWER_SGD and BATCHED_POWER_SGD, with the names and defaults of
            `thinwire.hooks.PowerSGDState`, including `host_check` and `on_nonfinite`; and `machines` as in
            `thinwire.attach`, True by default. Note that compression starts after `start_powerSGD_iter` =
            1 000 steps.

    Attributes:
        strict: Whether a state must have exactly the parameters trained now; may be set to False.

    Raises:
        ConfigError: An unknown hook, wrapper or setting, or one that would have no effect.
    """

    def __post_init__(self) -> None:
        # Only to check: a bad setting raises now, not when the model is prepared.
        _algorithm_of(self.comm_hook, self.comm_wrapper, self.comm_state_option)
        self.strict = True
        # Keyed by the user's module, which the Accelerator holds until it is told to free it.
        self._syncs: WeakKeyDictionary[torch.nn.Module, GradientSync] = WeakKeyDictionary()
        self._accelerator: Accelerator | None = None
        self._index = 0  # among the objects that the Accelerator saves

    def to_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return Accelerate's own settings only: it would copy all attributes, and ours hold models."""
        settings = {setting.name: getattr(self, setting.name) for setting in fields(StockKwargs)}
        return StockKwargs(**settings).to_dict(*args, **kwargs)  # type: ignore[no-any-return]

    @property
    def syncs(self) -> tuple[GradientSync, ...]:
        """The handles of the models that the Accelerator holds, in the order in which they were prepared."""
        return tuple(self._syncs.values())

    @property
    def sync(self) -> GradientSync:
        """The handle of the one prepared model.

        Raises:
            AttachError: No model has been attached, or more than one.
        """
        if len(self._syncs) != 1:
            raise AttachError(
                f"expected one attached model, got {len(self._syncs)}; accelerator.prepare(model) attaches "
                "in a run of several processes with a comm_hook other than NO; handler.syncs has all models"
            )
        return self.syncs[0]

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Attach a model; Accelerate calls it while it prepares the model.

        Raises:
            AttachError: Not called by this handler's Accelerator, or the model can't be attached.
            ConfigError: The handler is used by two Accelerators, or its settings are no longer valid.
        """
        algorithm = _algorithm_of(self.comm_hook, self.comm_wrapper, self.comm_state_option)
        if algorithm is None:
            return
        # Free dropped models and Accelerators now, at the same point on every process.
        gc.collect()
        accelerator = self._find_accelerator()
        # The scaler comes from the Accelerator.
        steps = {n: v for n, v in self.comm_state_option.items() if n in StepOptions.__annotations__}
        self._syncs[model.module] = attach(model, algorithm, grad_scaler=accelerator.scaler, **steps)
        # Register once for all models: the Accelerator saves and loads registered objects in order.
        if self._accelerator is None:
            self._accelerator, self._index = accelerator, len(accelerator._custom_objects)
            accelerator.register_for_checkpointing(self)
            accelerator.register_save_state_pre_hook(lambda *_: self._be_registered())
            accelerator.register_load_state_pre_hook(lambda _, folder: self._prepare_to_load(Path(folder)))

    def _find_accelerator(self) -> Accelerator:
        """Return this handler's Accelerator: the handler gets only the model."""
        accelerators = [candidate for candidate in live_objects(Accelerator) if candidate.ddp_handler is self]
        if not accelerators:
            raise AttachError(
                "register_comm_hook is for accelerator.prepare(model), of an Accelerator with this handler; "
                "for your own DDP model use thinwire.attach(ddp_model, algorithm)"
            )
        # One Accelerator's models would be saved with the other's checkpoints.
        if len(accelerators) > 1:
            raise ConfigError("this handler is already used by a different Accelerator; create one for each")
        return accelerators[0]

    def _be_registered(self) -> list[Any]:
        """Register this object to be saved and loaded by the Accelerator; return all such objects."""
        assert self._accelerator is not None
        objects: list[Any] = self._accelerator._custom_objects
        if not any(registered is self for registered in objects):  # after `_prepare_to_load`
            objects.insert(self._index, self)
        return objects

    def _prepare_to_load(self, folder: Path) -> None:
        """Unregister if a checkpoint was saved without this handler: Accelerate counts its files."""
        objects = self._be_registered()
        if len(list(folder.glob("custom_checkpoint_*.pkl"))) != len(objects) - 1:
            return
        try:
            saved = torch.load(folder / f"custom_checkpoint_{self._index}.pkl", weights_only=True, mmap=True)
        except (OSError, RuntimeError, UnpicklingError):  # no such file, or it is a user object's
            saved = None
        if not isinstance(saved, Mapping) or saved.keys() != {"models"}:
            logger.warning(SAVED_WITHOUT, folder)
            del objects[self._index]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each model. Collective; Accelerate calls it for a checkpoint.

        See `GradientSync.state_dict`.
        """
        # Each model's state is collective, but processes may free dropped models at different times.
        gc.collect()
        return {"models": [sync.state_dict() for sync in self.syncs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; Accelerate calls it. See `GradientSync.load_state_dict`.

        Raises:
            StateError: It is not such a state, or is from other models.
        """
        models = state.get("models") if isinstance(state, Mapping) else None
        if not isinstance(models, list) or len(models) != len(self._syncs):
            got = f"one of {len(models)} models" if isinstance(models, list) else f"a {type(state).__name__}"
            raise StateError(
                f"expected a handler's state of {len(self._syncs)} models, got {got}; prepare the same "
                "models and register your own objects in the same order as when it was saved"
            )
        # Check all before loading any, so that all are loaded or none.
        for sync, saved in zip(self.syncs, models, strict=True):
            engine_of(sync).check_state_dict(saved, strict=self.strict)
        for sync, saved in zip(self.syncs, models, strict=True):
            sync.load_state_dict(saved, strict=self.strict)


def _algorithm_of(hook: Any, wrapper: Any, options: Mapping[str, Any]) -> Algorithm | None:
    """Return the algorithm for a handler's three settings, None to leave averaging to DDP."""
    for name, got, valid in (
        ("comm_hook", hook, (Hook.NO, *CASTS, *LOW_RANK)),
        ("comm_wrapper", wrapper, (Hook.NO, *CASTS)),
    ):
        # `got in valid` would raise if `got` can't be compared.
        if not isinstance(got, Hook) or got not in valid:
            names = ", ".join(member.name for member in valid)
            raise ConfigError(f"{name} must be one of DDPCommunicationHookType's {names}, got {got!r}")
    if hook in LOW_RANK:
        # The state has torch's names and defaults, and checks values. Group and scaler come from Accelerate.
        try:
            state = PowerSGDState(process_group=None, grad_scaler=None, **options)
        except TypeError as error:
            settings = "settings of a PowerSGDState, such as matrix_approximation_rank, to values"
            raise ConfigError(f"comm_state_option must map {settings}, got {options!r}: {error}") from error
        return state.algorithm(LOW_RANK[hook], CASTS.get(wrapper))
    if options or (wrapper in CASTS and hook not in CASTS):
        got = f"comm_state_option {options} and comm_wrapper {wrapper.name}"
        raise ConfigError(
            f"{got} have no effect with comm_hook {hook.name}; leave them out: comm_state_option is for "
            "POWER_SGD and BATCHED_POWER_SGD, comm_wrapper for any but NO"
        )
    return Cast(CASTS[hook]) if hook in CASTS else None
