"""Reads the states of Thinwire 0.2; goes with the version after this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSION = 4  # of 0.2's states; they have a checksum besides, which is ignored
NAMES = {"rank": "member", "world_size": "members", "local_rank": "place", "local_size": "places"}


def updated(state: Any) -> Any:
    """Return a state of 0.2's `local_state_dict`, which is two mappings, as this version has it."""
    if not isinstance(state, Mapping) or "own" not in state:
        return state
    layout = {name: state[before] for name, before in NAMES.items()}
    layout |= {"machines": state.get("machines"), "cuts": state.get("cuts", ())}
    return {**state["own"], "layout": layout}
