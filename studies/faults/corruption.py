"""Silent corruption: flip one bit in one worker's memory, and count what `check_every` finds.

Run it:  python -m studies.faults.corruption
"""

import json
import random
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from gradsieve import ReplicasDiffer, VirtualWorld, make_sparsifier, virtual_reducers
from gradsieve.comm.collectives import AllReduce, AllToAll
from gradsieve.density import as_density
from gradsieve.share import Replica
from gradsieve.share.driver import Driver
from gradsieve.share.outcome import NonFiniteWeights
from gradsieve.state.replicas import check_replicas

WORKERS, N, STEPS, EVERY, TRIALS = 3, 500, 25, 5, 40
WHERE = ("weights", "message", "part of a sum", "residual")
SHARE = ("shared", "own weights", "message", "part of a sum")  # of a worker, where weights are shared
MESSAGES = ("message", "part of a sum")
Trial = tuple[str, int | None, int]  # the outcome, after how many steps it was found, and the flipped bit


def flip(x: Tensor, chance: random.Random) -> int:
    """Flip one bit of one element of a float32 tensor; returns which: 0 to 22 are the mantissa, 31 is the sign."""
    bits = x.view(torch.int32)
    place, bit = chance.randrange(x.numel()), chance.randrange(32)
    value = int(bits[place]) ^ (1 << bit)
    bits[place] = value if value < 1 << 31 else value - (1 << 32)
    return bit


class FaultyWorld(VirtualWorld):
    """A world that flips one bit in what one worker receives, once.

    armed: "message" for a sum, or "part of a sum": sums of up to 4 MB are made in slices; what a worker receives
    to add up its slice is one worker's part. Here sums are made at once, so that part is taken where it is sent.
    """

    def __init__(self, size: int, chance: random.Random) -> None:
        super().__init__(size)
        self.chance, self.armed, self.bit = chance, "", -1

    def _answer(self, calls: list[Any]) -> list[Any]:
        here = self.armed and calls[0].tag == "values"
        victim = self.chance.randrange(self.size) if here else 0
        if here and self.armed == "part of a sum" and isinstance(calls[0], AllReduce):
            self._flip(calls[victim].tensor)
        replies = list(super()._answer(calls))
        if here and self.armed == ("part of a sum" if isinstance(calls[0], AllToAll) else "message"):
            reply = replies[victim]
            self._flip(reply if isinstance(reply, Tensor) else reply[0])
        return replies

    def _flip(self, x: Tensor) -> None:
        self.bit, self.armed = flip(x, self.chance), ""


def trial(where: str, seed: int) -> Trial:
    """Flip one bit."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    world = FaultyWorld(WORKERS, chance)
    reducers = virtual_reducers("topk", 0.05, world_size=WORKERS)
    weights = [torch.ones(N) for _ in range(WORKERS)]
    at = chance.randrange(5, STEPS - 2 * EVERY)
    for step in range(STEPS):
        if step == at and where == "weights":
            world.bit = flip(weights[chance.randrange(WORKERS)], chance)
        if step == at and where == "residual":
            world.bit = flip(reducers[chance.randrange(WORKERS)].residual, chance)
        world.armed = where if step == at and where in MESSAGES else ""
        grads = [torch.randn(N, generator=generator) for _ in range(WORKERS)]
        try:
            updates = world.run([reducer.reduce(grad) for reducer, grad in zip(reducers, grads, strict=True)])
            for weight, update in zip(weights, updates, strict=True):
                weight -= 0.01 * update
            if step % EVERY == EVERY - 1:
                world.run([check_replicas({"weights": weight}, step) for weight in weights])
        except ReplicasDiffer:
            return "found", step - at, world.bit
        except Exception as error:
            return type(error).__name__, step - at, world.bit
    if any(not weight.isfinite().all() for weight in weights):
        return "not finite, alike on all", None, world.bit
    return "not seen", None, world.bit


def share_trial(where: str, seed: int) -> Trial:
    """As `trial`, for workers that share weights: the agreed weights are compared."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    world = FaultyWorld(WORKERS, chance)
    weights = [torch.ones(N) for _ in range(WORKERS)]
    replicas = [
        Replica({"w": own}, make_sparsifier("topk"), as_density(0.05), rank=rank, world_size=WORKERS)
        for rank, own in enumerate(weights)
    ]
    driver = Driver(replicas, world)
    at = chance.randrange(5, STEPS - 2 * EVERY)
    for step in range(STEPS):
        if step == at and where not in MESSAGES:
            victim = chance.randrange(WORKERS)
            world.bit = flip(replicas[victim].weights.shared if where == "shared" else weights[victim], chance)
        world.armed = where if step == at and where in MESSAGES else ""
        for own in weights:
            own -= 0.01 * torch.randn(N, generator=generator)
        try:
            driver.after_step()
            if step % EVERY == EVERY - 1:
                world.run([check_replicas(each.weights.by_name(), step) for each in replicas])
        except (ReplicasDiffer, NonFiniteWeights) as error:
            how = "found" if isinstance(error, ReplicasDiffer) else "found, as it is not finite"
            return how, step - at, world.bit
    return "not seen", None, world.bit


def _summary(outcomes: list[Trial]) -> dict[str, object]:
    within = [steps for _, steps, _ in outcomes if steps is not None]
    return {
        "outcomes": dict(Counter(name for name, _, _ in outcomes)),
        "most steps": max(within, default=None),
        "bits not seen": sorted(bit for name, _, bit in outcomes if name == "not seen"),
    }


def main(trials: int = TRIALS) -> dict[str, dict[str, object]]:
    found = {where: _summary([trial(where, seed) for seed in range(trials)]) for where in WHERE}
    shared = {f"share: {where}": _summary([share_trial(where, seed) for seed in range(trials)]) for where in SHARE}
    return found | shared


if __name__ == "__main__":
    print(json.dumps({"check_every": EVERY, "trials each": TRIALS, **main()}, indent=2))  # noqa: T201
