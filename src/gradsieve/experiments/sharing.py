"""What replicas do with each other's weights after their optimizer steps."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from gradsieve.experiments.facts import Facts, full_facts
from gradsieve.experiments.replica import Replica
from gradsieve.experiments.settings import Settings
from gradsieve.share.average import average_
from gradsieve.worlds import Meter, World


class Sharing(Protocol):
    """Made from the replicas of this process, one or all, and the world that joins them with the others."""

    needs_all: ClassVar[bool]  # False: a replica never hears of the others, worker 0 alone gives the metric

    def __init__(self, replicas: Sequence[Replica], world: World, settings: Settings) -> None: ...

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

    def __init__(self, replicas: Sequence[Replica], world: World, settings: Settings) -> None:
        self.replicas = replicas

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

    def __init__(self, replicas: Sequence[Replica], world: World, settings: Settings) -> None:
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


def state_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return [*model.parameters(), *model.buffers()]


SHARINGS: dict[str, type[Sharing]] = {"alone": Alone, "average": Average}
