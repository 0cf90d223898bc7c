"""What makes advice less certain, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from socket import gethostname

import torch

from thinwire.advice.prediction import Prediction
from thinwire.probe.measured_link import MeasuredLink

MIN_SPREAD = 0.2  # below, it hardly shows in what is measured


def notes_on_saving(best: Prediction, link: MeasuredLink) -> Iterator[str]:
    """Yield how long `state_dict` takes with the advised algorithm, if it keeps a residual."""
    if num_bytes := best.residual_bytes:
        residual = f"the residual of {best.name}, {num_bytes / 1e6:.3g} MB"
        seconds = f"about {link.transfer('all_reduce', num_bytes).seconds:.2g} s each time"
        yield f"Saving (state_dict) averages {residual}, over the link: {seconds}."


def notes_on_spread(low_seconds: float, high_seconds: float) -> Iterator[str]:
    """Yield that steps without averaging varied much, if they did."""
    if high_seconds > (1 + MIN_SPREAD) * low_seconds:
        spread = f"{1e3 * low_seconds:.1f} to {1e3 * high_seconds:.1f} ms"
        yield f"Half of the steps without averaging took {spread}: on a quiet machine predictions are surer."


def notes_on_link(link: MeasuredLink, num_processes: int, device: torch.device) -> Iterator[str]:
    """Yield how the probe differs from this job, and what is assumed of machines of several processes."""
    probe, predicted_processes = link.probe, link.members * link.shards * link.processes
    if link.processes > 1:
        yield (
            f"Predicted for {link.members} machines of {link.processes} processes, which average inside of a "
            "machine first, as if nothing hid that (docs/machines.md): bytes are those that leave a machine."
        )
    if link.shards > 1:
        shared = f"the {link.shards} of a replica share one link"
        yield f"Predicted for {link.members} replicas of {link.shards} shards; {shared} to the others."
    # One replica alone may ask about any network: that is what the command does.
    if num_processes not in (link.shards, predicted_processes):
        sizes = f"of {probe.world_size} processes, this job has {num_processes}"
        yield f"The probe is {sizes}: predictions are for {predicted_processes}."
    if probe.device != device.type:
        yield f"The probe is of messages on {probe.device}; steps were timed on {device.type}."
    hosts, here = list(dict.fromkeys(probe.hosts)), gethostname()
    if hosts and here not in hosts:
        few = ", ".join(hosts[:4]) + (", …" if len(hosts) > 4 else "")
        yield f"The probe is of other machines ({few}): their links, and the arithmetic of this one, {here}."
    # A network that this very job has just probed is no surprise.
    if len(hosts) == 1 and num_processes != probe.world_size:
        here_alone = f"All processes of the probe ran on one machine, {hosts[0]}"
        yield f"{here_alone}; for a training on several, probe between those."
    if probe.doubt:
        yield f"The probe is doubtful: {probe.doubt}."
