"""Saved state of a `LocalSGD`: the progress of its averagings, algorithm and outer optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch

from thinwire.checks import whole_number
from thinwire.errors import StateError
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.inner_optimizers import parameters_of
from thinwire.sync.state import DTYPES, FORMAT, check_finite, check_kind, damage_named, digest_of
from thinwire.torch_private import tree_map

KEYS = {"version", "step", "sent_after", "in_flight", "last_average", "sync", "outer"}
OPTIONAL_KEYS = ("warmup", "members", "place")

Tensors: TypeAlias = Mapping[str, torch.Tensor]


class LoadedState(NamedTuple):
    """A state that has been checked, with whole parameters."""

    step: int  # attempted steps
    sent_after: Sequence[int]  # for each fragment, the step after which its change was last sent
    pending: Sequence[tuple[int, Tensors]]  # received, not applied: a fragment's number, mean changes
    last_average: Tensors  # by name
    sync: Mapping[str, Any]  # for the engine to check
    outer: Mapping[str, Any] | None  # for the outer optimizer to check; None if there was none
    warmup: Mapping[str, Any] | None  # for its engine to check; None if it had no separate one, or was over
    digest: int  # processes compare it, to know that they loaded the same state
    members: Mapping[str, Any] | None = None  # from elastic members, to be checked against the model


def packed_state(**parts: Any) -> dict[str, Any]:
    """Return a state made of its parts; without those of `OPTIONAL_KEYS` that are None."""
    optional = {key: part for key in OPTIONAL_KEYS if (part := parts.pop(key, None)) is not None}
    return {"version": FORMAT, "in_flight": (), **parts, **optional}


def checked_state(
    state: Any,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    *,
    place: str | None,
    has_outer: bool,
    has_warmup: bool = False,
) -> LoadedState:
    """Return the state, checked except for the parts that the engine and the outer optimizer check.

    `shapes` has the shapes of each fragment's tensors, by name; `place` is `Replica.place`.
    """
    check_kind(state, KEYS, "LocalSGD.state_dict()")
    with damage_named():
        # 0.2 did not save it. Parts may have the same shapes.
        if (saved := state.get("place", place)) != place:
            raise StateError(
                f"the state is {saved} of the model, but this process holds {place or 'the whole'}; load on "
                "each process the file that it saved"
            )
        loaded = LoadedState(
            step=whole_number("step", state["step"], minimum=0, error=StateError),
            sent_after=list(map(int, state["sent_after"])),
            pending=[(int(number), dict(means)) for number, means in state["in_flight"]],
            last_average=dict(state["last_average"]),
            sync=state["sync"],
            outer=state["outer"],
            warmup=state.get("warmup"),
            digest=digest_of(state),
            members=None if state.get("members") is None else _checked_members(state["members"]),
        )
        # A pending mean belongs to one division of the model, and can't be applied to another.
        num_saved = len(loaded.sent_after)
        if loaded.pending and num_saved != len(shapes):
            raise StateError(
                f"the state was saved during an averaging of one of {num_saved} fragments, but this run has "
                f"{len(shapes)}; pass fragments={num_saved}, or save after average()"
            )
        _check_tensors("last_average", loaded.last_average, dict(chain(*(part.items() for part in shapes))))
        for number, means in loaded.pending:
            _check_tensors(f"in_flight of fragment {number}", means, shapes[number])
    if loaded.outer is not None and not has_outer:
        raise StateError(
            "the state includes an outer optimizer's state; pass the same outer= as when it was saved"
        )
    if loaded.warmup is not None and not has_warmup:
        raise StateError(
            "the state was saved in a warm-up with its own algorithm; pass the same warmup= as when it was "
            "saved"
        )
    return loaded


def _checked_members(members: Mapping[str, Any]) -> dict[str, Any]:
    counts = ("lineage", "commits", "turns")
    return {
        **{key: whole_number(key, members[key], minimum=0, error=StateError) for key in counts},
        "not_averaged": dict(members["not_averaged"]),
        "not_saved": set(members.get("not_saved", ())),  # 0.2 did not save it
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
                f"the state's {name} has dtype {tensor.dtype} and shape {tuple(tensor.shape)}, expected a "
                f"floating dtype and shape {shapes[name]}; load the state of the same model"
            )
    check_finite(key, tensors)  # the first averaging would spread it to every process's model


def load_fragments(loaded: LoadedState, model: AveragedModel) -> None:
    """Load a state into the fragments and the outer optimizer."""
    fragments, outer = model.fragments, model.outer
    if outer is not None and loaded.outer is not None:
        # Only the optimizer knows what its state must contain, and a wrong one would crash the next
        # averaging. So first try a step with zero gradients.
        try:
            _load_outer(model, outer, loaded.outer)
            for fragment in fragments:
                fragment.set_last(loaded.last_average)
                fragment.outer_step([flat.zero_() for flat in fragment.empty()], outer)
        except StateError:
            raise
        except Exception as error:  # optimizers raise all kinds of errors
            raise StateError(
                f"{type(outer).__name__} can't make a step with the outer optimizer's state: {error}; load "
                "an earlier state, or pass the same outer= as when it was saved"
            ) from error
        _load_outer(model, outer, loaded.outer)  # undo the trial step
    # Saved with a different number of fragments: assume that all have waited as long as the longest.
    sent_after = loaded.sent_after
    if len(sent_after) != len(fragments):
        sent_after = [min(sent_after)] * len(fragments)
    for fragment, step in zip(fragments, sent_after, strict=True):
        fragment.set_last(loaded.last_average)
        fragment.sent_after = step
        if loaded.members is not None:  # elastic members save the model as well
            fragment.restore_last()


def _copied(value: Any) -> Any:
    # The optimizer's own tensors will change.
    if isinstance(value, torch.Tensor):
        return value.to("cpu", copy=True)
    # NumPy's numbers, in which schedules compute rates, are none that `weights_only` accepts.
    return value.item() if hasattr(value, "item") else copy.deepcopy(value)


def saved_outer(model: AveragedModel) -> dict[str, Any] | None:
    """Return the outer optimizer's state, as for whole parameters: copies on the CPU. Collective."""
    if (outer := model.outer) is None:
        return None
    state: dict[str, Any] = tree_map(_copied, outer.state_dict())
    for name, parameter, values, key in _tensors(model, outer, state):
        # Tensors of the parameter's shape are sharded as the parameter is; step counts are not.
        if values[key].shape == parameter.shape:
            values[key] = model.replica.whole({name: values[key]})[name]
    return state


