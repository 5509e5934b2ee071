"""Two engines that run training steps: one worker of a process group, or all workers in this process."""

import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gradsieve.comm.collectives import all_reduce
from gradsieve.state import checkpoint
from gradsieve.virtual import virtual_reducers
from gradsieve.worlds import ProcessGroupWorld, VirtualWorld
from gradsieve_lab.runs.config import Config
from gradsieve_lab.runs.feed import Feed
from gradsieve_lab.runs.hooks import attach
from gradsieve_lab.runs.learner import Learner
from gradsieve_lab.runs.step_record import Measured, Stepped, from_report
from gradsieve_lab.tasks import Data, Task
from gradsieve_lab.tasks.shards import shards

_TEST_BATCH = 256


class Engine(Protocol):
    """Runs training steps of all workers in this process."""

    leads: bool  # whether this process writes records

    @property
    def model(self) -> nn.Module:
        """The model that is evaluated."""

    def step(self, step: int, lr: float) -> Stepped:
        """One whole step of every worker: forward, backward, communication, optimizer."""

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over the processes, on all of them."""

    def evaluate(self) -> float | None:
        """The task's metric; None in processes that do not lead."""

    def save(self, folder: Path, done: int) -> None:
        """Write a checkpoint of all workers after `done` steps."""

    def load(self, folder: Path) -> int:
        """Load a checkpoint; returns how many steps were done."""


class ProcessEngine:
    """One worker, in an existing process group."""

    def __init__(self, task: Task, data: Data, feeds: list[Feed], settings: Config) -> None:
        self.task, self.data = task, data
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.leads = self.rank == 0
        self.world = ProcessGroupWorld(timeout=settings.timeout)
        self.feed = feeds[self.rank]
        self.model = task.make_model()
        if self.leads:
            task.start(self.model)
        self.ddp, self.hook = attach(self.model, settings)
        self.replica = Learner(self.model, settings)

    def step(self, step: int, lr: float) -> Stepped:
        self.replica.optimizer.zero_grad()
        return updated(self.replica, lr, self._gradients(step))

    def _gradients(self, step: int) -> Stepped:
        begun = time.perf_counter()
        batch = self.feed.batch(step)
        started = time.perf_counter()
        loss = self.task.loss(self.ddp, batch)
        middle = time.perf_counter()
        self.hook.begin()
        loss.backward()
        done = self.hook.end()
        ended, own = time.perf_counter(), done.measured
        inside = own.select_s + own.communicate_s + own.measure_s
        return done.with_measured(
            loss=loss.item(),
            forward_s=middle - started,
            backward_s=max(0.0, ended - middle - inside),
            step_s=ended - begun - own.measure_s,
        )

    def mean(self, numbers: Tensor) -> Tensor:
        return mean_over(self.world, numbers)

    def evaluate(self) -> float | None:
        self._average_buffers()
        total, count = score(self.task, self.data, self.model, self.rank, self.size)
        sums = self.mean(torch.tensor([total, count], dtype=torch.float64))
        return self.task.value(float(sums[0] / sums[1]), self.model) if self.leads else None

    def _average_buffers(self) -> None:
        """Average the running statistics of batch normalisation, which differ between workers."""
        buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        if buffers:
            vector_to_parameters(self.mean(parameters_to_vector(buffers)), buffers)

    def save(self, folder: Path, done: int) -> None:
        self._average_buffers()
        self.hook.save(folder, {"step": done, **self.replica.state_dict()})

    def load(self, folder: Path) -> int:
        return continued(self.replica, self.hook.load(folder))


