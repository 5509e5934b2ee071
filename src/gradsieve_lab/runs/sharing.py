"""The exchange of weights between replicas after their optimizer steps."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
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
from gradsieve.worlds.streams import SideStream
from gradsieve_lab.runs.config import Config
from gradsieve_lab.runs.learner import Learner
from gradsieve_lab.runs.methods import ALONE, AVERAGE, SHARE
from gradsieve_lab.runs.step_record import Stepped, all_at_once, from_report


class Sharing(Protocol):
    """A way to share weights, made from the replicas of this process, one or all, and the world of all workers."""

    needs_all: ClassVar[bool]  # False: replicas are independent, worker 0 alone gives the metric

    def __init__(self, replicas: Sequence[Learner], world: World, settings: Config) -> None: ...

    def before_update(self) -> None:
        """Called once all replicas here have their gradients, before their optimizers use them."""

    def after_step(self, step: int) -> list[Stepped]:
        """Called once all replicas here have taken optimizer step `step`; returns what each of them sent."""

    def evaluated(self) -> AbstractContextManager[None]:
        """A context in which the models hold the weights to evaluate. Every process must enter it."""

    def state_dicts(self) -> list[dict[str, Any]]:
        """The state of each replica here, without its model and optimizer."""

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Load what `state_dicts` returned."""


class Alone:
    """Sends nothing, and has no state."""

    needs_all: ClassVar[bool] = False

    def __init__(self, replicas: Sequence[Learner], world: World, settings: Config) -> None:
        self.replicas = replicas

    def before_update(self) -> None:
        pass

    def after_step(self, step: int) -> list[Stepped]:
        return [all_at_once(0) for _ in self.replicas]

    def evaluated(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dicts(self) -> list[dict[str, Any]]:
        return [{} for _ in self.replicas]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        pass


class Average(Alone):
    """Averages all weights and running statistics once every `every` steps, and after the last one."""

    needs_all: ClassVar[bool] = True

    def __init__(self, replicas: Sequence[Learner], world: World, settings: Config) -> None:
        super().__init__(replicas, world, settings)
        self.world, self.every, self.steps = world, settings.options["every"], settings.steps

    def after_step(self, step: int) -> list[Stepped]:
        done = step + 1
        if done % self.every and done != self.steps:
            return super().after_step(step)
        meter, started = Meter(self.world), time.perf_counter()
        meter.run([average_(state_tensors(replica.model), self.world.size) for replica in self.replicas])
        seconds = (time.perf_counter() - started) / len(self.replicas)
        n = sum(parameter.numel() for parameter in self.replicas[0].model.parameters())
        return [
            all_at_once(
                n,
                collectives=sent.calls,
                ring_bytes=sent.ring_bytes,
                select_s=max(0.0, seconds - sent.seconds),
                communicate_s=sent.seconds,
            )
            for sent in (ledger.total for ledger in meter.ledgers)
        ]


class Share(Alone):
    """Averages the weights that drifted farthest; and everything after the last step, unless `finish` is 0."""

    needs_all: ClassVar[bool] = True

    def __init__(self, replicas: Sequence[Learner], world: World, settings: Config) -> None:
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
        shared, background = world, None
        if delay and isinstance(world, ProcessGroupWorld):
            shared, background = (
                world.again(),
                Background[list[Outcome]]("gradsieve-share", SideStream(torch.device("cpu"))),
            )
        self.driver = Driver(self.workers, shared, delay, background)

    def before_update(self) -> None:
        self.driver.wait()
        self._meter, self._dense = Meter(self.world), self.workers[0].dense
        if self._dense:
            parameters = [list(replica.model.parameters()) for replica in self.replicas]
            self._meter.run([average_gradients_(each) for each in parameters])

    def after_step(self, step: int) -> list[Stepped]:
        if self._dense:
            for worker in self.workers:
                worker.weights.agree_()
        applied = self.driver.after_step()
        if step + 1 == self.steps and self.finish:
            self.driver.flush()
            self._meter.run([average_(state_tensors(replica.model), self.world.size) for replica in self.replicas])
            for worker in self.workers:
                worker.weights.agree_()
        return [self._stepped(number, applied) for number in range(len(self.workers))]

    def _stepped(self, number: int, applied: bool) -> Stepped:
        """What one worker sent: the round that was applied, and averages of everything."""
        report = self.workers[number].report
        found = from_report(report) if applied and report is not None else all_at_once(0)
        if not self._meter.ledgers:
            return found
        whole, n = self._meter.ledgers[number].total, self.workers[number].weights.n
        calls = found.exchange.collectives + whole.calls
        exchange = replace(found.exchange, density=1.0, k=n, union=n, selected=n, collectives=calls)
        return replace(found, exchange=exchange).with_measured(
            bytes=found.measured.bytes + whole.ring_bytes,
            communicate_s=found.measured.communicate_s + whole.seconds,
        )

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Evaluate the agreed weights, which a user has without sending more."""
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