def _load_outer(model: AveragedModel, outer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    copied = copy.deepcopy(dict(state))
    for name, parameter, values, key in _tensors(model, outer, copied):
        if values[key].shape == model.replica.shape_of(name, parameter):
            values[key] = model.replica.own({name: values[key]})[name]
    try:
        outer.load_state_dict(copied)
        # Loading accepts another kind's settings, and the first step would fail without its own.
        missing = sorted(outer.defaults.keys() - set.intersection(*map(set, outer.param_groups)))
    except KeyError as error:
        missing = list(error.args)
    except ValueError as error:
        raise StateError(f"the state is from a different outer optimizer: {error}") from error
    if missing:
        raise StateError(
            f"the state is from a different outer optimizer: it has no {', '.join(missing)}, which "
            f"{type(outer).__name__} needs; pass the same outer= as when it was saved"
        )


def _tensors(
    model: AveragedModel, outer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor, dict[str, Any], str]]:
    """Yield each tensor of a state as (parameter's name, tensor, dict that holds it, key)."""
    # An optimizer knows no names: its state numbers the parameters, group by group.
    names = {id(last): tensor.name for tensor, last in model.lasts}
    parameters = parameters_of(outer)
    for number, values in state["state"].items():
        if number >= len(parameters):
            continue  # from a different optimizer; loading it will raise
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                yield names[id(parameters[number])], parameters[number], values, key