class VirtualEngine:
    """All workers, one after the other, with one model: as exact as processes, for any number of workers."""

    leads = True

    def __init__(self, task: Task, data: Data, feeds: list[Feed], settings: Config) -> None:
        self.task, self.data, self.feeds = task, data, feeds
        self.model = task.make_model()
        task.start(self.model)
        self.parameters = list(self.model.parameters())
        self.world = VirtualWorld(settings.workers)
        self.reducers = virtual_reducers(
            settings.sparsifier,
            settings.make_density(),
            world_size=settings.workers,
            options=settings.all_options(),
            dense_steps=settings.dense_steps,
            sizes=[parameter.numel() for parameter in self.parameters],
            values=settings.values,
        )
        for reducer in self.reducers:
            reducer.open(sum(parameter.numel() for parameter in self.parameters), torch.device("cpu"))
        self.replica = Learner(self.model, settings)

    def step(self, step: int, lr: float) -> Stepped:
        return updated(self.replica, lr, self._gradients(step))

    def _gradients(self, step: int) -> Stepped:
        grads, losses, forward, backward = [], [], 0.0, 0.0
        for feed in self.feeds:
            batch = feed.batch(step)
            started = time.perf_counter()
            loss = self.task.loss(self.model, batch)
            middle = time.perf_counter()
            found = torch.autograd.grad(loss, self.parameters)
            grads.append(parameters_to_vector(found))
            forward, backward = forward + middle - started, backward + time.perf_counter() - middle
            losses.append(loss.item())
        pairs = zip(self.reducers, grads, strict=True)
        update = self.world.run([reducer.reduce(grad, out=grad) for reducer, grad in pairs])[0]
        offset = 0
        for parameter in self.parameters:
            parameter.grad = update[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        workers = len(self.feeds)
        each = [from_report(reducer.report) for reducer in self.reducers if reducer.report is not None]
        mean = Measured.mean([done.measured for done in each])
        return Stepped(each[0].exchange, mean).with_measured(
            loss=sum(losses) / workers,
            forward_s=forward / workers,
            backward_s=backward / workers,
            communicate_s=0.0,  # nothing was sent: a virtual world's time is not that of a network
            step_s=(forward + backward) / workers + mean.select_s,
        )

    def mean(self, numbers: Tensor) -> Tensor:
        return numbers

    def evaluate(self) -> float:
        total, count = score(self.task, self.data, self.model, 0, 1)
        return self.task.value(total / count, self.model)

    def save(self, folder: Path, done: int) -> None:
        extra = {"step": done, **self.replica.state_dict()}
        states = [reducer.state_dict() for reducer in self.reducers]
        self.world.run([checkpoint.save(folder, state, {}, extra) for state in states])

    def load(self, folder: Path) -> int:
        states = self.world.run([checkpoint.load(folder, r.state_dict(), {}) for r in self.reducers])
        extra: dict[str, Any] = {}
        for reducer, state in zip(self.reducers, states, strict=True):
            extra = state.pop("extra")
            reducer.load_state_dict(state, resized=state.pop("resized"))
        return continued(self.replica, extra)


def mean_over(world: ProcessGroupWorld, numbers: Tensor) -> Tensor:
    """The mean over the processes of a group."""
    total: Tensor = world.run([all_reduce("measurements", numbers.clone())])[0]
    return total / world.size


def updated(replica: Learner, lr: float, done: Stepped) -> Stepped:
    """Take the optimizer step, unless the step was skipped (on all workers); returns the whole step."""
    if not done.exchange.finite:
        return done
    spent = replica.update(lr)
    return done.with_measured(update_s=spent, step_s=done.measured.step_s + spent)


def continued(replica: Learner, extra: dict[str, Any]) -> int:
    """Load the part of a checkpoint that all workers share; returns how many steps were done."""
    replica.load_state_dict(extra)
    return int(extra["step"])


def make_feeds(task: Task, data: Data, settings: Config) -> list[Feed]:
    """One feed per worker, from shards that are the same in every process."""
    pieces = shards(data.labels, settings.workers, settings.skew, settings.seed)
    return [Feed(task, data, piece, settings.batch, settings.seed, rank) for rank, piece in enumerate(pieces)]


def score(task: Task, data: Data, model: nn.Module, rank: int, size: int) -> tuple[float, int]:
    """Score this process's share of the test examples; returns sum and count."""
    mine = torch.arange(rank, len(data.test[0]), size)
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for indices in mine.split(_TEST_BATCH):
            part, number = task.score(model, tuple(part[indices] for part in data.test))
            total, count = total + part, count + number
    model.train()
    return total, count
