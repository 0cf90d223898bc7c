"""A member of a group of torchft's own DiLoCo, set up as in torchft's tests of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

from torch._C._distributed_c10d import TCPStore

from learner import USUAL, WAIT_SECONDS, Learner, checksum, heldout_loss
from machine_member import die
from thinwire import Nesterov, Quantize
from thinwire.local_sgd.outer import new_outer


class Deadly:
    """Counts calls, by moment of an averaging, and lets the process die in one."""

    def __init__(self, moment: str, place: int) -> None:
        self.moment, self.place = moment, place
        self.counts = {"all-to-all": 0, "vote": 0, "asking": 0}

    def call(self, inner: Callable[..., Any], moment: str) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            self.counts[moment] += 1
            if (moment, self.counts[moment]) != (self.moment, self.place):
                return inner(*args, **options)
            if moment == "all-to-all":
                inner(*args, **options)  # its message is under way
            return die()

        return called

    def die_in_next(self, moment: str) -> None:
        self.moment, self.place = moment, self.counts[moment] + 1


class Client:
    """torchft's client of its manager, two of whose calls may be deadly."""

    def __init__(self, inner: Any, deadly: Deadly) -> None:
        self._inner = inner
        self._quorum = deadly.call(inner._quorum, "asking")
        self.should_commit = deadly.call(inner.should_commit, "vote")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Told:
    """Tells of what torchft's manager has committed, and counts what it has not."""

    def __init__(self, learner: Learner, manager: Any) -> None:
        self.learner, self.manager = learner, manager
        self.step = self.members = self.losses = self.joins = self.discarded_steps = 0

    def after_averaging(self) -> None:
        step, members = self.manager.current_step(), self.manager.num_participants()
        if step == self.step:
            # It has put the parameters back to the last average: what was learnt since then is gone.
            self.discarded_steps += self.learner.every_steps
            return
        if self.step:
            self.losses += max(0, self.members - members)
            self.joins += max(0, members - self.members)
        self.step, self.members = step, members
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        lineage = f"{self.manager._quorum_id}/{step}"
        self.learner.tell_averaged(**counts | {"step": step * self.learner.every_steps, "lineage": lineage})


@contextmanager
def torchft_member(
    learner: Learner,
    lighthouse: str,
    timeout_seconds: float,
    *,
    name: str,
    min_members: int,
    hostname: str,
) -> Iterator[Callable[[float], bool]]:
    torchft, local_sgd = import_module("torchft"), import_module("torchft.local_sgd")
    # Where its HTTP server says it is. On the hosts of a lab, no name says that.
    socket.gethostname = lambda: hostname
    model, optimizer, timeout = learner.model, learner.optimizer, timedelta(seconds=timeout_seconds)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore(hostname, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=min_members,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timedelta(seconds=WAIT_SECONDS),
        connect_timeout=min(timeout, timedelta(seconds=10)),
        rank=0,
        world_size=1,
        store_addr=hostname,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname=hostname,
        heartbeat_interval=timedelta(milliseconds=500),
    )
    deadly = Deadly(*(learner.dies_at or ("", 0)))
    learner.die_in_all_to_all = lambda: deadly.die_in_next("all-to-all")
    manager._client = Client(manager._client, deadly)
    manager._pg.allreduce = deadly.call(manager._pg.allreduce, "all-to-all")
    send = manager._checkpoint_transport.send_checkpoint

    def serve(*args: Any, **options: Any) -> None:
        learner.serve()
        send(*args, **options)

    manager._checkpoint_transport.send_checkpoint = serve
    told, steps, every_steps = Told(learner, manager), 0, learner.every_steps

    def step(pause_seconds: float) -> bool:
        nonlocal steps
        if manager.current_step() * every_steps >= learner.num_steps:
            return False
        learner.learn(manager.current_step() * every_steps + steps % every_steps)
        time.sleep(pause_seconds)
        steps += 1
        if steps % every_steps == 0:
            told.after_averaging()
        return True

    outer = new_outer(Nesterov(), list(model.parameters()), USUAL, every_steps, Quantize(bits=4))
    try:
        with local_sgd.DiLoCo(
            manager, [model], optimizer, outer, sync_every=every_steps, use_bucketization=True
        ):
            yield step
        learner.tell(event="done", loss=heldout_loss(model, learner.text), checksum=checksum(model))
    finally:
        manager.shutdown(wait=False)
