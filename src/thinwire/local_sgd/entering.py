"""The start of a `LocalSGD`: what processes compare when they enter, and go on from."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.comm import agree
from thinwire.comm.agreement import alike_on_all_shards
from thinwire.errors import StepError
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.engines import Engines
from thinwire.local_sgd.fragment import Averaged
from thinwire.local_sgd.membership import Membership
from thinwire.local_sgd.model_changes import ModelChanges
from thinwire.local_sgd.outer import described_outer
from thinwire.local_sgd.pending_average import PendingAverage
from thinwire.local_sgd.saved_state import LoadedState, load_fragments
from thinwire.sync import Engine

LOADED = "loaded state"


def check_models(model: AveragedModel, engine: Engine, averaged: Sequence[Averaged], name: str) -> None:
    """Refuse, on all processes alike, models that differ, or that have changed since this was made."""
    group = engine.transport
    alike_on_all_shards(
        model.replica.inside,
        "entering LocalSGD",
        lambda: {"replica": f"{group.rank} of {group.size}", "algorithm": repr(engine.algorithm)},
        lambda: engine.agree(averaged[0].value.device),
    )
    # The plan is of what was trained then: messages of other lengths would end the process, and those of
    # equal lengths be averaged with other parameters'.
    others = sorted({spec.name for spec in {*engine.specs} ^ {tensor.spec for tensor in averaged}})
    changed = {"parameters that have changed since LocalSGD was made:": str(others[:4])} if others else {}
    agree_on(changed, model, engine)
    if others:
        raise StepError(
            "the model's trainable parameters or buffers are others than when this "
            f"{name} was made: {others[:4]}; freeze, unfreeze or convert them first, then "
            "make it"
        )


def agree_on(described: dict[str, str], model: AveragedModel, engine: Engine) -> None:
    """Refuse, on all processes alike, to enter with other settings. Collective."""
    transport, replica, purpose = engine.transport, model.replica, "entering LocalSGD"
    of_all = dict(described)
    if replica.saves_parts:  # each process has loaded its own
        of_all.pop(LOADED, None)
    alike_on_all_shards(replica.inside, purpose, lambda: of_all, lambda: agree(transport, described, purpose))


def entry_settings(changes: ModelChanges, engines: Engines, loaded: LoadedState | None) -> dict[str, str]:
    """Return the settings that must be the same on all processes, by subject."""
    schedule = changes.schedule
    described = {
        "every_steps": schedule.every_steps,
        "warmup_steps": schedule.warmup.steps,
        "algorithm of the warm-up": engines.gradients.algorithm,
        "streaming": schedule.streaming,
        "subgroup": schedule.has_subgroup,
        "outer optimizer": described_outer(changes.model.outer),
        LOADED: None if loaded is None else loaded.digest,
    }
    return {subject: str(value) for subject, value in described.items()}


def go_on_from(loaded: LoadedState, changes: ModelChanges, membership: Membership) -> None:
    """Let fragments and what was under way go on from a state."""
    load_fragments(loaded, changes.model)
    membership.abandon()  # of an attempt to enter that has failed
    changes.go_by_steps(loaded.step)
    changes.end_warmup()
    for number, means in loaded.in_flight:
        # Version 0.2 had several under way: those before the last are applied here.
        if membership.is_open:
            membership.finish()
        fragment = changes.fragments[number]
        changes.sent_at = fragment.sent_after
        changes.go_by_steps(fragment.sent_after)
        pending = PendingAverage({fragment: fragment.flat(means)}, None)
        membership.resume(pending, fragment.sent_after)
