"""Saved state of a `LocalSGD`: how far its averagings are, and what algorithm and outer optimizer keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch

from thinwire.checks import whole_number
from thinwire.errors import StateError
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.fragment import Fragments
from thinwire.local_sgd.outer import load_outer
from thinwire.local_sgd.replica import Replica
from thinwire.sync.state import DTYPES, FORMAT, check_finite, check_kind, damage_named, digest_of

KEYS = {"version", "step", "sent_after", "in_flight", "last_average", "sync", "outer"}
COUNTS = ("lineage", "commits", "turns")

Tensors: TypeAlias = Mapping[str, torch.Tensor]


class LoadedState(NamedTuple):
    """A state that has been checked, of whole parameters."""

    step: int  # attempted
    sent_after: Sequence[int]  # of each fragment, the step after which its change was last sent
    in_flight: Sequence[tuple[int, Tensors]]  # come, not applied: a fragment's number, mean changes
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
        fragment.set_last(loaded.last_average)
        fragment.sent_after = step
        if loaded.members is not None:  # which save the model as well
            fragment.restore_last()


def _load_outer(
    outer: torch.optim.Optimizer, fragments: Fragments, replica: Replica, loaded: LoadedState
) -> None:
    """Let an outer optimizer go on from a state, with which it has made a step of nothing first."""
    assert loaded.outer is not None
    # Only the optimizer knows what its state must hold: a wrong one would end the next averaging.
    try:
        load_outer(outer, fragments.lasts, replica, loaded.outer)
        for fragment in fragments:
            fragment.set_last(loaded.last_average)
            fragment.outer_step([flat.zero_() for flat in fragment.empty()], outer)
    except StateError:
        raise
    except Exception as error:  # optimizers raise what they like
        raise StateError(
            f"{type(outer).__name__} can't make a step with the outer optimizer's state: {error}; load an "
            "earlier one, or pass outer= as when it was saved"
        ) from error
    load_outer(outer, fragments.lasts, replica, loaded.outer)  # again: that step is in no average


def checked_state(
    state: Any, shapes: Sequence[Mapping[str, tuple[int, ...]]], *, has_outer: bool, has_warmup: bool = False
) -> LoadedState:
    """Return a state that has been checked, but for what the engine and the outer optimizer check.

    `shapes` are those of each fragment's tensors, by name.
    """
    check_kind(state, KEYS, "LocalSGD.state_dict()")
    with damage_named():
        loaded = LoadedState(
            step=whole_number("step", state["step"], minimum=0, error=StateError),
            sent_after=list(map(int, state["sent_after"])),
            in_flight=[(int(number), dict(means)) for number, means in state["in_flight"]],
            last_average=dict(state["last_average"]),
            sync=state["sync"],
            outer=state["outer"],
            warmup=state.get("warmup"),
            digest=digest_of(state),
            members=None if state.get("members") is None else _checked_members(state["members"]),
        )
        # A mean that has come is of one division of the model, and can't be applied to the parts of another.
        num_saved = len(loaded.sent_after)
        if loaded.in_flight and num_saved != len(shapes):
            raise StateError(
                f"the state was saved while one of {num_saved} fragments was under way, and here are "
                f"{len(shapes)}; pass fragments={num_saved}, or save after average()"
            )
        _check_tensors("last_average", loaded.last_average, dict(chain(*(part.items() for part in shapes))))
        for number, means in loaded.in_flight:
            _check_tensors(f"in_flight of fragment {number}", means, shapes[number])
    if loaded.outer is not None and not has_outer:
        raise StateError("the state has an outer optimizer's state; pass outer= as when it was saved")
    if loaded.warmup is not None and not has_warmup:
        raise StateError(
            "the state was saved in a warm-up with its own algorithm; pass warmup= as when it was saved"
        )
    return loaded


def _checked_members(members: Mapping[str, Any]) -> dict[str, Any]:
    counts = {key: whole_number(key, members[key], minimum=0, error=StateError) for key in COUNTS}
    return {
        **counts,
        "not_averaged": dict(members["not_averaged"]),
        "residual_of": set(members["residual_of"]),
        "optimizers": [dict(state) for state in members["optimizers"]],
    }


def _check_tensors(key: str, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    differing = sorted(shapes.keys() ^ tensors.keys())
    if differing:
        raise StateError(
            f"the state and the model differ in {differing[:4]}; load the state of the same model, with the "
            "same average_buffers="
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name] or tensor.dtype not in DTYPES:
            raise StateError(
                f"the state's {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected floating "
                f"numbers of shape {shapes[name]}; load the state of the same model"
            )
    check_finite(key, tensors)  # it would be in every process's model with the first averaging
