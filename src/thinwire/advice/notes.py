"""Sentences on why an advice is less certain."""

from __future__ import annotations

from collections.abc import Iterator
from socket import gethostname

from thinwire.advice.losses import Training, known_optimizers, loss_gaps
from thinwire.checks import listed
from thinwire.probe.measured_link import MeasuredLink


def notes_on_losses(optimizer: str | None, total_steps: int | None) -> Iterator[str]:
    """Yield how the run differs from those in which losses were measured."""
    known = ", ".join(known_optimizers())
    if optimizer is None:
        yield f"Loss gaps are the largest of {known}; name your optimizer for its own."
    elif optimizer not in known_optimizers():
        yield f"No loss gap was measured with {optimizer}, only with {known}: the largest of them counts."
    if total_steps is None:
        few_bits = "Few bits lose more in short runs, and this run's length is unknown"
        hint = "advise --steps, auto(total_steps=…)"
        yield f"{few_bits} ({hint}): losses are those of the shortest runs that were measured."


def notes_on_size(training: Training) -> Iterator[str]:
    """Yield a sentence if no loss was measured with such a large model."""
    largest = max(gap.parameters for gap in loss_gaps())
    if training.parameters > 2 * largest:
        sizes = f"{training.parameters / 1e6:,.4g} M parameters, none above {largest / 1e6:.3g} M"
        yield f"Losses are not measured at this size, {sizes}: they are those of the nearest training."


def notes_on_link(link: MeasuredLink, num_processes: int, device: str) -> Iterator[str]:
    """Yield how the probe differs from this job, and what is assumed about machines of several processes."""
    probe, predicted_processes = link.probe, link.members * link.shards * link.processes
    if link.processes > 1:
        yield (
            f"Predicted for {link.members} machines of {link.processes} processes, which average inside a "
            "machine first, none of it hidden (docs/machines.md): bytes are those that leave a machine."
        )
    if link.shards > 1:
        shared = f"the {link.shards} of a replica share one link"
        yield f"Predicted for {link.members} replicas of {link.shards} shards; {shared} to the others."
    # A job of one replica may ask about any network.
    if num_processes not in (link.shards, predicted_processes):
        sizes = f"of {probe.world_size} processes, this job has {num_processes}"
        yield f"The probe is {sizes}: predictions are for {predicted_processes}."
    if probe.device != device:
        yield f"The probe is of messages on {probe.device}; steps were timed on {device}."
    hosts, here = list(dict.fromkeys(probe.hosts)), gethostname()
    if hosts and here not in hosts:
        others = f"other machines ({listed(hosts, 4)})"
        yield f"The probe is of {others}: their links, and the arithmetic of this one, {here}."
    # If this job has just probed the network itself, it knows that.
    if len(hosts) == 1 and num_processes != probe.world_size:
        here_alone = f"All processes of the probe ran on one machine, {hosts[0]}"
        yield f"{here_alone}; for a training on several, probe between those."
    if probe.doubt:
        yield f"The probe is doubtful: {probe.doubt}."
