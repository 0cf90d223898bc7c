"""AlgorithmState: an algorithm's state between steps, and how it is rolled back, saved and loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch

from thinwire.algorithms import Algorithm, Memory, Slot
from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import Transport, gather_values
from thinwire.comm.collectives import in_messages
from thinwire.plan import SHARD_MARK, ParameterSpec
from thinwire.sync.partition import IntraNodePartition
from thinwire.sync.state import (
    Cuts,
    Position,
    SavedState,
    StatePart,
    Tensors,
    in_memory_order,
    names_in,
    pack,
    tensors_to_save,
)

# Bytes averaged in one message, unless a single tensor is larger.
MEAN_BYTES = 64 << 20


@dataclass
class PendingTensors:
    """Loaded elementwise tensors, each kept until its bucket is opened: only then is its layout known.

    A state of all processes applies to each as it is. States that processes saved for themselves are summed
    over a machine's processes (`add_up_pending`), and averaged over all (`AlgorithmState.save`).
    """

    tensors: Tensors = field(default_factory=dict)  # in the parameter's shape
    owner: Literal["all", "machine", "process"] = "all"


class AlgorithmState:
    """Memory, loaded tensors that wait for their bucket, and counts of steps."""

    def __init__(
        self, specs: Iterable[ParameterSpec], inter_node: Transport, partition: IntraNodePartition | None
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}  # all known parameters, in model order
        self.memory, self.pending = Memory(), PendingTensors()
        self.unsynced_names: set[str] = set()  # parameters whose local slots have changed since averaged
        self.nonfinite_steps = 0  # as far as the host knows
        # The other ones, counted on the device: to read it, the host must wait.
        self.unseen_nonfinite_steps = torch.tensor(0, device="cpu")
        self.may_remember = False  # whether any process of this machine may have something in memory
        self.torn = ""  # the step that has written memory, but whose means did not arrive
        self.loaded_digest: int | None = None  # the last loaded state's, which processes compare
        self.inter_node, self.partition = inter_node, partition

    # Steps.

    @property
    def steps(self) -> int:
        """Steps so far, including those that were not finite."""
        return self.memory.step + self.nonfinite_steps

    def has(self, slots: Iterable[Slot]) -> bool:
        """Return whether memory has, or will have when buckets are opened, tensors of these slots."""
        return any(self.memory[slot] or self.pending.tensors.get(slot) for slot in slots)

    def remembered(self) -> Callable[[], None]:
        """Copy all that steps change; return a function that restores it, as if later steps never ran."""
        memory = self.memory.copied({label for tensors in self.memory.slots.values() for label in tensors})
        pending = {
            slot: {label: tensor.clone() for label, tensor in tensors.items()}
            for slot, tensors in self.pending.tensors.items()
        }
        others = PendingTensors(pending, self.pending.owner), set(self.unsynced_names)
        counts = self.nonfinite_steps, self.unseen_nonfinite_steps
        held_ranges = {} if self.partition is None else dict(self.partition.held_ranges)

        def go_back() -> None:
            self.memory.restore(memory)
            self.pending, self.unsynced_names = others
            self.nonfinite_steps, self.unseen_nonfinite_steps = counts
            if self.partition is not None:
                self.partition.held_ranges = held_ranges

        return go_back

    def forget_routes(self, names: Set[str], labels: Collection[str]) -> None:
        """Drop the tensors of all routes of some parameters, other than those with these labels."""
        for slot, tensors in self.memory.slots.items():
            # Keep elementwise tensors: they belong to a parameter, and any algorithm can send a residual.
            if not slot.is_elementwise:
                for label in tensors.keys() - labels:
                    if names >= names_in(label):
                        del tensors[label]

    # The residual.

    def take_error(self, name: str) -> torch.Tensor | None:
        """Remove and return a parameter's residual, flat and unscaled; None if there is none.

        If processes of a machine share it, this process's elements are multiplied by their number, and the
        others are zeros, so that the mean over the machine is the residual.
        """
        self.unsynced_names.add(name)
        # Other local memory belongs to this residual, and would be wrong with a different one.
        for slot in self.memory.slots:
            if slot.is_local and slot != ERROR:
                self.memory[slot].pop(name, None)
        error = self.memory[ERROR].pop(name, None)
        if error is None or self.partition is None:
            return error
        whole = error.new_zeros(self.specs[name].numel)
        whole[self.partition.held(name)] = error * self.partition.intra_node.size
        return whole

    def put_error(self, name: str, error: torch.Tensor) -> None:
        """Set a parameter's residual to the result of `take_error`, or a part of it."""
        self.unsynced_names.add(name)
        self.may_remember = True
        if self.partition is not None:
            error = error[self.partition.held(name)] / self.partition.intra_node.size
        self.memory[ERROR][name] = error

    def regroup(self, error_scale: float) -> None:
        """Adapt to a group with other members: multiply residuals by `error_scale`."""
        for slot, tensors in self.memory.slots.items():
            if slot.is_local and slot.is_elementwise:
                for tensor in tensors.values():
                    tensor.mul_(error_scale)
        # Perhaps only some members have loaded a state or averaged their residuals. Both facts must be the
        # same on all members, so reset them.
        self.loaded_digest, self.unsynced_names = None, set(self.specs)

    def error_norm(self) -> float:
        """Return the norm of this process's residual. Cost: a norm, and a host synchronisation."""
        errors = [error.double().norm() for error in self.memory[ERROR].values()]
        return float(torch.stack(errors).norm()) if errors else 0.0

    def memory_bytes(self) -> int:
        """Return the bytes of the algorithm's state on this process."""
        slots = self.memory.slots.values()
        return sum(tensor.nbytes for tensors in slots for tensor in tensors.values())

    def residual_bytes(self) -> int:
        """Return the bytes that `save` averages exactly: those of tensors that differ between processes."""
        slots = [
            slot for slot in self.memory.slots if slot.is_local and slot.is_elementwise and slot.is_saved
        ]
        return sum(tensor.nbytes for slot in slots for tensor in self.memory[slot].values())

    # Saving.

    def save(self, algorithm: Algorithm, device: torch.device, purpose: str) -> SavedState:
        """Return the state, the same on every process; residuals in memory become means too. Collective."""
        self._drop_unsaved()
        if self.unsynced_names:  # on all processes, or none: they have compared this
            # Only these: averaging again could change the last bits, and memory holds nothing yet for
            # parameters whose bucket was not opened since a load.
            specs = [spec for name, spec in self.specs.items() if name in self.unsynced_names]
            if self.partition is not None:
                specs = self.partition.held_parts(specs)
            average_local(self.memory, specs, device, self.inter_node, purpose)
        if self.pending.owner != "all":
            self.add_up_pending()
            local = {slot: tensors for slot, tensors in self.pending.tensors.items() if slot.is_local}
            means = {
                slot: {name: tensor / self.inter_node.size for name, tensor in tensors.items()}
                for slot, tensors in add_up(local, self.inter_node).items()
            }
            self.pending = PendingTensors(self.pending.tensors | means)
        self.unsynced_names.clear()
        return self._saved(algorithm, self.memory, self.pending.tensors)

    def save_local(self, algorithm: Algorithm, position: Position, cuts: Cuts) -> SavedState:
        """Return this process's state and its position, without communication."""
        self._drop_unsaved()
        # States of a machine's processes are summed later: only one saves what all of them have loaded.
        is_saved_here = self.partition is None or self.pending.owner == "process" or not position.local_rank
        pending = self.pending.tensors if is_saved_here else {}
        saved = self._saved(algorithm, self.memory, pending, of_all=False)
        return saved._replace(position=position, cuts=cuts)

    def common_state(self, algorithm: Algorithm) -> dict[str, Any]:
        """Return the part of the state that all processes share, for a new member; without communication."""
        common = {slot: tensors for slot, tensors in self.memory.slots.items() if not slot.is_local}
        return pack(self._saved(algorithm, Memory(self.memory.step, common), {}, of_all=False))

    def _drop_unsaved(self) -> None:
        """Drop what a resumed run won't have: both runs must be equal bit for bit."""
        for slot, tensors in self.memory.slots.items():
            if slot.is_local and not slot.is_saved:
                tensors.clear()

    def _saved(
        self, algorithm: Algorithm, memory: Memory, pending: Tensors, *, of_all: bool = True
    ) -> SavedState:
        """Return memory and pending tensors, of this process or of all processes of its machine."""
        if (partition := self.partition) is None:
            slots = tensors_to_save(algorithm, memory, self.specs)
        else:
            held = {part.name: part for part in partition.held_parts(self.specs.values())}
            own, inside = tensors_to_save(algorithm, memory, held), partition.intra_node
            parts = parts_of_all(own, inside) if of_all else parts_of(own, inside.rank)

            def held_by(part: StatePart, whole: torch.Tensor) -> torch.Tensor:
                return whole.as_strided((whole.numel(),), (1,))[partition.held_ranges[part.label][part.rank]]

            slots = assemble(own, parts, self.specs, held_by)
        # A bucket that was not opened yet still has its loaded tensors.
        for slot, tensors in pending.items():
            for name, tensor in tensors.items():
                slots.setdefault(slot, {})[name] = tensor.clone()
        shapes = {name: spec.shape for name, spec in self.specs.items()}
        return SavedState(repr(algorithm), memory.step, self.nonfinite_steps, shapes, slots)

    # Loading.

    def load(self, loaded: SavedState) -> None:
        """Load a checked state."""
        is_of_all = loaded.position is None
        self.memory, self.pending = Memory(loaded.step), PendingTensors({}, "all" if is_of_all else "process")
        for slot, tensors in loaded.slots.items():
            taken = (self.pending.tensors if slot.is_elementwise else self.memory.slots)[slot] = {}
            for label, tensor in tensors.items():
                # Only if it belongs to these parameters, and not to a single shard.
                if self.specs.keys() >= names_in(label) and SHARD_MARK not in label:
                    taken[label] = tensor
        if self.partition is not None:
            self.partition.forget()
        self.may_remember, self.torn = True, ""
        self.nonfinite_steps = loaded.skipped_steps
        self.unseen_nonfinite_steps = torch.tensor(0, device="cpu")
        self.unsynced_names = set() if is_of_all else set(loaded.shapes)
        self.loaded_digest = loaded.digest

    def add_up_pending(self) -> None:
        """Sum the parts that this machine's processes have loaded. Collective inside, once."""
        if self.partition is not None and self.pending.owner == "process":
            self.pending = PendingTensors(add_up(self.pending.tensors, self.partition.intra_node), "machine")

    def take_pending(
        self, specs: Iterable[ParameterSpec], labels: Iterable[str], device: torch.device
    ) -> None:
        """Move loaded tensors of a bucket into memory, if this process holds a part of them."""
        held = frozenset(labels)
        for slot, tensors in self.memory.slots.items():
            if not slot.is_elementwise:
                for label in tensors.keys() & held:
                    tensors[label] = tensors[label].to(device)
        for slot, tensors in self.pending.tensors.items():
            for spec in specs:
                if spec.name in tensors:
                    loaded = in_memory_order(slot, tensors.pop(spec.name), spec, device)
                    if self.partition is not None:
                        loaded = loaded[self.partition.held(spec.name)].clone()
                    if spec.name in held:  # otherwise other processes of the machine hold all of it
                        self.memory[slot][spec.name] = loaded


