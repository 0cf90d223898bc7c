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
"""What processes of a machine do not divide: some elements of a parameter, a parameter, or a bucket."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that become ready together.

    Attributes:
        specs: The parameters, in the order of their gradients.
        flat: Their gradients one after the other, shape (sum of elements,), each in its parameter's
            order of memory. The exchange turns it into the mean, in place.
        loss_scale: What the loss was multiplied by, a tensor of shape (); None if it was not.
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
    """A kind of thing that algorithms remember: some tensors by label.

    Attributes:
        name: What it is called in saved state.
        is_local: Whether it differs between members. Then its mean is saved, and every later step must depend
            on the mean alone.
        is_elementwise: Whether it has an element for each of a parameter's. Then its labels are the names of
            parameters, its tensors flat, in the parameter's order of memory, and saved in the parameter's
            shape. If not, its labels are those of routes.
        is_saved: Whether it is saved at all.
        check: Raises `StateError` if a loaded tensor can't be one of it. Called with its label, the tensor,
            and the shapes of all parameters by name.
    """

    name: str
    is_local: bool = False
    is_elementwise: bool = False
    is_saved: bool = True
    check: Callable[[str, torch.Tensor, Mapping[str, tuple[int, ...]]], None] | None = field(
        default=None, compare=False, repr=False
    )

    def __hash__(self) -> int:
        return hash(self.name)  # asked for hundreds of times a step

    def __post_init__(self) -> None:
        if self.is_local and self.is_saved and not self.is_elementwise:
            raise ConfigError(
                f"the slot {self.name!r} is local and saved, so its mean is saved, which only elementwise "
                "slots have; make it elementwise, or equal on all members, or do not save it"
            )


@dataclass
class Memory:
    """The tensors that an algorithm keeps between steps.

    Attributes:
        step: Committed steps so far; those that were not finite do not count.
        slots: Tensors by slot and label. Written behind the commit only.

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
        """Return a memory with copies of what is kept under some labels."""
        copies = {}
        for slot, tensors in self.slots.items():
            chosen = {label: tensors[label] for label in labels if label in tensors}
            copies[slot] = dict(zip(chosen, map(torch.empty_like, chosen.values()), strict=True))
            if chosen:  # on an accelerator one launch copies many
                torch._foreach_copy_(list(copies[slot].values()), list(chosen.values()))
        return Memory(self.step, copies)

    def restore(self, before: Memory) -> None:
        """Become what was copied `before`, of all labels.

        Tensors of the same shape are written in place: plans may have tables of where they lie.
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
        labels: Of the routes.
        relative_errors: Norm of what was not transmitted over the norm of what was to be; shape (routes,), of
            float64, or fp32 on a device without that.
        error_norms: Norm of what was not transmitted, unscaled; of the same type and shape.
    """

    labels: Sequence[str]
    relative_errors: torch.Tensor
    error_norms: torch.Tensor


@dataclass(frozen=True)
class BucketPlan(ABC):
    """How a bucket travels: made once from shapes, printed, executed.

    Only `run` must be written.

    Attributes:
        specs: The bucket's parameters, in the order of their gradients.
        routes: How each travels, once past any warm-up.
    """

    specs: tuple[ParameterSpec, ...]
    routes: tuple[Route, ...]

    @abstractmethod
    def run(self, bucket: Bucket, memory: Memory) -> Requests:
        """Turn `bucket.flat` into the mean over the group, in place.

        A generator that yields requests and receives their answers. The last one is `Commit`: behind it, and
        only there, memory is written. It is resumed when all buckets of the step stand at theirs and what
        they have received is healthy, and closed otherwise. Until then it may use `bucket.flat` as it likes.

        Args:
            bucket: Of this plan's parameters.
            memory: That of all buckets.
        """

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(spec.name for spec in self.specs)

    @cached_property
    def sizes(self) -> list[int]:
        """The elements of each parameter."""
        return [spec.numel for spec in self.specs]

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels that memory may have for tensors of this bucket."""
        return tuple(dict.fromkeys([*self.names, *(route.label for route in self.routes)]))

    def kernels(self, device: torch.device) -> set[str]:
        """Return the names of kernels that all members must have in common; none if all give the same."""
        return set()

    def on_state_loaded(self, memory: Memory) -> str:
        """Make memory fit this plan, after a different plan or a loaded state. Outside of any step.

        Returns:
            What could not be taken over as it was, and what that means, in a sentence; "" if all could.
        """
        return ""

    def diagnose(self, memory: Memory) -> Diagnosis | None:
        """Return how well the last step's approximations were, not read back; None if that is not known."""
        return None


