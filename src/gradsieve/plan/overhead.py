"""The time of a step that does not depend on the size of the model, measured between the ranks of a process group.

It is latency, what DDP does for every step, hand-overs between threads, and the slow start of a worker that was
waiting. A tiny model shows these. What the formulas predict for it is subtracted, so the result may be negative.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradsieve.ddp import sparsify
from gradsieve.plan.links import Link
from gradsieve.plan.ways_of import Job, ways_of
from gradsieve.share import share
from gradsieve.sparsifiers.exdyna.threshold import WITHOUT_CUT
from gradsieve.worlds import ProcessGroupWorld

SIDE, DENSITY, RANK = 32, 0.05, 4  # of the tiny model's matrix and of its exchanges
WARM_UP, STEPS = WITHOUT_CUT + 4, 60  # steps; the median is used
RUN = 4  # steps that are timed together: with delay=1 an exchange would end while workers wait for each other


def measure(
    world: ProcessGroupWorld, link: Link, device: torch.device, job: Job, sparsifier: str, values: str
) -> dict[str, float]:
    """Seconds per step, by kind of way; every rank must call it, and all get the same result."""
    tiny = _Tiny(world, device, sparsifier, values)
    alone = tiny.seconds("compute alone")
    shapes = [(SIDE, SIDE), (SIDE,)]
    ways = ways_of(
        replace(job, n=SIDE * SIDE + SIDE, shapes=shapes, compute=alone), sparsifier, [DENSITY], [1], [RANK], values
    )
    return {way.kind: tiny.seconds(way.kind) - way.step(link) for way in ways}


@dataclass(frozen=True)
class _Tiny:
    """A tiny model, trained in each kind of way."""

    world: ProcessGroupWorld
    device: torch.device
    sparsifier: str
    values: str

    def seconds(self, kind: str) -> float:
        """The median over runs of steps; of each run, the slowest rank's time."""
        model: nn.Module = nn.Linear(SIDE, SIDE, device=self.device)
        x = torch.ones(1, SIDE, device=self.device)
        if kind not in ("compute alone", "weights", "weights delay=1"):
            model = self._ddp(model, kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        close = self._share(model, optimizer, kind) if kind.startswith("weights") else None
        found = []
        for _ in range((WARM_UP + STEPS) // RUN):
            dist.barrier(group=self.world.group)
            started = time.perf_counter()
            for _ in range(RUN):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            found.append((time.perf_counter() - started) / RUN)
        if close is not None:
            close()
        slowest = torch.tensor(found[WARM_UP // RUN :], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.world.group)
        return float(statistics.median(slowest.tolist()))

    def _ddp(self, model: nn.Module, kind: str) -> nn.Module:
        ddp = DistributedDataParallel(model, process_group=self.world.group, gradient_as_bucket_view=True)
        if kind == "fp16 hook":
            ddp.register_comm_hook(self.world.group, default_hooks.fp16_compress_hook)
        elif kind == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(self.world.group, RANK, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif kind == "gradients":
            sparsify(ddp, self.sparsifier, density=DENSITY, values=self.values, advise=False)
        return ddp

    def _share(self, model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> Callable[[], None]:
        delay = int(kind != "weights")
        group = self.world.group
        return share(model, optimizer, density=DENSITY, process_group=group, values=self.values, delay=delay).close
