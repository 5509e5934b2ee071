"""Calls that every rank must make, such as `save`: ranks meet in the store, and one that does not come is named.

Calls are numbered. The first rank that sees all others there, or gives up, writes the outcome, which all follow.
A rank that comes after the others gave up on it takes part in the next call instead, so a later call by all
succeeds.

A rank that is in a later exchange of Gradsieve cannot come any more, which is known after seconds. One that
computes, or waits in a collective of someone else, may still come: it is waited for until the timeout, and the log
says so.
"""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

EVERY_RANK = "every rank must call"
POLL_S = 0.05
_LOG_AFTER_S = 10.0  # seconds after which the log says for whom a call waits

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of a call; no words if all ranks made it."""

    words: str = ""
    ranks: Sequence[int] = ()  # that did not make it
    lost: bool = False  # they may be gone, rather than elsewhere


class Here(Protocol):
    """What a rank knows of the others: see `Waiting`."""

    store: Any
    rank: int
    size: int
    timeout: float
    count: int

    def said(self, rank: int) -> dict[str, Any]:
        """Where a rank is, as it wrote to the store."""

    def fate(self, rank: int) -> str:
        """State of a rank's process, if it is on this machine and not running."""

    def knows(self, rank: int) -> bool:
        """Whether a rank has learnt of a loss."""

    def named(self, ranks: Sequence[int]) -> str:
        """Ranks in words, with the fates of their processes."""


class Meetings:
    """The calls of one rank."""

    def __init__(self) -> None:
        self.number = 0

    def meet(self, here: Here, call: str) -> Outcome:
        """Wait until all ranks have made this call, or until one of them cannot."""
        while True:
            self.number += 1
            over = self._over(here)
            if over is None:
                return self._wait(here, call)
            if here.rank not in over.ranks:
                return over

    def _over(self, here: Here) -> Outcome | None:
        key = f"call/{self.number}/end"
        return Outcome(**json.loads(here.store.get(key))) if here.store.check([key]) else None

    def _wait(self, here: Here, call: str) -> Outcome:
        keys = [f"call/{self.number}/{rank}" for rank in range(here.size)]
        here.store.set(keys[here.rank], call)
        started, logged, pause = time.monotonic(), False, POLL_S / 10
        while (over := self._over(here)) is None:
            missing = [rank for rank, key in enumerate(keys) if not here.store.check([key])]
            after = time.monotonic() - started
            if (found := self._judged(here, call, keys, missing, after)) is not None:
                agreed = here.store.compare_set(f"call/{self.number}/end", "", json.dumps(asdict(found)))
                over = Outcome(**json.loads(agreed))
                break
            if after > _LOG_AFTER_S and not logged:
                _log.warning("%s waits for %s: %s %s", call, here.named(missing), EVERY_RANK, call)
                logged = True
            time.sleep(pause)
            pause = min(2 * pause, 10 * POLL_S)
        return over if over.words else self._compared(here, call, keys)

    def _judged(self, here: Here, call: str, keys: list[str], missing: list[int], after: float) -> Outcome | None:
        """The outcome, if it is known by now."""
        if not missing:
            return Outcome()
        for rank in missing:
            said = here.said(rank)
            if said.get("count", 0) > here.count:
                words = f"{EVERY_RANK} {call}: rank {rank} did not, it is in phase {said['phase']}"
                return Outcome(words, [rank])
        gone = [rank for rank in missing if after > here.timeout or here.fate(rank)]
        # A survivor may have made the call, or learnt of the loss, and ended since.
        gone = [rank for rank in gone if not here.store.check([keys[rank]]) and not here.knows(rank)]
        if not gone:
            return None
        if any(map(here.fate, gone)):
            return Outcome(f"{here.named(gone)} did not take part", gone, lost=True)
        return Outcome(f"{EVERY_RANK} {call}: {here.named(gone)} did not within {after:.1f} s", gone, lost=True)

    def _compared(self, here: Here, call: str, keys: list[str]) -> Outcome:
        made = [here.store.get(key).decode() for key in keys]
        for rank, other in enumerate(made):
            if other != call:
                return Outcome(f"every rank must make the same call: {call} here, {other} on rank {rank}", [rank])
        return Outcome()
