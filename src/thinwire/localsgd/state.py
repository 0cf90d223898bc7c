"""Saved state of a `LocalSGD`: how far its averagings are, and what algorithm and outer optimizer keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch

from thinwire.checks import whole_number
from thinwire.errors import StateError
from thinwire.localsgd.flight import Flight
from thinwire.localsgd.fragment import Fragment, Fragments
from thinwire.localsgd.members.fixed import Fixed
from thinwire.localsgd.outer import load_outer, saved_outer
from thinwire.localsgd.replica import Replica
from thinwire.sync import Engine, GradientSync
from thinwire.sync.checksum import check_kind, check_undamaged, shown_kind, with_checksum
from thinwire.sync.state import DTYPES

STATE_VERSION = 4
KEYS = {"version", "step", "sent_after", "in_flight", "last_average", "sync", "outer", "checksum"}
WARMUP_KEY = "warmup"  # where an algorithm of the warm-up still remembers something
MEMBERS_KEY = "members"  # of those that come and go
COUNTS = ("lineage", "commits", "turns")
MEMBERS_KEYS = {*COUNTS, "not_averaged", "residual_of", "optimizers"}

Tensors: TypeAlias = Mapping[str, torch.Tensor]


class LoadedState(NamedTuple):
    """A state that has been checked, of whole parameters."""

    step: int  # attempted
    sent_after: Sequence[int]  # of each fragment, the step after which its change was last sent
    in_flight: Sequence[tuple[int, Tensors]]  # landed, not applied: a fragment's place, mean changes by name
    last_average: Tensors  # by name
    sync: Mapping[str, Any]  # for the engine to check
    outer: Mapping[str, Any] | None  # for the outer optimizer to check; None if there was none
    warmup: Mapping[str, Any] | None  # for its engine to check; None if it had none of its own, or was over
    checksum: str  # of all of it, for processes to compare what they loaded
    members: Mapping[str, Any] | None = None  # of elastic members, to be checked against the model


def packed_state(
    averagings: Fixed, sync: GradientSync, warmup: Engine | None, replica: Replica
) -> dict[str, Any]:
    """Return the state, as copies on the CPU. Collective."""
    fragments, outer = averagings.fragments, averagings.outer
    lasts = dict(chain.from_iterable(each.named(each.last).items() for each in fragments))
    in_flight = [item for flight in averagings.flights for item in flight.changes.items()]
    # Several of these values are collective: in one order on all processes, of the shards of a replica too.
    state = {
        "version": STATE_VERSION,
        "step": averagings.step,
        "sent_after": tuple(fragment.sent_after for fragment in fragments),
        "in_flight": tuple(
            (fragments.index(each), replica.whole(each.named(means))) for each, means in in_flight
        ),
        "last_average": replica.whole(lasts),
        "sync": sync.state_dict(),
        "outer": None if outer is None else saved_outer(outer, fragments.lasts, replica),
    }
    if warmup is not None:
        state[WARMUP_KEY] = warmup.state_dict()
    return with_checksum(state)


def members_of(loaded: LoadedState) -> Mapping[str, Any]:
    """Return what members that come and go resume from; of a fixed group's state, as if it were theirs."""
    if loaded.members is not None:
        return loaded.members
    # Members that load the same state are of one lineage.
    lineage = int(loaded.checksum.rpartition(":")[2], 16) | 1
    return {"lineage": lineage, "commits": 1, "turns": 0, "residual_of": (), "not_averaged": {}}


def go_on_from(
    loaded: LoadedState, fragments: Fragments, outer: torch.optim.Optimizer | None, replica: Replica
) -> list[Flight[Fragment]]:
    """Let fragments go on from a state; return what had landed and is still to be applied."""
    if outer is not None and loaded.outer is not None:
        _load_outer(outer, fragments, replica, loaded)
    sent_after = loaded.sent_after
    # Saved with another number of them: as if all had waited as long as the one that has waited longest.
    if len(sent_after) != len(fragments):
        sent_after = [min(sent_after)] * len(fragments)
    for fragment, step in zip(fragments, sent_after, strict=True):
        fragment.take(loaded.last_average)
        fragment.sent_after = step
        if loaded.members is not None:  # which save the model as well
            fragment.show()
    # They have landed; each is applied at the step at which it would have been.
    return [
        Flight({fragments[place]: fragments[place].flat(means)}, None) for place, means in loaded.in_flight
    ]