class Algorithm(ABC):
    """How gradients become their mean over the group: what the user wrote; frozen, it never changes.

    An algorithm of your own needs three things: `slots`, all that its plans remember; `prepare`, which plans
    a bucket; and `run` of that plan, which averages it. All else has a default.
    """

    # All that its plans remember and write.
    slots: ClassVar[tuple[Slot, ...]] = ()

    # Optional from here on.

    # Settings that are shown even with their default.
    always_shown: ClassVar[tuple[str, ...]] = ()

    # Other libraries' names of its settings, to tell a user who types one.
    names_elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType({})

    # Whether a bucket's later messages are so large that each had better travel while gradients of other
    # buckets are computed, than in one with those of all buckets at the end.
    pipelines_buckets: ClassVar[bool] = False

    # Whether its commits have `commits_on_device`, so that the device takes back a step at no cost. In steps
    # that drop memory the host may wait.
    decides_on_device: ClassVar[bool] = False

    # The first steps, in which gradients travel uncompressed.
    warmup_steps: int = 0

    # Whether a step says nothing of most entries.
    sends_few_entries: ClassVar[bool] = False

    def __new__(cls: type[Kind], *args: object, **settings: object) -> Kind:
        """Refuse settings that it does not take, before `__init__`, which would not say what it takes."""
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
        """Return how it is written in code, mostly without what has its default."""
        texts = {
            name: repr(value)
            for name, value in vars(self).items()
            if name in self.always_shown or value != getattr(type(self), name, None)
        }
        short = {name: text if len(text) <= MAX_SETTING_LENGTH else "…" for name, text in texts.items()}
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in short.items())})"

    @property
    def remembers(self) -> bool:
        """Whether its steps write to memory, other than to take out what a different algorithm has left."""
        return True

    @property
    def split_granularity(self) -> Granularity:
        """The unit that must be averaged as one; the processes of a machine divide the rest of the work.

        A bucket, unless an algorithm says that what becomes of a parameter does not depend on its neighbours.
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
        """Return how each of a bucket's parameters would travel. Cost: arithmetic on shapes only."""
        return Plan(self.prepare(specs).routes if specs else ())

    def check_model(self, specs: Sequence[ParameterSpec]) -> None:
        """Refuse a model, given by all its parameters, that can't be averaged as asked for.

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
    """Return how to write what was meant by settings that an algorithm does not take."""
    names, called = list(defaults), kind.__name__
    for unknown in (name for name in settings if name not in names):
        elsewhere = kind.names_elsewhere.get(unknown)
        # Only what this algorithm has: `BatchedPowerSGD` lacks some of `PowerSGD`'s.
        meant = [elsewhere] if elsewhere in names else get_close_matches(unknown, names, n=1)
        if meant:
            return f"{called} has no setting {unknown!r}; write {called}({meant[0]}={settings[unknown]!r})"
        return f"{called} has no setting {unknown!r}; it has {', '.join(names) or 'none'}"
    if not names:
        return f"{called} has no settings, got {args[0]!r}; write {called}()"
    # It may be a model, say, in the place that a different library has for it.
    value = args[0] if isinstance(args[0], int | float | str) else defaults[names[0]]
    return (
        f"{called} takes settings by name, got {args[0]!r} without one; write {called}({names[0]}={value!r})"
    )
