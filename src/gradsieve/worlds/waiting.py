"""Bounded waiting: if a worker is missing, an exchange ends after a timeout with an error that names its rank.

A healthy exchange only records when it began. A worker that waits longer than `PATIENCE_S`, or fails, writes that
to the store that torch.distributed was set up with. So every survivor learns who is missing: the ranks that write
nothing there, or whose process on this machine has ended or is stopped.
"""

import json
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from gradsieve._check import BadType, positive
from gradsieve.worlds.groups import new_group
from gradsieve.worlds.meeting import EVERY_RANK, POLL_S, Meetings, Outcome
from gradsieve.worlds.processes import host, identity, keeps_store, state_of, within

T = TypeVar("T")

DEFAULT_S = 300.0  # seconds that an exchange may take
PATIENCE_S = 2.0  # seconds after which a waiting worker reports that, or a quarter of the timeout
GRACE_S = (
    10.0  # seconds in which survivors of a broken connection say so; those on one machine need not wait for it
)


class PeerLost(RuntimeError):
    """A worker did not take part in an exchange. The step was undone; see `regroup` for continuing without it.

    Attributes: `ranks` that were missing, empty if not known; the `phase` of the exchange.
    """

    def __init__(self, words: str, ranks: list[int], phase: str, when: str = "") -> None:
        super().__init__(f"{words} in {when + ', ' if when else ''}phase {phase}")
        self.words, self.ranks, self.phase, self.when = words, ranks, phase, when

    def __reduce__(self) -> Any:
        return PeerLost, (self.words, self.ranks, self.phase, self.when)


class WorkersDiverged(RuntimeError):
    """Workers asked for different collectives at the same time: a real process group would hang or mix data."""


@contextmanager
def during(when: str) -> Iterator[None]:
    """Add to a `PeerLost` error in which step it happened."""
    try:
        yield
    except PeerLost as lost:
        raise PeerLost(lost.words, lost.ranks, lost.phase, lost.when or when) from lost.__cause__


def seconds(timeout: Any) -> float:
    """Check a timeout, seconds or a timedelta; returns seconds."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if timeout is None or isinstance(timeout, str):
        raise BadType(f"timeout must be a number of seconds or a timedelta, got {timeout!r}")
    return min(positive("timeout", timeout), 1e6)


class Watch(Protocol):
    """The interface for watching a group while collectives run."""

    owns_group: bool  # whether the group was made for it

    def collective(self, phase: str) -> Any:
        """The context of one collective."""

    def together(self, call: str) -> None:
        """Run a call that every worker must make now; raises an error if one does not."""


class Unwatched:
    """Waits as long as the group's backend does."""

    owns_group = False

    @contextmanager
    def collective(self, phase: str) -> Iterator[None]:
        yield

    def together(self, call: str) -> None:
        pass


def bounded(group: dist.ProcessGroup | None, timeout: float) -> tuple[dist.ProcessGroup | None, Watch]:
    """A group of the same workers whose exchanges end after `timeout` seconds, and the watch over it.

    With gloo a new group is made, so that the user's keeps its timeout; every worker must call this. Other backends
    abort a process whose peers are missing themselves, after the timeout of the group.
    """
    group = group or dist.group.WORLD
    assert group is not None
    owns = False
    try:
        group.group_name  # noqa: B018  # of a group that torch.distributed does not know it raises an error
    except (AttributeError, RuntimeError):
        return group, Unwatched()
    try:
        if dist.get_backend(group) == "gloo":
            group = new_group(group, timeout=timedelta(seconds=timeout), backend="gloo")
            owns = True
        store = PrefixStore(f"gradsieve/{group.group_name}", _get_default_store())
    except (AttributeError, ValueError, KeyError):  # a group that torch.distributed does not know
        return group, Unwatched()
    return group, Waiting(store, dist.get_rank(group), dist.get_world_size(group), timeout, owns_group=owns)