def _load_outer(
    outer: torch.optim.Optimizer, fragments: Fragments, replica: Replica, loaded: LoadedState
) -> None:
    """Let an outer optimizer go on from a state, with which it has made a step of nothing first."""
    assert loaded.outer is not None
    # What its state must hold only the optimizer knows: of another kind, it would end the next averaging.
    try:
        load_outer(outer, fragments.lasts, replica, loaded.outer)
        for fragment in fragments:
            fragment.take(loaded.last_average)
            fragment.step([flat.zero_() for flat in fragment.empty()], outer)
    except StateError:
        raise
    except Exception as error:  # optimizers raise what they like
        raise StateError(
            f"{type(outer).__name__} can't make a step with the outer optimizer's state: {error}; load an "
            "earlier one, or pass outer= as when it was saved"
        ) from error
    load_outer(outer, fragments.lasts, replica, loaded.outer)  # again: that step is in no average


def checked_state(
    state: object,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    *,
    has_outer: bool,
    has_warmup: bool = False,
) -> LoadedState:
    """Return a state that has been checked, but for what the engine and the outer optimizer check."""
    check_kind(state, STATE_VERSION, KEYS, "LocalSGD.state_dict()")
    assert isinstance(state, Mapping)
    is_like = state.keys() - {WARMUP_KEY, MEMBERS_KEY} == KEYS
    _expect(is_like, f"expected a state made by LocalSGD.state_dict(), got {shown_kind(state)}")
    # Before anything is believed of it.
    checksum = check_undamaged(state)
    step = whole_number("step", state["step"], minimum=0, error=StateError)
    state = {WARMUP_KEY: None, MEMBERS_KEY: None, **state, "step": step, "checksum": checksum}
    _expect(
        state["outer"] is None or has_outer,
        "the state has an outer optimizer's state; pass outer= as when it was saved",
    )
    _expect(
        state[WARMUP_KEY] is None or has_warmup,
        "the state was saved in a warm-up with an algorithm of its own; pass warmup= as when it was saved",
    )
    everywhere = {name: shape for of_one in shapes for name, shape in of_one.items()}
    _check_tensors("last_average", state["last_average"], everywhere)
    _check_flights(state, shapes)
    if state[MEMBERS_KEY] is not None:
        _check_members(state[MEMBERS_KEY])
    return LoadedState(**{key: state[key] for key in LoadedState._fields})


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StateError(otherwise)


def _check_members(members: Any) -> None:
    is_like = isinstance(members, Mapping) and members.keys() == MEMBERS_KEYS
    _expect(is_like, f"members must be a mapping as elastic members have it, got {shown_kind(members)}")
    for key in COUNTS:
        whole_number(key, members[key], minimum=0, error=StateError)
    for key, kind in ("residual_of", str), ("optimizers", Mapping):
        listed = members[key]
        is_list = isinstance(listed, list | tuple) and all(isinstance(each, kind) for each in listed)
        _expect(is_list, f"{key} must be a list of {kind.__name__}, got a {type(listed).__name__}")


def _check_flights(state: Mapping[str, Any], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    """Refuse what does not say, of each fragment, when it was sent, and of some, what came back."""
    for key in ("sent_after", "in_flight"):
        is_list = isinstance(state[key], list | tuple)
        _expect(is_list, f"{key} must be a tuple, got {type(state[key]).__name__}")
    for sent_after in state["sent_after"]:
        whole_number("sent_after", sent_after, minimum=-1, error=StateError)
    num_saved = len(state["sent_after"])
    _expect(num_saved > 0, "sent_after must hold a number for each fragment, got none")
    # What has landed is of one division of the model, and can't be applied to another's parts.
    _expect(
        not state["in_flight"] or num_saved == len(shapes),
        f"the state was saved while one of {num_saved} fragments was in flight, and here are {len(shapes)}; "
        f"pass fragments={num_saved}, or save after average()",
    )
    for item in state["in_flight"]:
        is_pair = isinstance(item, list | tuple) and len(item) == 2 and type(item[0]) is int
        is_pair = is_pair and item[0] in range(num_saved)
        _expect(is_pair, "in_flight must hold pairs of a fragment's number and its mean changes")
        _check_tensors(f"in_flight of fragment {item[0]}", item[1], shapes[item[0]])


def _check_tensors(key: str, tensors: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    is_mapping = isinstance(tensors, Mapping)
    _expect(is_mapping, f"{key} must map names to tensors, got {type(tensors).__name__}")
    load, differing = "load the state of the same model", sorted(map(str, shapes.keys() ^ tensors.keys()))
    _expect(not differing, f"the state and the model differ in {differing[:4]}; {load}, and average_buffers=")
    for name, tensor in tensors.items():
        is_like = isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == shapes[name]
        what = f"the state's {name} is"
        _expect(is_like, f"{what} not a tensor of shape {shapes[name]}, as the model's is; {load}")
        _expect(tensor.dtype in DTYPES, f"{what} of {tensor.dtype}; load a state as state_dict() made it")
        # It would be in every process's model with the first averaging.
        is_finite = bool(tensor.isfinite().all())
        _expect(is_finite, f"{what} not finite: it is damaged; load an earlier one")
