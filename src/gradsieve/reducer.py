"""The reducer: one worker's residual and step counter, and the path of a gradient through a step.

begin() -> add(piece)* -> finish() -> Sent
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve._check import at_least, check_rank, dict_of, number, one_of, sizes_of
from gradsieve._version import __version__
from gradsieve.arena import Arena
from gradsieve.comm.collectives import Program
from gradsieve.comm.step import Sent, Step
from gradsieve.comm.traffic import Ledger, metered
from gradsieve.comm.wire import VALUES
from gradsieve.density import Density, Schedule, as_density
from gradsieve.density.base import elements
from gradsieve.feedback import Feedback, Plain
from gradsieve.feedback.plain import Folding
from gradsieve.gradients import check_grad, checked_out, checked_residual, largest_update, write_
from gradsieve.method import Method
from gradsieve.reports import Clock, StepReport
from gradsieve.sparsifiers import Sparsifier, Window
from gradsieve.sparsifiers.base import vector_norm
from gradsieve.state.handshake import handshake, same_count
from gradsieve.states import State, States, check_identity

STATE_VERSION = 4  # of state dicts, and of the checkpoints that contain them


@dataclass(frozen=True)
class _UnderWay:
    """A step between `begin` and `finish`."""

    step: Step
    sparsifier: Sparsifier[Any]
    window: Window
    folding: Folding
    clock: Clock


class SparseReducer:
    """Turns the workers' gradients into one sparse mean, and keeps what was not sent for later steps.

    Args:
        sparsifier: a `Sparsifier` object.
        density: the fraction of the gradient that all workers together send per step, in (0, 1]; a function of the
            step; or a `Budget`. At 1, and for vectors so short that k = n, everything is sent.
        rank: which worker this is.
        world_size: how many there are.
        dense_steps: number of initial steps that send the full gradient.
        sizes: of the tensors that the vector is made of, which deft uses; by default one tensor.
        measure: whether reports contain the residual's norm, which costs one more pass over it.
        values: how values travel: "fp32", or "bf16" or "fp8" with a half and a quarter of the bytes; what rounding
            leaves out stays in the residual.
        feedback: what gradients add to the residual: `Plain()`, `Momentum(...)` or `LowPass(...)`; by default that
            of the sparsifier's paper.
        labels: other settings that must be the same on all workers, by name; compared before the first step.

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
        sparsifier: Sparsifier[Any],
        density: float | Schedule | Density = 1e-3,
        *,
        rank: int,
        world_size: int,
        dense_steps: int = 0,
        sizes: Sequence[int] | None = None,
        measure: bool = True,
        values: str = "fp32",
        feedback: Feedback | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        if feedback is None:
            feedback = sparsifier.feedback() if isinstance(sparsifier, Sparsifier) else Plain()
        self.method = Method(sparsifier, as_density(density, dense_steps), feedback)
        check_rank(rank, world_size)
        self.rank, self.world_size, self.measure = rank, world_size, measure
        self.sizes = None if sizes is None else sizes_of("sizes", sizes)
        self.values, self.labels = one_of("values", values, VALUES), dict_of("labels", labels)
        self.step, self.ledger = 0, Ledger()
        self.report: StepReport | None = None  # of the last step
        self.last_sent: Tensor | None = None  # positions of the last step; None: all
        self._arena: Arena | None = None
        self._states = States(State(), State(), State())
        self._under_way: _UnderWay | None = None
        self._dtype, self._agreed = "", False

    @property
    def density(self) -> float:
        """The density of the next step; of a budget, its mean."""
        return self.method.density.at(self.step)

    def set_density(self, density: float | Schedule | Density, dense_steps: int = 0) -> None:
        """Change the density from the next step on. A budget keeps count of what was spent so far."""
        method = replace(self.method, density=as_density(density, dense_steps))
        method.density.at(self.step)
        before, fresh = self._states.density, method.density.init()
        if self._arena is not None and type(fresh) is not type(before):
            self._states = replace(self._states, density=fresh)
        self.method, self._agreed = method, False

    @property
    def residual(self) -> Tensor:
        """What was not sent yet: a flat float32 vector, owned by this reducer."""
        if self._arena is None:
            raise RuntimeError("residual does not exist before the first step")
        return self._arena.residual

    @property
    def states(self) -> States:
        """What sparsifier, density and feedback have learned."""
        if self._arena is None:
            raise RuntimeError("states do not exist before the first step")
        return self._states

    def reduce(self, grad: Tensor, out: Tensor | None = None) -> Program[Tensor]:
        """One step of this worker, as a program: hand it to a world, whose `run` returns the update.

        The update, the mean over workers of what was sent and zero elsewhere, is written to `out`, which may be
        `grad` itself; by default to a new tensor. If any worker's gradient is not finite, the update is NaN on all.
        """
        check_grad(grad, None if self._arena is None else len(self.residual), self._dtype, self.sizes)
        return self._reduce(grad.detach(), checked_out(out, grad))

    def _reduce(self, grad: Tensor, out: Tensor) -> Program[Tensor]:
        self._dtype = str(grad.dtype)
        self.open(len(grad), grad.device, largest_update(grad.dtype))
        self.begin()
        self.add(grad, 0, out if out.element_size() >= torch.float32.itemsize else torch.empty_like(self.residual))
        sent = yield from self.finish()
        started = time.perf_counter()
        write_(out, sent)
        self.note_write(time.perf_counter() - started)
        return out

    def open(self, n: int, device: torch.device, limit: float = math.inf) -> None:
        """Allocate the residual for vectors of n elements, unless that was done. Updates stay within the limit."""
        if self._arena is None:
            self._arena = Arena(n, device)
            self._states = self.method.init(n, self.sizes or [n], self.world_size)
        elif self.residual.device != device:  # it was loaded on another one
            self._arena.residual = self.residual.to(device)
        self._arena.limit = min(self._arena.limit, limit)

    def begin(self) -> None:
        """Begin a step; `open` must have been called."""
        assert self._arena is not None
        self.ledger = Ledger()
        self._arena.begin()
        step = self._next_step()
        acting = self.method.acting(step)
        window = acting.window(self.method.state_of(acting, self._states), step)
        folding = self.method.feedback.begin(self._states.feedback, step.sizes, self.world_size)
        self._under_way = _UnderWay(step, acting, window, folding, Clock(self.ledger))

    def add(self, grad: Tensor, start: int, before: Tensor, *, hold_back: bool = False) -> None:
        """Add one piece of the gradient: `residual[start:][:len(grad)] += grad`, or what the feedback makes of it.

        before: receives the residual as it was; must stay untouched until `finish` is done; may be `grad` itself.
        hold_back: the gradient is zero and nothing of this piece may be sent; residual and feedback stay as they
        are.
        """
        assert self._arena is not None
        assert self._under_way is not None
        now = self._under_way
        now.clock.skip()
        if not hold_back:
            now.step.quota.notice(grad)
        added = grad if hold_back else now.folding.add(grad, start)
        self._arena.add(added, start, before, now.window, held_back=hold_back)
        now.clock.lap("accumulate")

    def finish(self) -> Program[Sent]:
        """The exchange, after all pieces were added. Returns what all workers hold then; writes nothing."""
        return metered(self._finish(), self.ledger, self.world_size)

    def _finish(self) -> Program[Sent]:
        assert self._arena is not None
        assert self._under_way is not None
        arena, now, self._under_way, settled = self._arena, self._under_way, None, 0.0
        with arena.exchange() as acc:
            if not self._agreed:
                yield from handshake(self.rank, self.world_size, self._settings())
                self._agreed = True
                settled = self.ledger.by_tag.pop("handshake").ring_bytes
                now.clock.skip()
            yield from same_count(now.step) if self.method.density.from_user else ()
            own = self.method.state_of(now.sparsifier, self._states)
            acting, step = now.sparsifier, replace(now.step, healthy=arena.finite)
            hits = arena.hits(now.window, needed=acting.NEEDS_HITS)
            if acting.NEEDS_FINITE and not ops.read(arena.finite)[0]:
                # This worker takes part with its old residual; the health flag tells the others to skip the step.
                arena.restore()
                hits = ops.select_above(acc, *now.window)
            selection = yield from now.sparsifier.select(own, acc, hits, step)
            now.clock.lap("select")
            sent = yield from now.sparsifier.exchange(acc, selection, step)
            if sent.finite:
                if sent.indices is None:
                    arena.release()  # the mean is in its memory
                for piece in arena.pieces:
                    self.method.feedback.settle_(arena.residual[piece.start : piece.stop], piece.before)
                after = self.method.update(self._states, selection, sent, step, now.folding, arena.held_back)
            else:
                arena.restore()
        if sent.finite:
            self._states, self.step = after, self.step + 1
        now.clock.lap("update")
        norm = vector_norm(self.residual) if self.measure else None
        now.clock.lap("measure")
        self.last_sent, threshold = sent.indices, selection.threshold if sent.finite else None
        known = {"threshold": threshold, "residual_norm": norm, "handshake_bytes": settled}
        self.report = StepReport.of(step, sent, now.clock, **known)
        return sent

    def abandon(self) -> None:
        """Undo the pieces that were added, if the step cannot be finished."""
        self._under_way = None
        if self._arena is not None:
            self._arena.abandon()

    def note_write(self, seconds: float) -> None:
        """Record in the report how many seconds writing the update took."""
        assert self.report is not None
        self.report = replace(self.report, seconds={**self.report.seconds, "write": seconds})

    def rescale(self, factor: float) -> None:
        """Multiply residual and state by `factor`: gradients will be from now on (the loss scale changed)."""
        if self._arena is not None:
            self._arena.residual.mul_(number("factor", factor))
            self._states = self._states.rescaled(factor)

    def move(self, rank: int, world_size: int, step: int, shared: Mapping[str, Any]) -> None:
        """Continue as a worker of another group, with the `shared` state of that group: see `regrouping.py`."""
        check_rank(rank, world_size)
        self.abandon()
        n = len(self.residual)
        known = self.states.with_shared(shared).to_dict()
        self._states = self.method.init(n, self.sizes or [n], world_size).restored(known, resized=True)
        self.rank, self.world_size, self.step, self._agreed = rank, world_size, step, False

    def _next_step(self) -> Step:
        n, wire = len(self.residual), VALUES[self.values]
        asked = self.method.density.quota(self._states.density, self.step, n)
        where = (self.rank, self.world_size, wire)
        return Step(self.step, n, elements(self.density, n), *where, sizes=tuple(self.sizes or (n,)), asked=asked)

    def state_dict(self) -> dict[str, Any]:
        """This worker's whole state: plain numbers, strings, lists and tensors."""
        return {
            "version": STATE_VERSION,
            **self.method.identity(),
            "rank": self.rank,
            "world_size": self.world_size,
            "n": 0 if self._arena is None else len(self.residual),
            "step": self.step,
            "residual": torch.empty(0, dtype=torch.float32) if self._arena is None else self.residual.clone(),
            "state": {} if self._arena is None else self._states.to_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, resized: bool = False) -> None:
        """Restore what `state_dict()` returned: same sparsifier, options, rank, world size and vector.

        resized: the state comes from another world size; what depends on that is reinitialized.
        """
        state, sized = dict_of("state_dict", state_dict), ("n",) if self._arena is not None else ()
        check_identity("reducer", state, self.state_dict(), *sized)
        n, step = at_least("n", state["n"], 0), at_least("step", state["step"], 0)
        residual = checked_residual(state["residual"], n)
        if n:
            fresh = self.method.init(n, self.sizes or [n], self.world_size)
            states = fresh.restored(state["state"], resized=resized)
            self.open(n, residual.device if self._arena is None else self.residual.device)
            self.abandon()
            self._states = states
            self.residual.copy_(residual)
        self.step, self._agreed = step, False

    def _settings(self) -> dict[str, Any]:
        settings = {"gradsieve": __version__, **self.method.settings(self.step), "values": self.values}
        vector = {"n": len(self.residual), **self.labels, "dtype": self._dtype, "sizes": self.sizes}
        return {**settings, **vector, "step": self.step, **self._states.fingerprints()}
