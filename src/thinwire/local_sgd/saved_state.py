"""Saved state of a `LocalSGD`: how far its averagings are, and what algorithm and outer optimizer keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from thinwire.checks import whole_number
from thinwire.errors import StateError
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.fragment import Fragments
from thinwire.local_sgd.outer import load_outer
from thinwire.local_sgd.replica import Replica
from thinwire.sync.state import DTYPES, FORMAT, check_finite, check_kind, digest_of, shown_kind

KEYS = {"version", "step", "sent_after", "in_flight", "last_average", "sync", "outer"}
WARMUP_KEY = "warmup"  # there if an algorithm of the warm-up still remembers something
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
    warmup: Mapping[str, Any] | None  # for its engine to check; None if it had no separate one, or was over
    digest: int  # of all of it, for processes to compare what they loaded
    members: Mapping[str, Any] | None = None  # of elastic members, to be checked against the model


def packed_state(
    *,
    step: int,
    sent_after: Sequence[int],
    last_average: Tensors,
    sync: Mapping[str, Any],
    outer: Mapping[str, Any] | None,
    in_flight: Sequence[tuple[int, Tensors]] = (),
    **parts: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return a state; of its `parts`, those of the warm-up and of members that there are."""
    state = {
        "version": FORMAT,
        "step": step,
        "sent_after": tuple(sent_after),
        "in_flight": tuple(in_flight),
        "last_average": last_average,
        "sync": sync,
        "outer": outer,
    }
    return state | {key: part for key, part in parts.items() if part is not None}


def members_of(loaded: LoadedState) -> Mapping[str, Any]:
    """Return the part of a state that elastic members use; of a fixed group's state, as if it were theirs."""
    if loaded.members is not None:
        return loaded.members
    # Members that load the same state are of one lineage.
    lineage = loaded.digest | 1
    return {"lineage": lineage, "commits": 1, "turns": 0, "residual_of": (), "not_averaged": {}}


def load_fragments(loaded: LoadedState, model: AveragedModel) -> None:
    """Let fragments and outer optimizer go on from a state."""
    fragments, sent_after = model.fragments, loaded.sent_after
    if model.outer is not None and loaded.outer is not None:
        _load_outer(model.outer, fragments, model.replica, loaded)
    # Saved with a different number of fragments: as if all had waited as long as the longest.
    if len(sent_after) != len(fragments):
        sent_after = [min(sent_after)] * len(fragments)
    for fragment, step in zip(fragments, sent_after, strict=True):
        fragment.take(loaded.last_average)
        fragment.sent_after = step
        if loaded.members is not None:  # which save the model as well
            fragment.show()


def _load_outer(
    outer: torch.optim.Optimizer, fragments: Fragments, replica: Replica, loaded: LoadedState
) -> None:
    """Let an outer optimizer go on from a state, with which it has made a step of nothing first."""
    assert loaded.outer is not None
    # Only the optimizer knows what its state must hold: a wrong one would end the next averaging.
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
    check_kind(state, KEYS, "LocalSGD.state_dict()")
    assert isinstance(state, Mapping)
    step = whole_number("step", state["step"], minimum=0, error=StateError)
    state = {WARMUP_KEY: None, MEMBERS_KEY: None, **state, "step": step, "digest": digest_of(state)}
    if state["outer"] is not None and not has_outer:
        raise StateError("the state has an outer optimizer's state; pass outer= as when it was saved")
    if state[WARMUP_KEY] is not None and not has_warmup:
        raise StateError(
            "the state was saved in a warm-up with its own algorithm; pass warmup= as when it was saved"
        )
    everywhere = {name: shape for of_one in shapes for name, shape in of_one.items()}
    _check_tensors("last_average", state["last_average"], everywhere)
    _check_pending_averages(state, shapes)
    if state[MEMBERS_KEY] is not None:
        _check_members(state[MEMBERS_KEY])
    return LoadedState(**{key: state[key] for key in LoadedState._fields})


def _check_members(members: object) -> None:
    if not isinstance(members, Mapping) or members.keys() != MEMBERS_KEYS:
        raise StateError(f"members must be a mapping as elastic members have it, got {shown_kind(members)}")
    for key in COUNTS:
        whole_number(key, members[key], minimum=0, error=StateError)
    for key, kind in ("residual_of", str), ("optimizers", Mapping):
        listed = members[key]
        if not isinstance(listed, list | tuple) or not all(isinstance(item, kind) for item in listed):
            raise StateError(f"{key} must be a list of {kind.__name__}, got a {type(listed).__name__}")


def _check_pending_averages(
    state: Mapping[str, Any], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> None:
    """Refuse what does not say, of each fragment, when it was sent, and of some, what came back."""
    for key in ("sent_after", "in_flight"):
        if not isinstance(state[key], list | tuple):
            raise StateError(f"{key} must be a tuple, got {type(state[key]).__name__}")
    for sent_after in state["sent_after"]:
        whole_number("sent_after", sent_after, minimum=-1, error=StateError)
    num_saved = len(state["sent_after"])
    if not num_saved:
        raise StateError("sent_after must hold a number for each fragment, got none")
    # A landed mean is of one division of the model, and can't be applied to the parts of a different one.
    if state["in_flight"] and num_saved != len(shapes):
        raise StateError(
            f"the state was saved while one of {num_saved} fragments was in flight, and here are "
            f"{len(shapes)}; pass fragments={num_saved}, or save after average()"
        )
    for item in state["in_flight"]:
        is_pair = isinstance(item, list | tuple) and len(item) == 2 and type(item[0]) is int
        if not is_pair or item[0] not in range(num_saved):
            raise StateError("in_flight must hold pairs of a fragment's number and its mean changes")
        _check_tensors(f"in_flight of fragment {item[0]}", item[1], shapes[item[0]])


def _check_tensors(key: str, tensors: object, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if not isinstance(tensors, Mapping):
        raise StateError(f"{key} must map names to tensors, got {type(tensors).__name__}")
    differing = sorted(map(str, shapes.keys() ^ tensors.keys()))
    if differing:
        raise StateError(
            f"the state and the model differ in {differing[:4]}; load the state of the same model, with the "
            "same average_buffers="
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shapes[name]:
            raise StateError(
                f"the state's {name} is not a tensor of shape {shapes[name]}, as the model's is; "
                "load the state of the same model"
            )
        if tensor.dtype not in DTYPES:
            raise StateError(f"the state's {name} is of {tensor.dtype}; load a state as state_dict() made it")
    check_finite(key, tensors)  # it would be in every process's model with the first averaging