class Waiting:
    """Watches the other workers through the store."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, *, owns_group: bool) -> None:
        self.owns_group = owns_group
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.patience = min(PATIENCE_S, timeout / 4)
        self.count = 0  # collectives so far
        self.phase, self.since = "", float("inf")
        self._meetings = Meetings()
        self._spoke = False  # the store holds an error of this worker
        self._keeps = keeps_store(store)
        store.set(f"who/{rank}", json.dumps(identity()))
        if size > 1:
            threading.Thread(target=_announce, args=(weakref.ref(self),), daemon=True).start()

    @contextmanager
    def collective(self, phase: str) -> Iterator[None]:
        self.count, self.phase, self.since = self.count + 1, phase, time.monotonic()
        try:
            yield
        except PeerLost:
            raise
        except (RuntimeError, OSError) as error:
            raise self._explained(error) from error
        finally:
            self.since = float("inf")
        if self._spoke:
            self._take_back()

    def together(self, call: str) -> None:
        if self.size == 1:
            return
        found = within(self.timeout + PATIENCE_S, lambda: self._met(call))
        if not found:
            raise self._silent_store(call)
        if not found[0].words:
            return
        lost = PeerLost(found[0].words, list(found[0].ranks), call)
        raise self._left(lost if found[0].lost else WorkersDiverged(found[0].words))

    def _met(self, call: str) -> Outcome:
        outcome = self._meetings.meet(self, call)
        if outcome.words.startswith(EVERY_RANK):
            self.say(failed=outcome.words)  # for those that wait elsewhere
        return outcome

    def say(self, failed: str = "") -> None:
        """Write to the store where this worker is."""
        self._spoke = self._spoke or bool(failed)
        self.store.set(
            f"at/{self.rank}", json.dumps({"count": self.count, "phase": self.phase, "failed": failed[:500]})
        )

    def _explained(self, error: Exception) -> Exception:
        """The ranks that were missing, agreed on by all survivors; the error itself if none was."""
        after = time.monotonic() - self.since
        # At the end of a timeout all waiting workers have reported, except those that arrived a little later.
        grace = 1 + 2 * self.patience if after > 0.9 * self.timeout else GRACE_S
        found = within(grace + PATIENCE_S, lambda: self._survey(error, grace))
        if not found:
            return self._silent_store(self.phase)
        ranks, words = found[0]
        if not ranks and not words:
            return error
        words = words or f"{self.named(ranks)} did not take part: no answer after {after:.1f} s"
        return self._left(PeerLost(words, ranks, self.phase))

    def _left(self, error: T) -> T:
        """An error that ends this worker, perhaps. The one that keeps the store stays until all survivors know."""
        gone = getattr(error, "ranks", [])
        within(GRACE_S + PATIENCE_S, lambda: self._stay(set(range(self.size)) - {self.rank, *gone}))
        return error

    def _stay(self, others: set[int]) -> None:
        deadline = time.monotonic() + GRACE_S
        self._spoke = True
        self.store.set(f"knows/{self.rank}", "")
        while self._keeps and others and time.monotonic() < deadline:
            others = {rank for rank in others if not self.store.check([f"knows/{rank}"]) and not self.fate(rank)}
            time.sleep(POLL_S)

    def _take_back(self) -> None:
        """All workers go on after an error: should this one be lost later, it must be named."""
        self._spoke = False
        with suppress(RuntimeError, OSError):
            self.say()
            self.store.delete_key(f"knows/{self.rank}")

    def _silent_store(self, phase: str) -> PeerLost:
        words = "the store of torch.distributed does not answer: its host, rank 0 or the launcher, is missing"
        return PeerLost(words, [0] if self.rank else [], phase)

    def _survey(self, error: Exception, grace: float) -> tuple[list[int], str]:
        """The ranks that were missing; and the message of a rank that gave up because it was alone in a call."""
        deadline = time.monotonic() + grace
        try:
            self.say(failed=str(error) or type(error).__name__)
            unknown = [rank for rank in range(self.size) if rank != self.rank]
            gone: list[int] = []
            while unknown and time.monotonic() < deadline:
                gone += [rank for rank in unknown if self.fate(rank) and not self.knows(rank)]
                unknown = [rank for rank in unknown if rank not in gone and not self._present(rank)]
                time.sleep(POLL_S)
            reasons = [self.said(rank).get("failed", "") for rank in range(self.size)]
            alone = next((words for words in reasons if words.startswith(EVERY_RANK)), "")
            agreed = self.store.compare_set("lost", "", json.dumps([sorted(gone + unknown), alone]))
            ranks, alone = json.loads(agreed)
            return ranks, alone
        except (RuntimeError, OSError, ValueError):
            # The store ended with its process: rank 0's, unless a launcher hosts it.
            return ([0] if self.rank else []), ""

    def knows(self, rank: int) -> bool:
        """Whether a rank has learnt of a loss: if it has ended since, it is not the one that was lost."""
        return bool(self.store.check([f"knows/{rank}"]))

    def _present(self, rank: int) -> bool:
        said = self.said(rank)
        return bool(said.get("failed")) or said.get("count", 0) >= self.count or self.knows(rank)

    def said(self, rank: int) -> dict[str, Any]:
        """Where a rank is, as it wrote to the store."""
        return self._read(f"at/{rank}")

    def _read(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.store.get(key)) if self.store.check([key]) else {}
        return found

    def fate(self, rank: int) -> str:
        """State of a rank's process, if it is on this machine and not running; otherwise empty."""
        who = self._read(f"who/{rank}")
        if who.get("host") != host():
            return ""
        state, begun = state_of(who["pid"])
        if begun != who["begun"] or state in "ZX":
            return "its process has ended"
        return "its process is stopped" if state in "Tt" else ""

    def named(self, ranks: Sequence[int]) -> str:
        """Ranks in words, with the fates of their processes."""
        fates = []
        for rank in ranks:
            try:
                fate = self.fate(rank)
            except (RuntimeError, OSError):
                fate = ""
            fates.append(f"rank {rank}" + (f" ({fate})" if fate else ""))
        return ", ".join(fates)


def _announce(watched: "weakref.ref[Waiting]") -> None:
    """Say where a worker is that has waited for long, once per collective."""
    said = 0
    while (waiting := watched()) is not None:
        patience = waiting.patience
        if waiting.count != said and time.monotonic() - waiting.since > patience:
            said = waiting.count
            try:
                waiting.say()
            except (RuntimeError, OSError):
                return  # the store is gone; the collective will fail, too
        del waiting
        time.sleep(patience / 4)
