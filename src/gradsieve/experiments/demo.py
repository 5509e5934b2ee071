"""The demo: one small network, trained by virtual workers with every sparsifier in turn.

The images are scikit-learn's digits, which ship with it; each worker has its own share of them. All runs begin with
the same weights and see the same batches in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

import sklearn.datasets
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gradsieve._check import at_least, fraction
from gradsieve.reducer import SparseReducer
from gradsieve.sparsifiers import make_sparsifier
from gradsieve.steps import StepReport
from gradsieve.worlds.virtual import VirtualWorld

BATCH = 16
LEARNING_RATE, MOMENTUM = 0.1, 0.9
HELD_OUT = 297  # images kept for testing; 1,500 remain for training


@dataclass(frozen=True)
class Result:
    """One line of the comparison."""

    sparsifier: str
    accuracy: float  # on the held-out images, after the last step
    loss: float  # on the training images
    density: float  # mean over the steps
    worst_density: float  # of any step
    imbalance: float
    collectives: float  # a step
    ring_kilobytes: float  # a step and worker
    select_ms: float  # a step, of the slowest worker, median over the steps


@dataclass(frozen=True)
class Settings:
    """What all runs of a comparison have in common."""

    workers: int = 8
    steps: int = 150
    density: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 1)
        at_least("steps", self.steps, 1)
        fraction("density", self.density)
        at_least("seed", self.seed, 0)


def compare(names: list[str], settings: Settings, progress: Callable[[str, int], None]) -> list[Result]:
    """Train with each sparsifier; `progress(name, step)` is called after each step."""
    for name in names:
        make_sparsifier(name)  # an unknown name stops us before the first run, not between two
    return [train(name, settings, lambda step, name=name: progress(name, step)) for name in names]  # type: ignore[misc]


def train(name: str, settings: Settings, progress: Callable[[int], None]) -> Result:
    """One run."""
    shards, held_out = load_digits(settings.workers, settings.seed)
    model = make_model(settings.seed)
    sizes = [p.numel() for p in model.parameters()]
    world = VirtualWorld(settings.workers)
    reducers = [
        SparseReducer(
            make_sparsifier(name),
            settings.density,
            rank=rank,
            world_size=settings.workers,
            sizes=sizes,
            measure=False,
        )
        for rank in range(settings.workers)
    ]
    batches = torch.Generator().manual_seed(settings.seed)
    velocity = torch.zeros(sum(sizes))
    reports: list[list[StepReport]] = []
    for step in range(settings.steps):
        grads = [gradient(model, *draw(shard, batches)) for shard in shards]
        updates = world.run([reducer.reduce(grad) for reducer, grad in zip(reducers, grads, strict=True)])
        velocity.mul_(MOMENTUM).add_(updates[0])
        with torch.no_grad():
            weights = parameters_to_vector(model.parameters())
            vector_to_parameters(weights - LEARNING_RATE * velocity, model.parameters())
        reports.append([reducer.end_step() for reducer in reducers])
        progress(step + 1)
    return summarise(name, model, shards, held_out, reports)


def summarise(
    name: str,
    model: nn.Module,
    shards: list[tuple[Tensor, Tensor]],
    held_out: tuple[Tensor, Tensor],
    reports: list[list[StepReport]],
) -> Result:
    """A run in one line."""
    images, labels = (torch.cat(parts) for parts in zip(*shards, strict=True))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images), labels)
        right = model(held_out[0]).argmax(1) == held_out[1]
    firsts = [workers[0] for workers in reports]
    return Result(
        sparsifier=name,
        accuracy=float(right.float().mean()),
        loss=float(loss),
        density=fmean(report.density for report in firsts),
        worst_density=max(report.density for report in firsts),
        imbalance=fmean(report.imbalance for report in firsts),
        collectives=fmean(report.collectives for report in firsts),
        ring_kilobytes=fmean(report.ring_bytes for report in firsts) / 1e3,
        select_ms=median(
            max(report.seconds["accumulate"] + report.seconds["select"] for report in workers)
            for workers in reports
        )
        * 1e3,
    )


def make_model(seed: int) -> nn.Module:
    """A network of 167,178 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def load_digits(workers: int, seed: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """One shard of training images a worker, all of one size, and the held-out images."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    each = (len(x) - HELD_OUT) // workers
    if each < 1:
        raise ValueError(f"workers must be at most {len(x) - HELD_OUT}, one training image each, got {workers}")
    shards = [(x[r * each : (r + 1) * each], y[r * each : (r + 1) * each]) for r in range(workers)]
    return shards, (x[-HELD_OUT:], y[-HELD_OUT:])


def draw(shard: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of a worker's own images."""
    chosen = torch.randint(len(shard[0]), (BATCH,), generator=generator)
    return shard[0][chosen], shard[1][chosen]


def gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The flat gradient of one worker's batch."""
    loss = nn.functional.cross_entropy(model(images), labels)
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])
