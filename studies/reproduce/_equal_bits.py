"""Hard threshold at equal bits: the threshold that sends, over a whole run, as many elements as Top-k does.

It is found by rehearsals of the run: the same batches and optimizer, but all workers' gradients in one matrix and
no collective, which is several times as fast. The run itself then shows what was really sent.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradsieve_lab.runs.config import resolve
from gradsieve_lab.runs.engines import make_feeds
from gradsieve_lab.runs.optimizers import learning_rate, make_optimizer, set_learning_rate
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.tasks import Task
from studies.reproduce.shelf import Shelf

EQUAL = 0.05  # totals count as equal within this fraction
CLOSE_ENOUGH, TRIES = 0.02, 12  # where the search ends
FARTHEST, STEEPNESS = math.log(100), -0.1  # of a step in logarithms; of the slope it trusts


@dataclass(frozen=True)
class Tuned:
    """A threshold, and the elements its rehearsal sent over those wanted. `tries`: 1 if the first one worked."""

    threshold: float
    ratio: float
    tries: int


def equal_bits(shelf: Shelf, name: str, settings: Settings, k: int, first: float, enough: float) -> Tuned:
    """The threshold with which a run sends k elements per worker and step on average; cached on the shelf.

    first: the threshold to try first; it is used if its total is within the fraction `enough`.
    """

    def find() -> dict[str, Any]:
        rehearsal = Rehearsal(settings, shelf.check)
        return asdict(search(rehearsal.elements, k * rehearsal.settings.steps, first, enough))

    return Tuned(**shelf.measure(name, find))


def search(elements: Callable[[float], float], wanted: float, first: float, enough: float) -> Tuned:
    """By false position in logarithms; until there is a threshold on each side, by the slope of the last two.

    At first the number of elements is assumed to fall as 1 / threshold.

    >>> search(lambda threshold: 600 / threshold, wanted=200, first=1.0, enough=0.05)
    Tuned(threshold=3.0, ratio=1.0, tries=2)
    """
    threshold, slope = first, -1.0
    tried: list[Tuned] = []
    last = low = high = None
    for tries in range(1, TRIES + 1):
        ratio = max(elements(threshold), 1.0) / wanted
        tried.append(Tuned(threshold, ratio, tries))
        if abs(ratio - 1) <= (enough if tries == 1 else CLOSE_ENOUGH):
            break
        here = (math.log(threshold), math.log(ratio))
        if last and last[0] != here[0]:
            slope = min((here[1] - last[1]) / (here[0] - last[0]), STEEPNESS)
        last = here
        low, high = (here, high) if ratio > 1 else (low, here)
        if low and high:
            # Every third time in the middle, in case what is sent does not follow a power of the threshold.
            part = 0.5 if tries % 3 == 0 else low[1] / (low[1] - high[1])
            guess = low[0] + part * (high[0] - low[0])
        else:
            guess = here[0] - min(max(here[1] / slope, -FARTHEST), FARTHEST)
        threshold = float(f"{math.exp(guess):.5g}")
    return min(tried, key=lambda each: abs(math.log(each.ratio)))


class Rehearsal:
    """A run of hard threshold with own picks, of a model without buffers, that only counts."""

    def __init__(self, settings: Settings, check: Callable[[], None] = lambda: None) -> None:
        self.task = settings.make_task()
        data = self.task.load()
        self.settings = resolve(settings, self.task)
        self.feeds = make_feeds(self.task, data, self.settings)
        self.check = check

    def elements(self, threshold: float) -> float:
        """Elements that a worker sends over the whole run, mean over workers."""
        model = self.task.make_model()
        self.task.start(model)
        optimizer = make_optimizer(model, self.settings)
        loss = _Loss(self.task, model)
        parameters = dict(loss.named_parameters())
        gradients = vmap(grad(lambda values, batch: functional_call(loss, values, batch)), in_dims=(None, 0))
        acc = torch.zeros(len(self.feeds), sum(parameter.numel() for parameter in parameters.values()))
        sent = 0
        for step in range(self.settings.steps):
            self.check()
            set_learning_rate(optimizer, learning_rate(self.settings, step))
            batches = zip(*(feed.batch(step) for feed in self.feeds), strict=True)
            values = {name: parameter.detach() for name, parameter in parameters.items()}
            found = gradients(values, tuple(torch.stack(parts) for parts in batches))
            acc += torch.cat([found[name].flatten(1) for name in parameters], 1)
            picked = acc.abs() >= threshold
            update = (acc * picked).sum(0) / len(acc)
            acc.masked_fill_(picked, 0)
            sent += int(picked.sum())
            pieces = update.split([parameter.numel() for parameter in parameters.values()])
            for parameter, piece in zip(parameters.values(), pieces, strict=True):
                parameter.grad = piece.view_as(parameter)
            optimizer.step()
        return sent / len(acc)


class _Loss(nn.Module):
    """A task's loss as a module, so that it can be called with other values of its parameters."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, *batch: Tensor) -> Tensor:
        return self.task.loss(self.model, batch)
