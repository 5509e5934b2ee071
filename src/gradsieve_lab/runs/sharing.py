"""What replicas do with each other's weights after their optimizer steps."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from gradsieve.density import as_density
from gradsieve.share.average import average_
from gradsieve.share.background import Background
from gradsieve.share.driver import Driver, Outcome
from gradsieve.share.gradients import average_gradients_
from gradsieve.share.parameters import second_moments, shared_parameters
from gradsieve.share.replica import Replica
from gradsieve.sparsifiers import make_sparsifier
from gradsieve.worlds import Meter, ProcessGroupWorld, World
from gradsieve_lab.runs.facts import Facts, facts_of, full_facts
from gradsieve_lab.runs.learner import Learner
from gradsieve_lab.runs.methods import ALONE, AVERAGE, SHARE
from gradsieve_lab.runs.settings import Settings


class Sharing(Protocol):
    """Made from the replicas of this process, one or all, and the world that joins them with the others."""

    needs_all: ClassVar[bool]  # False: a replica never hears of the others, worker 0 alone gives the metric

    def __init__(self, replicas: Sequence[Learner], world: World, settings: Settings) -> None: ...

    def before_update(self) -> None:
        """Called once all replicas here have their gradients, before their optimizers use them."""

    def after_step(self, step: int) -> list[Facts]:
        """Called once all replicas here have taken optimizer step `step`; returns what each of them sent."""

    def evaluated(self) -> AbstractContextManager[None]:
        """While inside, the models hold the weights that are evaluated. Every process enters."""

    def state_dicts(self) -> list[dict[str, Any]]:
        """What each replica here keeps beside its weights and its optimizer."""

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from there."""


class Alone:
    """Nothing is sent, and nothing kept."""

    needs_all: ClassVar[bool] = False

    def __init__(self, replicas: Sequence[Learner], world: World, settings: Settings) -> None:
        self.replicas = replicas

    def before_update(self) -> None:
        pass

    def after_step(self, step: int) -> list[Facts]:
        return [full_facts(0) for _ in self.replicas]

    def evaluated(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dicts(self) -> list[dict[str, Any]]:
        return [{} for _ in self.replicas]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        pass


class Average(Alone):
    """All weights and running statistics averaged every so many steps, and after the last one."""

    needs_all: ClassVar[bool] = True

    def __init__(self, replicas: Sequence[Learner], world: World, settings: Settings) -> None:
        super().__init__(replicas, world, settings)
        self.world, self.every, self.steps = world, settings.options["every"], settings.steps

    def after_step(self, step: int) -> list[Facts]:
        done = step + 1
        if done % self.every and done != self.steps:
            return super().after_step(step)
        meter, started = Meter(self.world), time.perf_counter()
        meter.run([average_(state_tensors(replica.model), self.world.size) for replica in self.replicas])
        seconds = (time.perf_counter() - started) / len(self.replicas)
        n = sum(parameter.numel() for parameter in self.replicas[0].model.parameters())
        return [
            full_facts(
                n,
                collectives=sent.calls,
                ring_bytes=sent.ring_bytes,
                select=max(0.0, seconds - sent.seconds),
                communicate=sent.seconds,
            )
            for sent in (ledger.total for ledger in meter.ledgers)
        ]


class Share(Alone):
    """The weights that drifted farthest are averaged; and everything after the last step, unless `finish` is 0."""

    needs_all: ClassVar[bool] = True

    def __init__(self, replicas: Sequence[Learner], world: World, settings: Settings) -> None:
        super().__init__(replicas, world, settings)
        options, self.world, self.steps = dict(settings.options), world, settings.steps
        delay, name = options.pop("delay"), options.pop("sparsifier")
        every, judge, self.finish = options.pop("every"), options.pop("judge"), options.pop("finish")
        del options["noise"]  # the optimizer's
        first = world.rank if isinstance(world, ProcessGroupWorld) else 0
        self.workers = []
        for rank, replica in enumerate(replicas, first):
            sparsifier = make_sparsifier(name, **options)
            self.workers.append(
                Replica(
                    shared_parameters(replica.model, [replica.optimizer]),
                    sparsifier,
                    as_density(settings.density),
                    rank=rank,
                    world_size=world.size,
                    every=every,
                    dense_steps=settings.dense_steps,
                    values=settings.values,
                    measure=True,
                    second=second_moments([replica.optimizer], judge, sparsifier),
                )
            )
        beside, background = world, None
        if delay and isinstance(world, ProcessGroupWorld):
            beside, background = world.again(), Background[list[Outcome]]("gradsieve-share")
        self.driver = Driver(self.workers, beside, delay, background)

    def before_update(self) -> None:
        self.driver.wait()
        self._meter, self._dense = Meter(self.world), self.workers[0].dense
        if self._dense:
            parameters = [list(replica.model.parameters()) for replica in self.replicas]
            self._meter.run([average_gradients_(each) for each in parameters])

    def after_step(self, step: int) -> list[Facts]:
        if self._dense:
            for worker in self.workers:
                worker.weights.agree_()
        applied = self.driver.after_step()
        if step + 1 == self.steps and self.finish:
            self.driver.flush()
            self._meter.run([average_(state_tensors(replica.model), self.world.size) for replica in self.replicas])
            for worker in self.workers:
                worker.weights.agree_()
        return [self._facts(number, applied) for number in range(len(self.workers))]

    def _facts(self, number: int, applied: bool) -> Facts:
        """What one worker sent: the round that was applied, and what was sent as a whole."""
        report = self.workers[number].report
        found = facts_of(report) if applied and report is not None else full_facts(0)
        if self._meter.ledgers:
            whole, n = self._meter.ledgers[number].total, self.workers[number].weights.n
            full = full_facts(n, collectives=whole.calls, ring_bytes=whole.ring_bytes, communicate=whole.seconds)
            found.shared |= {name: full.shared[name] for name in ("density", "k", "union", "selected")}
            found.shared["collectives"] += whole.calls
            for name in ("bytes", "communicate"):
                found.own[name] += full.own[name]
        return found

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """The agreed weights: what a user has without sending more."""
        with ExitStack() as stack:
            self.driver.wait()
            for worker in self.workers:
                stack.enter_context(worker.agreed())
            yield

    def state_dicts(self) -> list[dict[str, Any]]:
        pending: Sequence[Outcome | None] = self.driver.pending or [None] * len(self.workers)
        return [
            {**worker.state_dict(), "pending": worker.made_state(found)}
            for worker, found in zip(self.workers, pending, strict=True)
        ]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        pending: list[Outcome] = []
        for worker, state in zip(self.workers, states, strict=True):
            kept = dict(state)
            made = kept.pop("pending")
            worker.load_state_dict(kept)
            found = worker.load_made_state(made)
            pending += [] if found is None else [found]
        self.driver.pending = pending or None


def state_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return [*model.parameters(), *model.buffers()]


SHARINGS: dict[str, type[Sharing]] = {ALONE: Alone, AVERAGE: Average, SHARE: Share}
