"""Whether whole matrices are averaged faster than shards, by what the links take: both are tried."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from thinwire.algorithms import Algorithm
from thinwire.channel import Transport, gather_numbers
from thinwire.errors import AttachError, CommunicationError, ConfigError
from thinwire.fronts.sharded.front import specs_of
from thinwire.fronts.sharded.model import Piece, local_of
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, Settings

__all__ = ["as_averaged_faster"]

logger = logging.getLogger(__name__)

TIMED_STEPS = 3
# At one matrix rank a whole matrix is approximated more roughly than its shards: it must win something.
MIN_GAIN = 0.1
# Past any warm-up, in which all travels uncompressed.
LATE_STEP = 1 << 30

PURPOSE = 'attach(whole_matrices="auto")'


def as_averaged_faster(
    algorithm: Algorithm,
    pieces: Sequence[Piece],
    transport: Transport,
    shards: Transport,
    clock: Callable[[], float] = time.perf_counter,
) -> Sequence[Piece]:
    """Return pieces as shards or as parts of whole matrices, whichever an algorithm averages faster.

    Shards, unless whole matrices save a tenth of the time of the slowest process. Collective over shards and
    replicas, alike on all of them. Nothing is tried where the algorithm sends the same, or can't do it.

    Args:
        algorithm: Which.
        pieces: What this process has of the parameters, as shards.
        transport: Joins the replicas of this shard.
        shards: Joins the shards of this replica.
        clock: Seconds since any point.

    Cost: four exchanges of either, and for that time a copy of the gradients and one algorithm's memory.

    Raises:
        CommunicationError: A collective failed; its error is the cause.
    """
    everybody = (transport, shards)
    try:
        whole = [piece.of_whole_matrix(shards.rank, shards.size) for piece in pieces]
        engines = [
            Engine(algorithm, transport, specs_of(each), Settings(together=shards))
            for each in (pieces, whole)
        ]
    # Of settings, and of how all is cut: alike on all processes.
    except (AttachError, ConfigError) as error:
        logger.info("%s: shards, since %s", PURPOSE, error)
        return pieces
    trained = [piece for piece in pieces if piece.parameter.requires_grad]
    are_unlike = float(engines[0].plan.routes != engines[1].plan.routes)
    # A shard may be empty where others are not.
    if not _highest([are_unlike], everybody)[0]:
        return pieces
    try:
        # Each is let go before the next one: their memories are not needed side by side.
        timed = [_step_seconds(engines.pop(0), trained, everybody, clock) for _ in range(2)]
    except CommunicationError as error:
        # The engine's own error names a step that is none of the user's.
        raise CommunicationError(
            f"{PURPOSE}: a collective failed while averaging of shards and of whole matrices was timed; look "
            "at the other processes, and restart all"
        ) from error
    # Not the mean: a step waits for the slowest.
    of_shards, of_whole = _highest(timed, everybody)
    is_faster = of_whole <= (1 - MIN_GAIN) * of_shards
    logger.info(
        "%s: averaging takes %.1f ms of shards, %.1f ms of whole matrices: %s",
        PURPOSE,
        1e3 * of_shards,
        1e3 * of_whole,
        "whole matrices" if is_faster else "shards",
    )
    return whole if is_faster else pieces


def _highest(values: Sequence[float], everybody: Sequence[Transport]) -> Sequence[float]:
    """Return the highest of each over all shards and replicas. Collective."""
    # Over the replicas of each shard, then over shards: behind that it is alike on all.
    for members in everybody:
        values = [max(each) for each in zip(*gather_numbers(values, members, PURPOSE), strict=True)]
    return values


def _step_seconds(
    engine: Engine, trained: Sequence[Piece], everybody: Sequence[Transport], clock: Callable[[], float]
) -> float:
    """Return what averaging ones takes, by device and type in one bucket each. Collective."""
    engine.memory.step = LATE_STEP
    kinds: dict[tuple[torch.device, torch.dtype], list[ParameterSpec]] = {}
    for piece, spec in zip(trained, engine.specs, strict=True):
        kinds.setdefault((local_of(piece.parameter).device, spec.dtype), []).append(spec)
    buckets = [
        (tuple(specs), torch.ones(sum(each.numel for each in specs), dtype=dtype, device=device))
        for (device, dtype), specs in kinds.items()
    ]
    seconds = []
    # The first one makes connections and compiles.
    for _ in range(1 + TIMED_STEPS):
        # All begin together, or the first to come would count its waiting.
        _highest([0.0], everybody)
        start = clock()
        engine.average(buckets)
        for device in {flat.device for _, flat in buckets if flat.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        seconds.append(clock() - start)
    return median(seconds[1:])
