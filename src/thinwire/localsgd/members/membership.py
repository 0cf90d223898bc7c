"""Averagings as transactions among whoever is there: who takes part, all or nothing, who has gone."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.algorithms.error_feedback import ERROR
from thinwire.channel import gather_bytes, gather_numbers
from thinwire.channel.agreement import check_same
from thinwire.errors import AgreementError, CommunicationError, LeftError, StateError, StepError
from thinwire.localsgd.members.front import Front, Prepared
from thinwire.localsgd.members.group import Group
from thinwire.localsgd.members.handing import broadcast_residual
from thinwire.localsgd.members.presence import MembershipStats, Presence, count_changes, kept_lineage
from thinwire.sync import Engine

logger = logging.getLogger(__name__)

NUMBER_BITS = 52  # a float64 holds every such number
PAUSE_SECONDS = 0.5


@dataclass
class _Doubt:
    """An averaging that was prepared, when the last message, which says that all have prepared it, failed."""

    prepared: Prepared | None
    lineage: int
    present: tuple[Presence, ...]


class _TryAgainError(Exception):
    """This averaging is not possible, but no message failed; every member knows, so all retry."""


class _TooFewError(_TryAgainError):
    """Others are waited for."""


class Membership:
    """Lets a front average with whoever is there, as often as it takes; keeps track of the members.

    An averaging is committed by all members or by none. The last of its messages says that everybody has
    received everything. A member that misses just that message is in doubt: it keeps what it has prepared,
    and learns at its next meeting with the others whether they have committed.

    What each member has not transmitted counts in the mean over the members of its averaging. When their
    number changes, those who stay multiply their residual by new over old number: the mean stays what it was.

    Attributes:
        stats: Who has come and gone.
        is_leaving: Whether this member leaves after its next averaging, and hands over its residual. To be
            set.
        has_left: Whether it has left.
        lineage: Of the committed averagings that the model comes from; part of what newcomers start from.
    """

    def __init__(self, group: Group, engine: Engine, front: Front, device: torch.device) -> None:
        self.stats = MembershipStats()
        self.is_leaving = self.has_left = False
        self.lineage = 0
        self._group, self._engine, self._front, self._device = group, engine, front, device
        self._member = _drawn()
        self._present: tuple[Presence, ...] = ()  # at the last committed averaging
        self._error_members = 1  # over whose mean this member's residual counts
        self._agreed_changes = 0
        self._doubt: _Doubt | None = None
        group.provide = self._provided
        group.is_leaving = lambda: self.is_leaving

    def average(self) -> None:
        """Average once with whoever is there, however often that must be tried. Collective."""
        if self.has_left:
            raise LeftError("this member has left the group; start the process again to join anew")
        give_up_at: float | None = None
        said = ""
        while True:
            try:
                present = self._met()
                self._averaged(present)
            except (CommunicationError, _TryAgainError) as error:
                # From the first failure on: the others may come late by as long as a quorum may take.
                now = time.monotonic()
                give_up_at = now + self._group.wait_seconds if give_up_at is None else give_up_at
                # First of all: it breaks the others' messages off, which would wait for this member until
                # they time out.
                self._group.conclude(False)
                self.stats.retries += not isinstance(error, _TooFewError)
                if str(error) != said:  # who waits for others meets the same again and again
                    said = str(error)
                    waits = isinstance(error, _TooFewError)
                    happens = (
                        "waiting for more members" if waits else "an averaging has failed and is repeated"
                    )
                    logger.warning("%s: %s", happens, error)
                if now >= give_up_at:
                    raise CommunicationError(
                        f"no averaging has succeeded in {self._group.wait_seconds:g} s, the last because: "
                        f"{error}. Nothing was averaged; see whether the lighthouse and at least "
                        f"min_members={self._group.min_members} members are there"
                    ) from error
            else:
                break
        # As the others have read it: asked to leave since then, a member has handed over nothing yet.
        if present[self._group.transport.rank].is_leaving:
            self.leave()
            raise LeftError("this member has left the group, and handed over what it had not transmitted")

    def leave(self) -> None:
        """Go at once. What has not been handed over is lost."""
        if self.has_left:
            return
        if self._doubt is not None and self._doubt.prepared is not None:
            self._doubt.prepared.abandon()
        self.has_left = True
        self._group.leave()

    def _met(self) -> tuple[Presence, ...]:
        """Return who takes part in the next averaging, all of one lineage and configured alike."""
        group = self._group
        start = time.perf_counter()
        try:
            group.meet()
        except LeftError:
            self.leave()
            raise
        finally:
            self.stats.quorum_seconds += time.perf_counter() - start
        self._note_received()
        is_new, in_doubt = group.received is not None, self._doubt is not None
        own = Presence(
            member=self._member,
            lineage=self.lineage if group.received is None else int(group.received["lineage"]),
            doubt=0 if self._doubt is None else self._doubt.lineage,
            step=0 if is_new else self._front.step,
            min_members=group.min_members,
            weight=0.0 if is_new else self._front.weight(),
            weight_behind_doubt=self._front.weight(1) if in_doubt else 0.0,
            error_norm=self._engine.error_norm(),
            is_finite=self._front.is_finite() and (not in_doubt or self._front.is_finite(1)),
            is_leaving=self.is_leaving,
            is_new=is_new,
        )
        rows = gather_numbers(
            [float(each) for each in own], group.transport, "who takes part in an averaging"
        )
        present = tuple(map(Presence.of, rows))
        # In this order, and by the rows alone: all refuse at the same place, and nobody sends to one that has
        # gone back to meet.
        self._check_number(present)
        present = self._of_one_lineage(present)
        self._check_finite(present)
        if self._agreed_changes != group.num_changes:
            # Agreed before adopted: who is refused has changed nothing. Scaled even if the averaging then
            # fails: the next change of members starts from this number.
            self._agree(present)
            self._adopt()
            scale = group.transport.size / self._error_members
            self._engine.regroup(scale)
            self._error_members = group.transport.size
            self._agreed_changes = group.num_changes
        return present

    def _provided(self) -> Mapping[str, Any]:
        """Return what a newcomer starts from."""
        if self._device.type != "cpu":
            # On a thread of torchft's, whose stream does not wait for the one that the training runs on.
            torch.accelerator.synchronize(self._device)
        # Send what it is about to load: its own model is not shared yet.
        return self._front.state() if self._group.received is None else self._group.received

    def _note_received(self) -> None:
        """Decide what a state from the others means: an averaging in doubt was committed, or a new start."""
        received = self._group.received
        if received is None:
            return
        if not isinstance(received, Mapping) or type(received.get("lineage")) is not int:
            raise StateError(
                "what the group has sent this member to start from has no lineage, expected a mapping with "
                f"one, got a {type(received).__name__}; start all members with the same version of Thinwire"
            )
        if self._doubt is not None and received["lineage"] == self._doubt.lineage:
            # They have committed what this member had prepared: with that it stands where they do, and keeps
            # its residual.
            self._group.received = None
            self._resolve_doubt(was_committed=True)
            return
        self._member = _drawn()  # to the others, it is a new one

    def _of_one_lineage(self, present: tuple[Presence, ...]) -> tuple[Presence, ...]:
        """Return the members with their true lineage; those of another one than most must start anew."""
        kept = kept_lineage(present)
        if self._doubt is not None:
            was_committed = self._doubt.lineage == kept
            self._resolve_doubt(was_committed=was_committed)
            if was_committed:
                self._group.received = None
        present = tuple(
            each._replace(lineage=kept, doubt=0, weight=each.weight_behind_doubt)
            if each.doubt == kept
            else each
            for each in present
        )
        if any(each.lineage != kept for each in present):
            if present[self._group.transport.rank].lineage != kept:
                self._group.received = None
                self._group.start_over()
            raise _TryAgainError(
                "members come from different averagings, and some must start from the others"
            )
        return present

    def _resolve_doubt(self, *, was_committed: bool) -> None:
        assert self._doubt is not None
        doubt, self._doubt = self._doubt, None
        if was_committed:
            self._commit(doubt.prepared, doubt.present, doubt.lineage)
        elif doubt.prepared is not None:
            doubt.prepared.abandon()

    def _check_number(self, present: Sequence[Presence]) -> None:
        # First: where some had enough and others had not, some would send, and others meet again.
        needed = [each.min_members for each in present if not each.is_new]
        usual = Counter(needed or [each.min_members for each in present]).most_common(1)[0][0]
        others = [rank for rank, each in enumerate(present) if each.min_members != usual]
        if self._group.transport.rank in others:
            self.leave()
            raise AgreementError(
                f"this member has min_members={self._group.min_members}, and those that it has met have "
                f"min_members={usual}: it was refused, and the others go on; start all with the same one"
            )
        if others:
            raise _TryAgainError(f"members {others} have other min_members, and are refused")
        if len(present) < self._group.min_members:
            if self.is_leaving:
                self.leave()
                raise LeftError(
                    f"this member has left the group, in which too few were left ({len(present)} of "
                    f"min_members={self._group.min_members}) to hand over to"
                )
            time.sleep(PAUSE_SECONDS)  # a quorum of too few comes at once, again and again
            there = "1 member is" if len(present) == 1 else f"{len(present)} members are"
            raise _TooFewError(f"{there} there, and min_members={self._group.min_members} are needed")

    def _check_finite(self, present: Sequence[Presence]) -> None:
        broken = [rank for rank, each in enumerate(present) if not each.is_finite]
        if self._group.transport.rank in broken:
            self.leave()
            raise StepError(
                "what this member holds (parameters, buffers or gradients) is not finite (inf or NaN); "
                "nothing was averaged, and it has left the group. Find what diverged (learning rate, loss, "
                "fp16 without a GradScaler); started again, it takes the model of the others"
            )
        if broken:
            raise _TryAgainError(f"what members {broken} hold is not finite, and they leave")

    def _agree(self, present: Sequence[Presence]) -> None:
        """Refuse a member that is configured otherwise than those who were here before."""
        group = self._group
        described = self._front.described()
        purpose = "joining a group"
        everyone: list[dict[str, str]] = [
            json.loads(each)
            for each in gather_bytes(json.dumps(described).encode(), group.transport, purpose)
        ]
        texts = [json.dumps(each, sort_keys=True) for each in everyone]
        before = [text for text, each in zip(texts, present, strict=True) if not each.is_new] or texts
        counts = Counter(before)
        usual = max(counts, key=lambda text: counts[text])
        others = [rank for rank, text in enumerate(texts) if text != usual]
        if not others:
            return
        if group.transport.rank not in others:
            raise _TryAgainError(f"members {others} are configured otherwise, and are refused")
        # Before it is raised: the others meet again at once, and should not wait for this member.
        self.leave()
        try:
            check_same(
                [everyone[texts.index(usual)], described], f"{purpose}, of which process 0 is a member"
            )
        except AgreementError as error:
            raise AgreementError(f"{error}, and this process, 1, was refused; the others go on") from None

    def _adopt(self) -> None:
        received = self._group.received
        if received is None:
            return
        lost = self._engine.error_norm()
        if self.lineage:
            owed = f", and its residual of norm {lost:g} is lost" if lost else ""
            logger.warning("this member was away: it starts from the others%s", owed)
            self.stats.lost_error += lost
        self._front.adopt(received)
        self.lineage = int(received["lineage"])
        self._error_members = self._group.transport.size
        self._present = ()
        self._group.received = None

    def _averaged(self, present: tuple[Presence, ...]) -> None:
        """Send, and commit once everybody has received everything."""
        group = self._group
        # The same on all of this quorum, and on nobody else: of the past, and of who was there. (The quorum's
        # number is not enough: a lighthouse that has died and come back counts from the beginning.)
        members = [each.member for each in present]
        digest = hashlib.sha256(f"{self.lineage} {group.quorum_id} {members}".encode()).digest()
        lineage = int.from_bytes(digest[:8], "big") % (1 << NUMBER_BITS) | 1
        total = sum(each.weight for each in present)
        prepared: Prepared | None = None
        if total:
            own = present[group.transport.rank].weight
            prepared = self._front.prepare(own * len(present) / total)
        try:
            gather_numbers([1.0], group.transport, "whether all have received everything")
        except CommunicationError:
            # Not abandoned: another member may have got this message, and committed.
            self._doubt = _Doubt(prepared, lineage, present)
            raise
        except BaseException:
            if prepared is not None:
                prepared.abandon()
            raise
        # No message lies between the last one and the commit; the hand-over comes behind it, so that its
        # failure takes nothing back.
        group.conclude(True)
        self._commit(prepared, present, lineage)
        self._hand_over(present)

    def _commit(self, prepared: Prepared | None, present: tuple[Presence, ...], lineage: int) -> None:
        if prepared is not None:
            prepared.commit()
        self.lineage = lineage
        self._front.committed(
            max(each.step for each in present),
            was_averaged=prepared is not None,
            has_newcomers=any(each.is_new for each in present),
        )
        self.stats.averagings += prepared is not None
        count_changes(self.stats, self._present, present)
        self._present = present

    def _hand_over(self, present: Sequence[Presence]) -> None:
        """Let those who stay take over, in equal parts, the residual of those who leave."""
        stayers = [rank for rank, each in enumerate(present) if not each.is_leaving]
        leavers = [rank for rank, each in enumerate(present) if each.is_leaving]
        errors, transport = self._engine.memory[ERROR], self._group.transport
        # On which parameters there is a residual is the same on all members.
        names = sorted(errors)
        if not stayers or not names:
            return
        for place, rank in enumerate(leavers):
            try:
                arrived = broadcast_residual([errors[name] for name in names], transport, rank)
            except CommunicationError as error:
                # No message comes behind one that has failed, so those of the other leavers are lost, too.
                logger.warning(
                    "the residuals of %d members that leave are lost: %s", len(leavers[place:]), error
                )
                self.stats.lost_error += sum(present[each].error_norm for each in leavers[place:])
                return
            if transport.rank in stayers:
                for name, part in zip(names, arrived, strict=True):
                    errors[name].add_(part, alpha=1 / len(stayers))


def _drawn() -> int:
    """Return a number that no other member has; whatever seeds the user's script sets."""
    return random.SystemRandom().getrandbits(NUMBER_BITS) | 1
