"""The protocol of an algorithm: a frozen config, the plans it prepares, and the memory they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from inspect import signature
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

import torch

from thinwire.algorithms.requests import Requests
from thinwire.errors import ConfigError
from thinwire.plan import ParameterSpec, Plan, Route

MAX_SETTING_LENGTH = 60

Kind = TypeVar("Kind", bound="Algorithm")

Granularity: TypeAlias = "int | Literal['parameter', 'bucket']"
"""The unit that a machine's processes do not divide: some elements of a parameter, a parameter, a bucket."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that become ready together.

    Attributes:
        specs: The parameters, in the order of their gradients.
        flat: Their gradients one after the other, shape (sum of elements,), each in its parameter's
            memory order. `run` turns it into the mean, in place.
        loss_scale: The factor that multiplied the loss, a tensor of shape (); None if there was none.
        rank: This member's number in the group.
    """

    specs: tuple[ParameterSpec, ...]
    flat: torch.Tensor
    loss_scale: torch.Tensor | None = None
    rank: int = 0

    @cached_property
    def gradients(self) -> Sequence[torch.Tensor]:
        """One flat view into the bucket for each parameter."""
        return self.split(self.flat)

    def split(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return one view for each parameter into a tensor of the bucket's length."""
        return flat.split_with_sizes([spec.numel for spec in self.specs])


@dataclass(frozen=True)
class Slot:
    """A kind of state that algorithms keep: tensors by label.

    Attributes:
        name: Its name in saved state.
        is_local: Whether it differs between members. If so, its mean is saved, and every later step must
            depend on the mean alone.
        is_elementwise: Whether it has one element for each element of a parameter. If so, its labels are
            parameter names and its tensors are flat, in the parameter's memory order, but saved in the
            parameter's shape. Otherwise its labels are those of routes.
        is_saved: Whether it is saved at all.
        is_listed: Whether a state lists it if it is empty. Not if earlier releases do not know it: DCP could
            not load their states. DCP then loads it only into a run that has it.
        check: Raises `StateError` if a loaded tensor is not valid for the slot. Called with the label, the
            tensor, and the shapes of all parameters by name.
    """

    name: str
    is_local: bool = False
    is_elementwise: bool = False
    is_saved: bool = True
    is_listed: bool = field(default=True, compare=False)
    check: Callable[[str, torch.Tensor, Mapping[str, tuple[int, ...]]], None] | None = field(
        default=None, compare=False, repr=False
    )

    def __hash__(self) -> int:
        return hash(self.name)  # called hundreds of times a step

    def __post_init__(self) -> None:
        if self.is_local and self.is_saved and not self.is_elementwise:
            raise ConfigError(
                f"the slot {self.name!r} is local and saved, but only elementwise slots have a mean that "
                "can be saved; make it elementwise, or equal on all members, or do not save it"
            )


