"""The schedule of rounds: after which step they run, and after which step they are applied."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from gradsieve._check import one_of
from gradsieve.share.auto import AutoDensity
from gradsieve.share.background import Background, Task
from gradsieve.share.outcome import Agreed, NotFinite
from gradsieve.share.replica import Replica
from gradsieve.worlds.base import World
from gradsieve.worlds.waiting import during

Outcome = Agreed | NotFinite


class Driver:
    """Runs the rounds of the replicas in this process: one real worker's, or all virtual ones'.

    With `delay=0` a round runs and is applied after the same step. With `delay=1` it is applied after the next one;
    if there is a `background`, it runs there, during the next forward and backward pass. The result is the same
    with and without.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        world: World,
        delay: int = 0,
        background: Background[list[Outcome]] | None = None,
    ) -> None:
        self.replicas, self.world, self.background = list(replicas), world, background
        self.delay = one_of("delay", delay, (0, 1))
        self._running: Task[list[Outcome]] | None = None
        self._ready: list[Outcome] | None = None
        self._waited = 0.0  # for the round that is applied next
        self._computed: float | None = None  # seconds from a round to the next step
        self._left = math.nan  # when this process returned to computing

    def wait(self) -> None:
        """Wait for the running round: afterwards weights may change. Its errors are raised here."""
        if not math.isnan(self._left):
            self._computed, self._left = time.perf_counter() - self._left, math.nan
        if self._running is None:
            return
        started, running, self._running = time.perf_counter(), self._running, None
        self._ready = running.result()
        self._waited = time.perf_counter() - started

    def after_step(self) -> bool:
        """Called after every replica completed a step; returns whether a round was applied."""
        applied = self.flush()
        for replica in self.replicas:
            replica.steps += 1
        if self.replicas[0].due:
            self._start()
            if not self.delay:
                made, self._ready = self._ready, None
                assert made is not None
                self._apply(made, late=False)
                applied = True
        self._left = time.perf_counter()
        return applied

    def flush(self) -> bool:
        """Apply a round that is complete but not applied; returns whether there was one."""
        ready, self.pending = self.pending, None
        if ready is not None:
            self._apply(ready, late=True)
        return ready is not None

    @property
    def pending(self) -> list[Outcome] | None:
        """The outcomes that will be applied after the next step, in the order of the replicas."""
        self.wait()
        return self._ready

    @pending.setter
    def pending(self, outcomes: list[Outcome] | None) -> None:
        self.wait()
        self._ready = outcomes

    def _start(self) -> None:
        def make() -> list[Outcome]:
            with during(f"the round after step {self.replicas[0].steps}"):
                return self.world.run([replica.round() for replica in self.replicas])

        if self.delay and self.background is not None:
            self._running = self.background.submit(make)
        else:
            self._ready, self._waited = make(), 0.0

    def _apply(self, outcomes: list[Outcome], *, late: bool) -> None:
        for replica, outcome in zip(self.replicas, outcomes, strict=True):
            replica.apply_(outcome, late=late)
            assert replica.report is not None
            seconds = dict(replica.report.seconds)
            spent = seconds["select"] + seconds["communicate"]
            waited = self._waited if late and self.background is not None else spent
            seconds |= {"waited": waited, "hidden": max(0.0, spent - waited)}
            if isinstance(replica.schedule, AutoDensity) and self._computed is not None:
                replica.schedule.note(self._computed, spent)
            replica.report = replace(replica.report, seconds=seconds)
