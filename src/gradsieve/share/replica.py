"""One worker's replica: its weights, the agreed weights, and its part in every round."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from gradsieve._check import BadInput, BadType, at_least, one_of
from gradsieve._version import __version__
from gradsieve.comm.collectives import Program
from gradsieve.comm.step import Sent, Step
from gradsieve.comm.traffic import Ledger, metered
from gradsieve.comm.wire import VALUES
from gradsieve.density import Density
from gradsieve.density.base import elements
from gradsieve.reports import Clock
from gradsieve.share.auto import AutoDensity
from gradsieve.share.average import average_
from gradsieve.share.outcome import Agreed, NonFiniteWeights, NotFinite, ShareReport, Unread, complaint
from gradsieve.share.rounds import exchange, say_where
from gradsieve.share.weights import Weights, labels_of
from gradsieve.sparsifiers import Shape, Sparsifier, name_of, options_by_name
from gradsieve.sparsifiers.base import vector_norm
from gradsieve.sparsifiers.exdyna import Exclusive
from gradsieve.state.handshake import handshake, same_count
from gradsieve.states import State, check_identity

STATE_VERSION = 3
ON_NONFINITE = ("raise", "restore")
JUDGES = ("drift", "curvature")  # how entries are chosen


class Replica:
    """The weights of one worker; every round averages the entries that drifted farthest.

    Args:
        parameters: the tensors to share, by name; they stay where they are.
        sparsifier: decides which positions are averaged.
        schedule: the density, as a function of the number of completed steps.
        rank: which worker this is.
        world_size: how many there are.
        every: number of completed optimizer steps between rounds.
        dense_steps: number of initial steps without a round: gradients are averaged there.
        values: how values travel: "fp32", "bf16" or "fp8".
        measure: whether reports contain the drift's norm, which costs one pass over the weights.
        second: returns the second moment that the optimizer keeps for a parameter, or None: entries are then chosen
            by their drift times its fourth root, for exdyna and micro.
        on_nonfinite: what to do if a worker's weights are not finite: "raise" `NonFiniteWeights` on all workers, or
            "restore" that worker's weights to the agreed ones and go on.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        sparsifier: Sparsifier[Any],
        schedule: Density | AutoDensity,
        *,
        rank: int,
        world_size: int,
        every: int = 1,
        dense_steps: int = 0,
        values: str = "fp32",
        measure: bool = False,
        second: Callable[[Tensor], Tensor | None] | None = None,
        on_nonfinite: str = "raise",
    ) -> None:
        if not isinstance(sparsifier, Sparsifier):
            raise BadType(f"sparsifier must be a Sparsifier (see make_sparsifier), got {sparsifier!r}")
        if reason := sparsifier.for_gradients_only():
            raise BadInput(f"sparsifier must work on weights, got {sparsifier}, which {reason}")
        if isinstance(schedule, Density) and schedule.needs_magnitudes:
            raise BadInput(f"density must not be a Budget, which goes by the size of gradients, got {schedule}")
        self.every, self.dense_steps = at_least("every", every, 1), at_least("dense_steps", dense_steps, 0)
        self.values = one_of("values", values, VALUES)
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, ON_NONFINITE)
        self.sparsifier, self.schedule, self.measure = sparsifier, schedule, measure
        self.rank, self.world_size, self.second = rank, world_size, second
        self.weights = Weights(parameters)
        self.labels = labels_of(self.weights.parameters)
        self.steps = self.rounds = 0
        self.report: ShareReport | None = None  # of the last round that was applied
        self._made: ShareReport | None = None  # of the last that was made
        self._ledger = Ledger()
        self._agreed = False
        # On a device every read makes the host wait: some of what a round finds is read by the next one.
        self.late = isinstance(sparsifier, Exclusive) and not self.weights.shared.is_cpu
        self._unread: Unread | None = None  # of the last round that was made
        self._open: Unread | None = None  # what the report does not know yet
        self.state = self._prior = self._fresh()

    @property
    def dense(self) -> bool:
        """Whether gradients are averaged in the next step."""
        return self.steps < self.dense_steps

    @property
    def due(self) -> bool:
        """Whether a round is due after the step that was just completed."""
        return self.steps > self.dense_steps and self.steps % self.every == 0

    def round(self) -> Program[Agreed | NotFinite]:
        """One round as a program. It changes no weights: see `apply_`."""
        self._ledger = Ledger()
        return metered(self._round(), self._ledger, self.world_size)

    def _round(self) -> Program[Agreed | NotFinite]:
        started = time.thread_time()
        clock, step, settled = Clock(self._ledger), self._step(self.schedule.at(self.steps)), 0.0
        if not self._agreed:
            yield from handshake(self.rank, self.world_size, self._settings(step))
            self._agreed = True
            settled = self._ledger.by_tag.pop("handshake").ring_bytes
            clock.skip()
        if isinstance(self.schedule, AutoDensity):
            yield from self.schedule.agree(self.world_size)
            step = self._step(self.schedule.at(self.steps))
        elif self.schedule.from_user:
            yield from same_count(step)
        before, asked = self._unread, (self.weights, self.sparsifier, self.state, step, self.second)
        found = yield from exchange(*asked, late=self.steps if self.late else None, before=before)
        self._unread = found.unread if isinstance(found, Agreed) else None
        threshold = None
        if isinstance(found, Agreed) and isinstance(found.where, Tensor) and found.selection is not None:
            threshold = found.selection.threshold
            drift = (self.weights.shared[found.where] - found.mean).float()
            sent = Sent(found.where, drift, found.counts, True, found.beside)
            if found.unread is not None:  # what is known of positions is that of the round before
                sent = Sent(None, drift, before.counts if before else [], True, *found.selection.beside[2:])
            self._prior, self.state = self.state, self.sparsifier.update(self.state, found.selection, sent, step)
        clock.lap("select")
        clock.seconds["cpu"] = time.thread_time() - started
        self._made = replace(self._make_report(step, found, threshold, clock), handshake_bytes=settled)
        self.rounds += 1
        return found

    def apply_(self, found: Agreed | NotFinite, *, late: bool = False) -> None:
        """Write the outcome of a round. `late`: steps were made since, which are kept: weights move by as much as
        they would have moved then."""
        if isinstance(found, NotFinite):
            self._handle(found)
            return
        started = time.perf_counter()
        moved = self.weights.read(found.where) + (found.target - found.own) if late else found.target
        self.weights.write_(found.where, moved)
        self.weights.shared[found.where] = found.mean
        self._open = found.unread
        assert self._made is not None
        written = time.perf_counter()
        norm, measured = self._norm(), time.perf_counter()
        seconds = {**self._made.seconds, "write": written - started, "measure": measured - written}
        self.report = replace(self._made, residual_norm=norm, seconds=seconds)

    def _handle(self, found: NotFinite) -> None:
        ranks = [rank for rank, position in enumerate(found.bad) if position >= 0]
        if found.steps is not None:  # what followed from that round
            self.state = self._prior
        if self.on_nonfinite == "raise" or not ranks:
            bad = [f"{self.weights.name_of(found.bad[rank])} of rank {rank}" for rank in ranks]
            raise NonFiniteWeights(complaint(bad, self.steps if found.steps is None else found.steps))
        if self.rank in ranks:
            self.weights.write_(self.weights.all, self.weights.shared)
        assert self._made is not None
        self.report, self._open = replace(self._made, finite=False, restored=ranks), None

    def settle(self) -> Program[bool]:
        """Handle now what the next round would find out; returns whether this worker's weights were restored."""
        if (steps := self.failed_after) is None:
            return False
        self._unread = None
        self._handle((yield from say_where(self.weights, self._step(1.0), steps)))
        return self.report is not None and self.rank in self.report.restored

    @property
    def failed_after(self) -> int | None:
        """After which step the last round failed, if only the next one would report it."""
        unread = self._unread
        return None if unread is None or unread.known()[0] else unread.steps

    def full_report(self) -> ShareReport | None:
        """The report of the last round that was applied. On a device the host waits for it."""
        if self._open is not None and self.report is not None:
            finite, spread = self._open.known()
            self.report, self._open = replace(self.report, finite=finite, spread=spread), None
        return self.report

    def average(self) -> Program[None]:
        """Average all weights over all workers; they are then the agreed ones."""
        yield from average_(self.weights.pieces, self.world_size)
        self.weights.agree_()

    def _norm(self) -> float | None:
        if not self.measure:
            return None
        return vector_norm(self.weights.drift(self.weights.all, self.weights.read(self.weights.all)))

    def _make_report(
        self, step: Step, found: Agreed | NotFinite, threshold: float | None, clock: Clock
    ) -> ShareReport:
        nothing = Sent(torch.empty(0, dtype=torch.int64), torch.empty(0), [0] * self.world_size, False)
        sent = Sent(None, found.mean, found.counts, True) if isinstance(found, Agreed) else nothing
        return ShareReport.of(
            replace(step, index=self.steps),
            sent,
            clock,
            threshold=threshold,
            round=self.rounds,
            spread=found.spread if isinstance(found, Agreed) else None,
            why=self.schedule.why if isinstance(self.schedule, AutoDensity) else "",
        )

    def _step(self, density: float) -> Step:
        n, k, wire = self.weights.n, elements(density, self.weights.n), VALUES[self.values]
        return Step(self.rounds, n, k, self.rank, self.world_size, wire, sizes=self.weights.sizes)

    def _fresh(self) -> State:
        """The sparsifier's state before the first round."""
        k = elements(self.schedule.target, self.weights.n)
        fresh: State = self.sparsifier.init(Shape(self.weights.n, k, self.weights.sizes, self.world_size))
        return fresh

    def _settings(self, step: Step) -> dict[str, Any]:
        return {
            "gradsieve": __version__,
            **options_by_name(self.sparsifier),
            "density": self.schedule.at(self.steps),
            **{name: getattr(self, name) for name in ("every", "dense_steps", "values", "steps", "rounds")},
            "rounds are read": "by the next one" if self.late else "at once",
            "judge": JUDGES[self.second is not None],
            "n": step.n,
            **self.labels,
            "the sparsifier's state": self.state.fingerprint(),
        }

    def move(self, rank: int, world_size: int, known: Mapping[str, Any]) -> None:
        """Continue as a replica of another group, with the state `known` there: see `regrouping.py`."""
        self.rank, self.world_size, self._agreed = rank, world_size, False
        self._unread = None
        self.steps, self.rounds = known["steps"], known["rounds"]
        self.state = self._fresh().restored(self.state.with_shared(known["state"]).to_dict(), resized=True)

    def state_dict(self) -> dict[str, Any]:
        """This worker's whole state: plain numbers, strings, lists and tensors."""
        return {
            "version": STATE_VERSION,
            "sparsifier": name_of(self.sparsifier),
            "options": self.sparsifier.options(),
            "rank": self.rank,
            "world_size": self.world_size,
            "n": self.weights.n,
            "step": self.steps,
            "rounds": self.rounds,
            "weights": self.weights.read(self.weights.all),
            "shared": self.weights.shared.clone(),
            "state": self.state.to_dict(),
            "auto": self.schedule.state_dict() if isinstance(self.schedule, AutoDensity) else {},
            "unread": self._unread.state_dict() if self._unread else {},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, resized: bool = False) -> None:
        """Go on where `state_dict()` was taken: same sparsifier, options, rank, world size and parameters.

        resized: the state comes from another world size; what depends on that starts afresh.
        """
        state, own = dict(state_dict), self.state_dict()
        check_identity("replica", state, own, "n")
        for name in ("weights", "shared"):
            if not isinstance(state[name], Tensor) or state[name].shape != own[name].shape:
                raise BadInput(f"{name} must be a vector of {self.weights.n} elements, got {state[name]!r}")
        steps, rounds = at_least("step", state["step"], 0), at_least("rounds", state["rounds"], 0)
        unread = Unread.restored({} if resized else state["unread"], self.weights.shared.device)
        restored = self._fresh().restored(state["state"], resized=resized)
        if isinstance(self.schedule, AutoDensity) and state["auto"]:
            self.schedule.load_state_dict(state["auto"])
        self.state = self._prior = restored
        self.weights.write_(self.weights.all, state["weights"])
        self.weights.shared.copy_(state["shared"])
        self.steps, self.rounds, self._agreed = steps, rounds, False
        self._unread = unread

    def made_state(self, found: Agreed | NotFinite | None) -> dict[str, Any]:
        """A round that ran but was not applied, with its report, for a checkpoint."""
        if not isinstance(found, Agreed) or self._made is None:
            return {}
        return {**found.state_dict(), "report": asdict(self._made)}

    def load_made_state(self, state: Mapping[str, Any]) -> Agreed | None:
        """Restore the round that `made_state` returned."""
        if not state:
            return None
        found = Agreed.restored(state, self.weights.all, self.weights.shared.device)
        self._made = ShareReport.of_checkpoint(state["report"])
        return found

    def agreed(self) -> AbstractContextManager[None]:
        """A context in which the parameters hold the agreed weights; with one worker, its own."""
        return nullcontext() if self.world_size == 1 else self.weights.agreed()