@dataclass
class Memory:
    """The tensors that an algorithm keeps between steps.

    Attributes:
        step: Committed steps so far; those that were not finite do not count.
        slots: Tensors by slot and label. Written only after the commit.

    Examples:
        >>> memory = Memory()
        >>> momentum = Slot("momentum", is_elementwise=True)
        >>> memory[momentum]["weight"] = torch.zeros(8)
        >>> sorted(memory[momentum])
        ['weight']
    """

    step: int = 0
    slots: dict[Slot, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __getitem__(self, slot: Slot) -> dict[str, torch.Tensor]:
        """Return the tensors of a slot by label, to read and to write."""
        tensors = self.slots.get(slot)
        if tensors is None:
            tensors = self.slots[slot] = {}
        return tensors

    def copied(self, labels: Collection[str]) -> Memory:
        """Return a memory with copies of the tensors under some labels."""
        copies = {}
        for slot, tensors in self.slots.items():
            chosen = {label: tensors[label] for label in labels if label in tensors}
            copies[slot] = dict(zip(chosen, map(torch.empty_like, chosen.values()), strict=True))
            if chosen:  # on an accelerator, one launch copies many tensors
                torch._foreach_copy_(list(copies[slot].values()), list(chosen.values()))
        return Memory(self.step, copies)

    def restore(self, before: Memory) -> None:
        """Restore the state of all labels from the copy `before`.

        Tensors of the same shape are written in place: plans may hold tables of their addresses.
        """
        self.step = before.step
        for slot, tensors in self.slots.items():
            old = before[slot]
            for label in tensors.keys() - old.keys():
                del tensors[label]
            for label, was in old.items():
                now = tensors.get(label)
                if now is not None and (now.shape, now.dtype) == (was.shape, was.dtype):
                    now.copy_(was)
                else:
                    tensors[label] = was


class Diagnosis(NamedTuple):
    """How well the last step's approximations were, by route.

    Attributes:
        labels: The labels of the routes.
        relative_errors: Norm of what was not transmitted over the norm of what was to be; shape (routes,),
            float64, or fp32 on a device without float64.
        error_norms: Norm of what was not transmitted, unscaled; same shape and dtype.
    """

    labels: Sequence[str]
    relative_errors: torch.Tensor
    error_norms: torch.Tensor


@dataclass(frozen=True)
class BucketPlan(ABC):
    """How a bucket is averaged: planned once from shapes, can be printed and run.

    Subclasses must implement only `run`.

    Attributes:
        specs: The bucket's parameters, in the order of their gradients.
        routes: How each is sent, after any warm-up.
    """

    specs: tuple[ParameterSpec, ...]
    routes: tuple[Route, ...]

    @cached_property
    def rounds(self) -> int:
        """Messages that wait for one another."""
        return max((route.rounds for route in self.routes), default=0)

    @abstractmethod
    def run(self, bucket: Bucket, memory: Memory) -> Requests:
        """Turn `bucket.flat` into the mean over the group, in place.

        A generator that yields requests and receives their answers. The last one is `Commit`; memory may be
        written only after it. The generator is resumed if all buckets of the step reach their commits with
        healthy values, and closed otherwise. It may overwrite `bucket.flat` before that.

        Args:
            bucket: The gradients of this plan's parameters.
            memory: The memory of all buckets.
        """

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(spec.name for spec in self.specs)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of elements of each parameter."""
        return [spec.numel for spec in self.specs]

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels under which memory may hold tensors of this bucket."""
        return tuple(dict.fromkeys([*self.names, *(route.label for route in self.routes)]))

    def kernels(self, device: torch.device) -> set[str]:
        """Return the names of kernels that all members must share; none if all give the same results."""
        return set()

    def on_state_loaded(self, memory: Memory) -> str:
        """Adapt memory to this plan, after a different plan or a loaded state. Called between steps.

        Returns:
            A sentence that says what could not be kept as it was, and what that means; "" if all was kept.
        """
        return ""

    def diagnose(self, memory: Memory) -> Diagnosis | None:
        """Return how good the last step's approximations were, without host synchronisation, or None."""
        return None


class Algorithm(ABC):
    """How gradients become their mean over the group: a frozen config that the user writes.

    An algorithm of your own needs three things: `slots`, all state that its plans keep; `prepare`, which
    plans a bucket; and that plan's `run`, which averages it. Everything else has a default.
    """

    # All state that its plans keep.
    slots: ClassVar[tuple[Slot, ...]] = ()

    # Optional from here on.

    # Settings that are shown even if they have their default value.
    always_shown: ClassVar[tuple[str, ...]] = ()

    # Other libraries' names for its settings, so that an error can suggest ours.
    names_elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType({})

    # Whether a bucket's later messages are large: it is then better to send each while other buckets'
    # gradients are computed than to send those of all buckets as one at the end.
    pipelines_buckets: ClassVar[bool] = False

    # Whether its commits have `commits_on_device`, so that the device can undo a step at no cost. In steps
    # that drop memory the host may wait.
    decides_on_device: ClassVar[bool] = False

    # How many steps at the start send gradients uncompressed.
    warmup_steps: int = 0

    # Whether a step sends nothing for most entries.
    sends_few_entries: ClassVar[bool] = False

    def __new__(cls: type[Kind], *args: object, **settings: object) -> Kind:
        """Refuse unknown settings with a message that lists the known ones, which `__init__` would not."""
        taken = signature(cls.__init__)
        try:
            taken.bind_partial(None, *args, **settings)
        except TypeError as error:
            defaults = {
                name: parameter.default for name, parameter in taken.parameters.items() if name != "self"
            }
            raise ConfigError(_respelt(cls, defaults, args, settings)) from error
        return super().__new__(cls)

    def __str__(self) -> str:
        """Return it as written in code, mostly without settings that have their default."""
        texts = {
            name: repr(value)
            for name, value in vars(self).items()
            if name in self.always_shown or value != getattr(type(self), name, None)
        }
        short = {name: text if len(text) <= MAX_SETTING_LENGTH else "…" for name, text in texts.items()}
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in short.items())})"

    @property
    def remembers(self) -> bool:
        """Whether its steps write to memory, other than to remove what a different algorithm has left."""
        return True

    @property
    def split_granularity(self) -> Granularity:
        """The unit that must be averaged as a whole; the processes of a machine share the units among them.

        A bucket, unless an algorithm's result for a parameter does not depend on the others in its bucket.
        """
        return "bucket"

    @abstractmethod
    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        """Plan a bucket. Cost: arithmetic on shapes only.

        Args:
            specs: Its parameters, at least one.
            num_members: Members of the group.

        Raises:
            GradientError: A parameter's gradient can't be averaged.
        """

    def plan(self, specs: Sequence[ParameterSpec]) -> Plan:
        """Return how each of a bucket's parameters would be sent. Cost: arithmetic on shapes only."""
        return Plan(self.prepare(specs).routes if specs else ())

    def check_model(self, specs: Sequence[ParameterSpec]) -> None:
        """Raise if the model with these parameters can't be averaged with these settings.

        Raises:
            GradientError: A parameter's gradient can't be averaged.
            ConfigError: A setting does not fit the model.
        """
        self.plan(specs)


def _respelt(
    kind: type[Algorithm],
    defaults: Mapping[str, object],
    args: Sequence[object],
    settings: Mapping[str, object],
) -> str:
    """Return how to write correctly what unknown settings probably meant."""
    names, called = list(defaults), kind.__name__
    for unknown in (name for name in settings if name not in names):
        elsewhere = kind.names_elsewhere.get(unknown)
        # Only settings of this algorithm: `BatchedPowerSGD` lacks some of `PowerSGD`'s.
        meant = [elsewhere] if elsewhere in names else get_close_matches(unknown, names, n=1)
        if meant:
            return f"{called} has no setting {unknown!r}; write {called}({meant[0]}={settings[unknown]!r})"
        return f"{called} has no setting {unknown!r}; it has {', '.join(names) or 'none'}"
    if not names:
        return f"{called} has no settings, got {args[0]!r}; write {called}()"
    # The first positional argument may be anything, such as the model, which other libraries take first.
    value = args[0] if isinstance(args[0], int | float | str) else defaults[names[0]]
    return (
        f"{called} takes settings by name, got {args[0]!r} without a name; write "
        f"{called}({names[0]}={value!r})"
    )
