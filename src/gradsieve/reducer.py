"""The reducer: one worker's residual and step counter, and the way of a gradient through a step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve._check import BadInput, BadType, at_least, fraction, one_of
from gradsieve._version import __version__
from gradsieve.collectives import Ledger, Program, watched
from gradsieve.exchange import Exchanged
from gradsieve.handshake import handshake
from gradsieve.schedules import Schedule, as_density
from gradsieve.sparsifiers import SPARSIFIERS, Sparsifier, Step
from gradsieve.sparsifiers.base import vector_norm
from gradsieve.sparsifiers.dense import Dense
from gradsieve.steps import Clock, StepReport
from gradsieve.wire import VALUES

STATE_VERSION = 3  # as that of checkpoints
_FLOAT32 = 4


class SparseReducer:
    """Turns the workers' gradients into one sparse mean, and keeps what was not sent for later steps.

    Args:
        sparsifier: a `Sparsifier` object; each reducer needs its own.
        density: the fraction of the gradient that all workers together send per step, in (0, 1], or a function of
            the step. At 1, and for vectors so short that k = n, every sparsifier sends the full gradient.
        rank, world_size: which worker this is, and how many there are.
        dense_steps: number of initial steps that send the full gradient.
        sizes: the sizes of the tensors that the vector is made of, for sparsifiers that care (deft); by default
            one tensor.
        measure: whether reports contain the residual's norm, which costs one more pass over it.
        values: how values travel: "fp32", or "bf16" or "fp8", half and a quarter as long; what rounding leaves out
            stays in the residual.
        labels: what else must be the same on all workers, by name; compared before the first step.

    >>> from gradsieve import VirtualWorld, make_sparsifier
    >>> world = VirtualWorld(2)
    >>> reducers = [SparseReducer(make_sparsifier("topk"), 0.25, rank=r, world_size=2) for r in range(2)]
    >>> grads = [torch.tensor([4.0, 1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, -6.0, 1.0])]
    >>> world.run([reducer.reduce(grad) for reducer, grad in zip(reducers, grads)])[0]
    tensor([ 2.,  0., -3.,  0.])
    >>> reducers[0].residual
    tensor([0., 1., 0., 1.])
    """

    def __init__(
        self,
        sparsifier: Sparsifier,
        density: float | Schedule = 1e-3,
        *,
        rank: int,
        world_size: int,
        dense_steps: int = 0,
        sizes: Sequence[int] | None = None,
        measure: bool = True,
        values: str = "fp32",
        labels: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(sparsifier, Sparsifier):
            raise BadType(f"sparsifier must be a Sparsifier (see make_sparsifier), got {sparsifier!r}")
        if getattr(sparsifier, "_taken", False):
            raise BadInput("sparsifier must belong to one reducer only, got one that is in use: make another")
        self._density = as_density(density, dense_steps)
        at_least("world_size", world_size, 1)
        if not 0 <= at_least("rank", rank, 0) < world_size:
            raise BadInput(f"rank must be below world_size {world_size}, got {rank}")
        sparsifier._taken = True  # type: ignore[attr-defined]
        self.sparsifier = sparsifier
        self.rank, self.world_size, self.measure = rank, world_size, measure
        self.sizes = None if sizes is None else list(sizes)
        self.values = one_of("values", values, VALUES)
        self.labels = dict(labels or {})
        self.step = 0
        self.ledger = Ledger()
        self._residual: Tensor | None = None
        self._dtype = ""
        self._pieces: list[_Piece] = []
        self._agreed = False
        self._report: StepReport | None = None
        self._everything = Dense()

    @property
    def density(self) -> float:
        """Of the next step."""
        return self._density(self.step)

    def set_density(self, density: float | Schedule, dense_steps: int = 0) -> None:
        """Another density, or another function of the step, from the next step on."""
        changed = as_density(density, dense_steps)
        changed(self.step)
        self._density = changed

    @property
    def residual(self) -> Tensor:
        """What was not sent yet: one flat float32 vector, this reducer's own."""
        if self._residual is None:
            raise RuntimeError("residual does not exist before the first step")
        return self._residual

    def reduce(self, grad: Tensor, out: Tensor | None = None) -> Program[Tensor]:
        """One step of this worker, as a program: hand it to a world, whose `run` returns the update.

        The update, the mean over workers of what was sent and zero elsewhere, is written to `out`, which may be
        `grad` itself (then no memory is needed beyond residual and gradient); by default to a new tensor. If any
        worker's gradient is not finite, the update is NaN on all of them and all else stays as it was.
        """
        out = self._check(grad, out)
        return self._reduce(grad.detach(), out)

    def _reduce(self, grad: Tensor, out: Tensor) -> Program[Tensor]:
        self._dtype = str(grad.dtype)
        self.open(len(grad), grad.device)
        before = out if out.element_size() >= _FLOAT32 else torch.empty_like(self.residual)
        self.add(grad, 0, before)
        yield from self.finish(lambda sent: _write_(out, sent))
        return out

    def open(self, n: int, device: torch.device) -> None:
        """Make room for vectors of n elements, unless that was done before."""
        if self._residual is None:
            self._allocate(n, device)

    def add(self, grad: Tensor, start: int, before: Tensor, *, hold_back: bool = False) -> None:
        """One piece of a step's gradient: `residual[start:][:len(grad)] += grad`.

        `before` receives the residual as it was, and must stay until `finish` writes; it may be `grad` itself.
        `hold_back` says that the gradient is zero and nothing of this piece may be sent: its residual waits, and
        whatever else the sparsifier keeps for it. What is added is the gradient as the sparsifier's `fold` has it.
        """
        if not self._pieces:
            self.ledger, self._finite = Ledger(), torch.tensor(True, device=grad.device)
            self._clock = Clock(self.ledger)
            self._now = self._step(self.density)
            self._window = self._acting(self._now).window(self._now)
        self._clock.skip()
        stop = start + len(grad)
        threshold, first, last = self._window
        if hold_back:
            first = last = start
        inside = (min(max(edge - start, 0), len(grad)) for edge in (first, last))
        piece, added = self.residual[start:stop], grad if hold_back else self.sparsifier.fold(grad, start)
        hits = ops.accumulate_select_(piece, added, threshold, *inside, backup=before, finite=self._finite)
        hits = hits + start if start else hits
        self._pieces.append(_Piece(start, stop, before, before._version, hold_back, hits))
        self._clock.lap("accumulate")

    def finish(self, write: Callable[[Exchanged], None]) -> Program[Exchanged]:
        """The rest of a step, once all pieces were added; `write` puts the update where it belongs."""
        return watched(self._finish(write), self.ledger, self.world_size)

    def _finish(self, write: Callable[[Exchanged], None]) -> Program[Exchanged]:
        pieces, self._pieces = sorted(self._pieces, key=lambda piece: piece.start), []
        step, clock, acc = self._now, self._clock, self.residual
        sparsifier = self._acting(step)
        committed = False
        try:
            if not self._agreed:
                yield from handshake(self.rank, self.world_size, self._settings())
                self._agreed = True
                clock.skip()
            healthy, pulse = bool(self._finite), acc.new_zeros(1, dtype=VALUES[self.values])
            if not healthy:
                # No algorithm ever sees a value that is not finite: this worker takes part with its old residual
                # and tells the others through the pulse.
                _restore_(acc, pieces)
                pulse.fill_(math.nan)
            held_back = [(acc[p.start : p.stop], acc[p.start : p.stop].clone()) for p in pieces if p.hold_back]
            for part, _ in held_back:
                part.zero_()
            hits = torch.cat([p.hits for p in pieces]) if healthy else ops.select_above(acc, *self._window)
            picked = yield from sparsifier.select(acc, hits, step)
            clock.lap("select")
            sent = yield from sparsifier.exchange(acc, picked, pulse, step)
            threshold = sparsifier.threshold_in_use if sent.finite else None
            if sent.finite:
                for piece in pieces:
                    sparsifier.settle_(acc[piece.start : piece.stop], piece.before)
                self.sparsifier.commit(sent, [(p.start, p.stop) for p in pieces if p.hold_back])
            else:
                _restore_(acc, pieces)
            committed = True
            try:
                write(sent)
            finally:  # also if it fails: others have completed the step, and nothing that was kept may be lost
                if sent.finite:
                    if sent.indices is None:
                        acc.zero_()  # the dense exchange leaves its mean there
                    for part, kept in held_back:
                        part.copy_(kept)
                    sparsifier.observe(sent, step)
                    self.step += 1
        finally:
            if not committed:  # a worker failed, or the world gave up: as if the step had not begun
                _restore_(acc, pieces)
        clock.lap("write")
        self._report = self._make_report(step, threshold, sent, clock)
        return sent

    def abandon(self) -> None:
        """Take back the pieces that were added, if the step cannot be finished.

        Where their `before` was written to since, what was added stays in the residual: nothing is lost.
        """
        _restore_(self.residual, [piece for piece in self._pieces if piece.before._version == piece.version])
        self._pieces = []

    def _acting(self, step: Step) -> Sparsifier:
        return self.sparsifier if step.k < step.n else self._everything

    def rescale(self, factor: float) -> None:
        """Gradients will come multiplied by `factor` from now on (a loss scale changed): so is what is kept."""
        if self._residual is not None:
            self._residual.mul_(factor)
            self.sparsifier.rescale(factor)

    def end_step(self) -> StepReport:
        """The report of the step that was just run."""
        if self._report is None:
            raise RuntimeError("end_step() needs a finished reduce() before it")
        report, self._report = self._report, None
        return report

    def _make_report(self, step: Step, threshold: float | None, sent: Exchanged, clock: Clock) -> StepReport:
        total = self.ledger.total
        norm = vector_norm(self.residual) if self.measure else None
        clock.lap("measure")
        return StepReport(
            step=step.index,
            n=step.n,
            k=step.k,
            finite=sent.finite,
            counts=sent.counts,
            union=sent.union,
            threshold=threshold,
            residual_norm=norm,
            bytes_sent=total.handed_bytes,
            ring_bytes=total.ring_bytes,
            collectives=total.calls,
            seconds={**clock.seconds, "communicate": total.seconds},
        )

    def state_dict(self) -> dict[str, Any]:
        """This worker's whole state: plain numbers, strings, lists and tensors."""
        return {
            "version": STATE_VERSION,
            "sparsifier": name_of(self.sparsifier),
            "options": self.sparsifier.lasting_options(),
            "density": self.density,
            "rank": self.rank,
            "world_size": self.world_size,
            "n": 0 if self._residual is None else len(self._residual),
            "step": self.step,
            "residual": torch.empty(0) if self._residual is None else self._residual.clone(),
            "state": {} if self._residual is None else self.sparsifier.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict()` was taken: same sparsifier, options, rank, world size and vector."""
        state = dict(state_dict)
        own = self.state_dict()
        if set(state) != set(own):
            raise BadInput(f"state must have the keys {sorted(own)}, got {sorted(state)}")
        for name in ("version", "sparsifier", "options", "rank", "world_size"):
            if state[name] != own[name]:
                raise BadInput(f"state must have this reducer's {name}, {own[name]}, got {state[name]}")
        if self._residual is not None and state["n"] != own["n"]:
            raise BadInput(f"state must have this reducer's n, {own['n']}, got {state['n']}")
        residual, n = state["residual"], at_least("n", state["n"], 0)
        if not isinstance(residual, Tensor) or residual.dtype != torch.float32 or residual.shape != (n,):
            raise BadInput(f"residual must be a float32 vector of {n} elements, got {residual!r}")
        fraction("density", state["density"])
        step = at_least("step", state["step"], 0)
        if n:
            self._load(residual, state["state"])
        self.step, self._agreed = step, False

    def _load(self, residual: Tensor, sparsifier_state: dict[str, Any]) -> None:
        fresh = self._residual is None
        if fresh:
            self._allocate(len(residual), residual.device)
        try:
            self.sparsifier.load_state_dict(sparsifier_state)
        except ValueError:
            if fresh:
                self._residual = None
            raise
        self.residual.copy_(residual)

    def _check(self, grad: Tensor, out: Tensor | None) -> Tensor:
        if not isinstance(grad, Tensor) or grad.dtype not in ops.GRAD_DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in ops.GRAD_DTYPES)
            raise BadType(f"grad must be a tensor of one of {known}, got {_kind(grad)}")
        if grad.dim() != 1 or not grad.is_contiguous() or len(grad) == 0:
            raise BadInput(
                f"grad must be a contiguous vector with an element at least, got shape {tuple(grad.shape)}"
            )
        if self._residual is not None and len(grad) != len(self._residual):
            raise BadInput(f"grad must have n = {len(self._residual)} elements as before, got {len(grad)}")
        if self._dtype and str(grad.dtype) != self._dtype:
            raise BadType(f"grad must stay {self._dtype.removeprefix('torch.')}, got {_kind(grad)}")
        if self.sizes is not None and sum(self.sizes) != len(grad):
            raise BadInput(f"sizes must add up to n = {len(grad)}, got {sum(self.sizes)}")
        if out is None:
            return torch.empty_like(grad)
        if out.shape != grad.shape or out.dtype != grad.dtype or not out.is_contiguous():
            raise BadInput(
                f"out must be a contiguous {_kind(grad)} vector of {len(grad)}, got {_kind(out)} {tuple(out.shape)}"
            )
        return out.detach()

    def _allocate(self, n: int, device: torch.device) -> None:
        self._residual = torch.zeros(n, device=device)
        self.sparsifier.setup(self._step(self._density.target), self.sizes or [n])

    def _step(self, density: float) -> Step:
        n = len(self.residual)
        return Step(self.step, n, min(n, max(1, round(density * n))), self.rank, self.world_size)

    def _settings(self) -> dict[str, Any]:
        return {
            "gradsieve": __version__,
            "sparsifier": name_of(self.sparsifier),
            **{f"{name_of(self.sparsifier)}.{name}": value for name, value in self.sparsifier.options().items()},
            "density": self.density,
            "values": self.values,
            "n": len(self.residual),
            **self.labels,
            "dtype": self._dtype,
            "sizes": self.sizes,
            "step": self.step,
            "the sparsifier's state": self.sparsifier.fingerprint(),
        }


@dataclass(frozen=True)
class _Piece:
    """A part of the gradient that was added to the residual in this step."""

    start: int
    stop: int
    before: Tensor
    version: int  # torch's count of writes to `before`, after this one
    hold_back: bool
    hits: Tensor


def _restore_(residual: Tensor, pieces: Sequence[_Piece]) -> None:
    for piece in pieces:
        residual[piece.start : piece.stop] = piece.before


def _write_(out: Tensor, sent: Exchanged) -> None:
    if not sent.finite:
        out.fill_(math.nan)
    elif sent.indices is None:
        out.copy_(sent.values)
    else:
        ops.scatter_update_(out, sent.indices, sent.values)


def name_of(sparsifier: Sparsifier) -> str:
    """Its name in `SPARSIFIERS`, or that of its class."""
    names = (name for name, known in SPARSIFIERS.items() if type(sparsifier) is known)
    return next(names, type(sparsifier).__name__)


def _kind(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else repr(x)