# Combining the states of processes. All of this is collective.


def average_local(
    memory: Memory, specs: Iterable[ParameterSpec], device: torch.device, transport: Transport, purpose: str
) -> None:
    """Replace tensors that differ between processes by their means; a process may lack some.

    Cost: for each slot a message of one byte per parameter, and the slot's bytes in messages of 64 MiB; a
    host synchronisation for each of them; a copy of the slot on the CPU until all have arrived.
    """
    # In the same order on all processes, independent of when parameters and slots became known.
    ordered = sorted(specs)
    means: list[tuple[Slot, ParameterSpec, torch.Tensor]] = []
    for slot in sorted(memory.slots, key=lambda slot: slot.name):
        if not (slot.is_local and slot.is_elementwise) or not ordered:
            continue
        tensors = memory[slot]
        # Ask first: if any member has a tensor, those without it must send zeros, or it would wait forever.
        has = torch.tensor([spec.name in tensors for spec in ordered], dtype=torch.uint8, device="cpu")
        has = has.to(transport.control_device)
        transport.all_reduce(has, f"{purpose}, who has {slot.name}", operation="max").wait()
        held = [spec for spec, is_held in zip(ordered, has.tolist(), strict=True) if is_held]
        for dtype, of_one_type in groupby(held, lambda spec: spec.memory_dtype):
            for sent in in_messages(of_one_type, MEAN_BYTES // dtype.itemsize, lambda spec: spec.numel):
                zero = torch.zeros((), dtype=dtype, device=device)
                flat = torch.cat([tensors.get(spec.name, zero.expand(spec.numel)) for spec in sent])
                transport.mean(flat, f"{purpose}, {slot.name} from {sent[0].name} to {sent[-1].name}").wait()
                # Move it to the CPU: the device may have no room for a second residual of the whole model.
                parts = flat.to("cpu").split_with_sizes([spec.numel for spec in sent])
                means += ((slot, spec, mean) for spec, mean in zip(sent, parts, strict=True))
    # Only after all slots have arrived: if a message fails, memory is as it was.
    for slot, spec, mean in means:
        if spec.name in memory[slot]:
            memory[slot][spec.name].copy_(mean)
        else:
            memory[slot][spec.name] = mean.to(device, copy=True)


def add_up(loaded: Tensors, transport: Transport) -> Tensors:
    """Return the sum of the tensors that processes have loaded; a process may lack some."""
    total: Tensors = {slot: {} for slot in loaded}
    for _, slot, label, tensor in parts_of_all(loaded, transport):
        tensors = total.setdefault(slot, {})
        tensors[label] = tensor if label not in tensors else tensors[label] + tensor
    return total


def parts_of(own: Tensors, rank: int) -> Iterable[StatePart]:
    """Return a process's tensors as parts of a state."""
    return [StatePart(rank, slot, label, own[slot][label]) for slot in own for label in own[slot]]


def parts_of_all(own: Tensors, transport: Transport) -> Iterator[StatePart]:
    """Yield the tensors of each process in turn, on the CPU; one message per process."""
    mine = list(parts_of(own, transport.rank))
    described = [
        (slot.name, slot.is_local, slot.is_elementwise, label, str(tensor.dtype)[6:], *tensor.shape)
        for _, slot, label, tensor in mine
    ]
    for rank, listed in enumerate(gather_values(described, transport, "state_dict(), who has what")):
        theirs = list[tuple[Slot, str, torch.dtype, list[int]]]()
        for name, is_local, is_elementwise, label, dtype, *shape in listed:
            slot = Slot(name, is_local=is_local, is_elementwise=is_elementwise)
            theirs.append((slot, label, getattr(torch, dtype), shape))
        lengths = [math.prod(shape) * dtype.itemsize for *_, dtype, shape in theirs]
        packed = torch.empty(sum(lengths), dtype=torch.uint8, device=transport.control_device)
        if rank == transport.rank:
            for part, piece in zip(mine, packed.split_with_sizes(lengths), strict=True):
                piece.copy_(part.tensor.contiguous().view(-1).view(torch.uint8))
        # The last shards of a parameter may be empty.
        if len(packed):
            transport.broadcast(packed, rank, f"state_dict(), what process {rank} remembers").wait()
        pieces = packed.cpu().split_with_sizes(lengths)
        for (slot, label, dtype, shape), piece in zip(theirs, pieces, strict=True):
            # A copy, which is aligned for its dtype and does not keep the others alive.
            yield StatePart(rank, slot, label, piece.clone().view(dtype).view(shape))


def assemble(
    slots: Iterable[Slot],
    parts: Iterable[StatePart],
    specs: Mapping[str, ParameterSpec],
    view_of: Callable[[StatePart, torch.Tensor], torch.Tensor],
    label_of: Callable[[StatePart], str] = lambda part: part.label,
) -> Tensors:
    """Return whole tensors made of several processes' parts; zeros where no process has a part.

    `view_of` returns a part's view of the whole tensor, `label_of` a part's label if it is not elementwise.
    """
    whole: Tensors = {slot: {} for slot in slots}
    for part in parts:
        # Not in `slots` if this process has no tensor of it, as of an algorithm that was just taken up.
        tensors, spec = whole.setdefault(part.slot, {}), specs.get(part.label)
        if not part.slot.is_elementwise:
            tensors.setdefault(label_of(part), part.tensor)
        elif spec is None or part.tensor.shape == spec.shape:
            # Several processes may have the whole tensor; take the first one.
            tensors.setdefault(part.label, part.tensor)
        else:
            if part.label not in tensors:
                zeros = torch.empty_strided(
                    spec.shape, spec.stride, dtype=part.tensor.dtype, device="cpu"
                ).zero_()
                tensors[part.label] = zeros
            view_of(part, tensors[part.label]).copy_(part.tensor)
    return whole
