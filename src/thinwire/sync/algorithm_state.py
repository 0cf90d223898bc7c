"""AlgorithmState: what an algorithm remembers between steps, and how it is taken back, saved and loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

from thinwire.algorithms import Algorithm, Memory, Slot
from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import Transport
from thinwire.plan import ParameterSpec
from thinwire.sync.partition import IntraNodePartition, Ranges
from thinwire.sync.state import (
    Cuts,
    Position,
    SavedState,
    Tensors,
    check_model,
    fitting,
    in_memory_order,
    pack,
    tensors_to_save,
)
from thinwire.sync.state_messages import add_up, assemble, average_local, parts_of, parts_of_all
from thinwire.tensors import accelerators

# Steps of which the host does not learn whether they were finite, counted in one launch.
COUNTED_TOGETHER = 256


class Remembered(NamedTuple):
    """All that steps change, as it was at one time."""

    memory: Memory
    pending_state: Tensors
    pending_of: Literal["all", "machine", "process"]
    held: dict[str, Ranges]  # parts of parameters, if processes of a machine share the work
    unsynced_names: set[str]
    nonfinite: tuple[int, list[torch.Tensor], torch.Tensor | int]


class AlgorithmState:
    """Memory, what was loaded and waits for its bucket, and counts of steps.

    Attributes:
        specs: All parameters that are known, by name, in the order of the model.
        all_known: Whether they were known from the start.
        memory: What the algorithm reads and writes.
        pending_state: Loaded and not in memory yet, by slot and parameter, in the parameter's shape.
        pending_of: Whom that belongs to: to all as a mean, to each machine, or to each process, of which a
            machine has the sum.
        unsynced_names: Parameters whose local slots have changed since they were averaged.
        nonfinite_steps: Steps that were not finite, as far as the host knows.
        may_remember: Whether some process of this machine may have something in memory.
        torn: The step that has written memory, and whose means did not come; "" if there is none.
        loaded_digest: Of what was loaded last, for processes to compare.
        unchecked: A loaded state of which no one knows yet whether it is of this model.
    """

    def __init__(
        self,
        specs: Iterable[ParameterSpec],
        inter_node: Transport,
        partition: IntraNodePartition | None,
        num_parts: int,
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.all_known = bool(self.specs)
        self.memory = Memory()
        self.pending_state: Tensors = {}
        self.pending_of: Literal["all", "machine", "process"] = "all"
        self.unsynced_names: set[str] = set()
        self.nonfinite_steps = 0
        self.may_remember = False
        self.torn = ""
        self.loaded_digest: int | None = None
        self.unchecked: SavedState | None = None
        self._inter_node, self._partition, self._num_parts = inter_node, partition, num_parts
        self._unseen: list[torch.Tensor] = []  # which steps were healthy
        self._unseen_nonfinite: torch.Tensor | int = 0  # of those no longer there

    # Steps.

    @property
    def steps(self) -> int:
        """Steps so far, those that were not finite included."""
        return self.memory.step + self.nonfinite_steps

    def memory_at(self, step: int) -> Memory:
        """Return the memory for a step, with the count that the algorithm goes by: of turns of all parts."""
        # The same slots: what is written behind the commit is written for all parts.
        return Memory((step - self.nonfinite_steps) // self._num_parts, self.memory.slots)

    def has(self, slots: Iterable[Slot]) -> bool:
        """Return whether something is in memory for some slots, or will be when its bucket comes."""
        return any(self.memory[slot] or self.pending_state.get(slot) for slot in slots)

    def count_unseen(self, is_healthy: torch.Tensor) -> None:
        """Count a step of which the host does not learn whether it was finite."""
        # Added up where they are, since to read one makes the host wait; and seldom, since each sum is a
        # launch.
        self._unseen.append(is_healthy)
        if len(self._unseen) == COUNTED_TOGETHER:
            self._unseen_nonfinite = self._recent_nonfinite() + self._unseen_nonfinite
            self._unseen = []

    def unseen_nonfinite_steps(self) -> int:
        """Return how many of those were not. Cost: a host synchronisation, if there were any."""
        recent = self._recent_nonfinite() if self._unseen else 0
        return int(recent + self._unseen_nonfinite)

    def _recent_nonfinite(self) -> torch.Tensor:
        device = self._unseen[-1].device
        return (~torch.stack([is_healthy.to(device) for is_healthy in self._unseen])).sum()

    # Going back, as if the steps since then had not been made.

    def remembered(self) -> Remembered:
        """Return copies of all that steps change."""
        labels = {label for tensors in self.memory.slots.values() for label in tensors}
        return Remembered(
            self.memory.copied(labels),
            {
                slot: {label: tensor.clone() for label, tensor in tensors.items()}
                for slot, tensors in self.pending_state.items()
            },
            self.pending_of,
            {} if self._partition is None else dict(self._partition.held_ranges),
            set(self.unsynced_names),
            (self.nonfinite_steps, list(self._unseen), self._unseen_nonfinite),
        )

    def go_back(self, before: Remembered) -> None:
        """Remember again what `remembered` has returned."""
        self.memory.restore(before.memory)
        self.pending_state, self.pending_of = before.pending_state, before.pending_of
        if self._partition is not None:
            self._partition.held_ranges = before.held
        self.unsynced_names = before.unsynced_names
        self.nonfinite_steps, self._unseen, self._unseen_nonfinite = before.nonfinite

    # The residual.

    def take_error(self, name: str) -> torch.Tensor | None:
        """Take the residual of a parameter, flat and unscaled, which is the caller's then; None if none.

        If processes of a machine share it, it is zeros for what others hold, and the rest times their number:
        its mean over the machine is the residual.
        """
        self.unsynced_names.add(name)
        # Other local memory belongs to this residual, and would be wrong beside a different one.
        for slot in self.memory.slots:
            if slot.is_local and slot != ERROR:
                self.memory[slot].pop(name, None)
        error = self.memory[ERROR].pop(name, None)
        if error is None or self._partition is None:
            return error
        whole = error.new_zeros(self.specs[name].numel)
        whole[self._partition.held(name)] = error * self._partition.intra_node.size
        return whole

    def put_error(self, name: str, error: torch.Tensor) -> None:
        """Make a tensor the residual of a parameter; of what `take_error` has returned, or a part of it."""
        self.unsynced_names.add(name)
        self.may_remember = True
        if self._partition is not None:
            error = error[self._partition.held(name)] / self._partition.intra_node.size
        self.memory[ERROR][name] = error

    def regroup(self, error_scale: float) -> None:
        """Go on in a group of other members, with residuals that count `error_scale` times as much."""
        for slot, tensors in self.memory.slots.items():
            for tensor in tensors.values() if slot.is_local and slot.is_elementwise else ():
                tensor.mul_(error_scale)
        # Only some members may have loaded a state or averaged their residuals; both must be the same on all
        # members, so reset them.
        self.loaded_digest, self.unsynced_names = None, set(self.specs)

    def error_norm(self) -> float:
        """Return the norm of this process's residual. Cost: a norm, and a host synchronisation."""
        errors = [
            error.to(accelerators.widest_dtype(error.device)).norm() for error in self.memory[ERROR].values()
        ]
        return float(torch.stack(errors).norm()) if errors else 0.0

    def memory_bytes(self) -> int:
        """Return the bytes of all that the algorithm remembers on this process."""
        slots = self.memory.slots.values()
        return sum(tensor.nbytes for tensors in slots for tensor in tensors.values())

    def residual_bytes(self) -> int:
        """Return the bytes that `save` averages, exactly: of what differs between the processes."""
        return sum(
            tensor.nbytes
            for slot, tensors in self.memory.slots.items()
            if slot.is_local and slot.is_elementwise and slot.is_saved
            for tensor in tensors.values()
        )

    # Saving.

    def save(self, algorithm: Algorithm, device: torch.device, purpose: str) -> SavedState:
        """Return all of it, the same on every process, with mean residuals here as well. Collective."""
        self._drop_unsaved()
        if self.unsynced_names:
            # Only those: what has been averaged and is averaged again may change in its last bits, and of
            # parameters whose bucket has not come since a load nothing is in memory.
            specs = [spec for name, spec in self.specs.items() if name in self.unsynced_names]
            if self._partition is not None:
                specs = self._partition.held_parts(specs)
            average_local(self.memory, specs, device, self._inter_node, purpose)
        if self.pending_of != "all":
            self.add_up_pending()
            local = {slot: tensors for slot, tensors in self.pending_state.items() if slot.is_local}
            for slot, tensors in add_up(local, self._inter_node).items():
                means = {name: tensor / self._inter_node.size for name, tensor in tensors.items()}
                self.pending_state[slot] = means
            self.pending_of = "all"
        self.unsynced_names.clear()
        return self._saved(algorithm, self.memory, self.pending_state)

    def save_local(self, algorithm: Algorithm, position: Position, cuts: Cuts) -> SavedState:
        """Return all that this process remembers, and who it is; no message is sent."""
        self._drop_unsaved()
        # The processes of a machine are added up: what all of them have loaded is saved by one.
        is_mine = self._partition is None or self.pending_of == "process" or not position.local_rank
        pending = self.pending_state if is_mine else {}
        saved = self._saved(algorithm, self.memory, pending, of_all=False)
        return saved._replace(position=position, cuts=cuts)

    def common_state(self, algorithm: Algorithm) -> dict[str, Any]:
        """Return the state without what differs between processes, for one that joins; no message is sent."""
        common = {slot: tensors for slot, tensors in self.memory.slots.items() if not slot.is_local}
        return pack(self._saved(algorithm, Memory(self.memory.step, common), {}, of_all=False))

    def _drop_unsaved(self) -> None:
        """Drop what a resumed run won't have: both must continue bit for bit alike."""
        for slot, tensors in self.memory.slots.items():
            if slot.is_local and not slot.is_saved:
                tensors.clear()

    def _saved(
        self, algorithm: Algorithm, memory: Memory, pending: Tensors, *, of_all: bool = True
    ) -> SavedState:
        """Return a memory and what is pending, of this process or of all processes of its machine."""
        if (partition := self._partition) is None:
            slots = tensors_to_save(algorithm, memory, self.specs, pending)
        else:
            held = {part.name: part for part in partition.held_parts(self.specs.values())}
            own, rank = tensors_to_save(algorithm, memory, held, {}), partition.intra_node.rank
            parts = parts_of_all(own, partition.intra_node) if of_all else parts_of(own, rank)
            slots = assemble(own, parts, self.specs, partition.view_of)
            for slot, tensors in pending.items():
                slots.setdefault(slot, {}).update(tensors)
        # The shapes of all parameters, as far as the loaded state or the model has them.
        shapes = {} if self.unchecked is None else dict(self.unchecked.shapes)
        shapes |= {name: spec.shape for name, spec in self.specs.items()}
        return SavedState(repr(algorithm), memory.step, self.nonfinite_steps, shapes, slots)

    # Loading.

    def load(self, loaded: SavedState) -> None:
        """Go on from a checked state; if parameters are not known yet, the first step checks the model."""
        loaded = fitting(loaded, self.specs if self.all_known else None)
        slots = {slot: dict(tensors) for slot, tensors in loaded.slots.items()}
        self.memory = Memory(
            loaded.step, {s: tensors for s, tensors in slots.items() if not s.is_elementwise}
        )
        # Into memory when buckets are opened: its order there, and the device, are not known before.
        self.pending_state = {s: tensors for s, tensors in slots.items() if s.is_elementwise}
        self.pending_of = "all" if loaded.position is None else "process"
        if self._partition is not None:
            self._partition.forget()
        self.may_remember, self.torn = True, ""
        self.nonfinite_steps, self._unseen, self._unseen_nonfinite = loaded.skipped_steps, [], 0
        self.unsynced_names = set() if loaded.position is None else set(loaded.shapes)
        self.loaded_digest = loaded.digest
        self.unchecked = None if self.all_known else loaded

    def check_loaded(self) -> None:
        """Refuse a loaded state, at the first step after it, if it turns out to be of a different model."""
        if self.unchecked is not None:
            check_model(self.unchecked, self.specs, by_position=True)
            self.unchecked = None

    def add_up_pending(self) -> None:
        """Add up what processes of this machine have loaded, each its part. Collective inside, once."""
        if self._partition is not None and self.pending_of == "process":
            self.pending_state = add_up(self.pending_state, self._partition.intra_node)
            self.pending_of = "machine"

    def take_pending(
        self, specs: Iterable[ParameterSpec], labels: Iterable[str], device: torch.device
    ) -> None:
        """Bring what was loaded of parameters into memory, if this process remembers something of them."""
        held = frozenset(labels)
        for slot, tensors in self.pending_state.items():
            for spec in specs:
                if spec.name in tensors:
                    loaded = in_memory_order(slot, tensors.pop(spec.name), spec, device)
                    if self._partition is not None:
                        loaded = loaded[self._partition.held(spec.name)].clone()
                    if spec.name in held:  # else all of it is of other processes of the machine
                        self.memory[slot][spec.name] = loaded
