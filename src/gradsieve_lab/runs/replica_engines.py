"""Engines whose workers each train their own replica: one in a process group, or all in this process."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gradsieve.share.broadcast import broadcast_
from gradsieve.state import checkpoint
from gradsieve.state.checkpoint import CheckpointError
from gradsieve.worlds import ProcessGroupWorld, VirtualWorld, World
from gradsieve_lab.runs.bare_state import bare_state
from gradsieve_lab.runs.config import Config
from gradsieve_lab.runs.engines import mean_over, score
from gradsieve_lab.runs.feed import Feed
from gradsieve_lab.runs.learner import Learner
from gradsieve_lab.runs.sharing import SHARINGS, state_tensors
from gradsieve_lab.runs.step_record import Measured, Stepped
from gradsieve_lab.tasks import Data, Task


class _Replicas:
    """The replicas of workers `ranks` in this process; worker 0's is evaluated, on the whole test set."""

    def __init__(
        self, task: Task, data: Data, feeds: list[Feed], settings: Config, ranks: Sequence[int], world: World
    ) -> None:
        self.task, self.data, self.settings, self.ranks, self.world = task, data, settings, ranks, world
        self.leads = ranks[0] == 0
        self.feeds = [feeds[rank] for rank in ranks]
        models = [task.make_model() for _ in ranks]
        if self.leads:
            task.start(models[0])
        world.run([broadcast_(state_tensors(model)) for model in models])
        self.replicas = [Learner(model, settings) for model in models]
        self.sharing = SHARINGS[settings.sparsifier](self.replicas, world, settings)

    @property
    def model(self) -> nn.Module:
        return self.replicas[0].model

    def step(self, step: int, lr: float) -> Stepped:
        """One step of every worker here; returns the mean of their measurements."""
        begun = time.perf_counter()
        passes = [self._learn(*pair, step) for pair in zip(self.replicas, self.feeds, strict=True)]
        self.sharing.before_update()
        updates = [replica.update(lr) for replica in self.replicas]
        each = self.sharing.after_step(step)
        whole = time.perf_counter() - begun
        own = Measured.mean(
            [
                done.with_measured(**learnt, update_s=spent).measured
                for done, learnt, spent in zip(each, passes, updates, strict=True)
            ]
        )
        return Stepped(each[0].exchange, own).with_measured(step_s=whole / len(each) - own.measure_s)

    def _learn(self, replica: Learner, feed: Feed, step: int) -> dict[str, float]:
        replica.optimizer.zero_grad()
        batch = feed.batch(step)
        started = time.perf_counter()
        loss = self.task.loss(replica.model, batch)
        middle = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        return {"loss": loss.item(), "forward_s": middle - started, "backward_s": ended - middle}

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over the processes: here there is only one."""
        return numbers

    def evaluate(self) -> float | None:
        value = None
        with self.sharing.evaluated():
            if self.leads:
                total, count = score(self.task, self.data, self.model, 0, 1)
                value = self.task.value(total / count, self.model)
        self.mean(torch.zeros(1))  # the others wait here, not in a step, which is timed
        return value

    def save(self, folder: Path, done: int) -> None:
        parts = [
            {
                **bare_state(self.settings, rank, self.world.size, done),
                "workers": self.settings.workers,
                "replica": replica.state_dict(),
                "sharing": sharing,
            }
            for rank, replica, sharing in zip(self.ranks, self.replicas, self.sharing.state_dicts(), strict=True)
        ]
        self.world.run([checkpoint.save(folder, part, {}) for part in parts])

    def load(self, folder: Path) -> int:
        owns = [bare_state(self.settings, rank, self.world.size, 0) for rank in self.ranks]
        parts = self.world.run([checkpoint.load(folder, own, {}) for own in owns])
        workers = parts[0]["workers"]
        if workers != self.settings.workers:
            raise CheckpointError(
                f"{folder} holds a replica for each of {workers} workers, got {self.settings.workers} workers: "
                f"go on with --workers {workers}"
            )
        for replica, part in zip(self.replicas, parts, strict=True):
            replica.load_state_dict(part["replica"])
        self.sharing.load_state_dicts([part["sharing"] for part in parts])
        return int(parts[0]["step"])


class ProcessReplica(_Replicas):
    """One worker, in an existing process group, without DDP."""

    def __init__(self, task: Task, data: Data, feeds: list[Feed], settings: Config) -> None:
        world = ProcessGroupWorld(timeout=settings.timeout)
        super().__init__(task, data, feeds, settings, [world.rank], world)

    def mean(self, numbers: Tensor) -> Tensor:
        assert isinstance(self.world, ProcessGroupWorld)
        return mean_over(self.world, numbers)


class VirtualReplicas(_Replicas):
    """All workers, one after the other; or only worker 0 if workers do not affect each other."""

    def __init__(self, task: Task, data: Data, feeds: list[Feed], settings: Config) -> None:
        size = settings.workers if SHARINGS[settings.sparsifier].needs_all else 1
        super().__init__(task, data, feeds, settings, range(size), VirtualWorld(size))

    def step(self, step: int, lr: float) -> Stepped:
        done = super().step(step, lr)
        own = done.measured
        spent = own.forward_s + own.backward_s + own.update_s + own.select_s
        # Nothing was sent: a virtual world's time is not that of a network.
        return done.with_measured(communicate_s=0.0, step_s=spent)
