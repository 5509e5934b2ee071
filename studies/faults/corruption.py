"""Silent corruption: flip one bit in one worker's memory, and count what `check_every` finds.

Run it:  python -m studies.faults.corruption
"""

import json
import random
from collections import Counter

import torch
from torch import Tensor

from gradsieve import ReplicasDiffer, VirtualWorld, make_sparsifier, virtual_reducers
from gradsieve.comm.collectives import AllToAll
from gradsieve.density import as_density
from gradsieve.share import Replica
from gradsieve.share.driver import Driver
from gradsieve.share.outcome import NonFiniteWeights
from gradsieve.state.replicas import check_replicas

WORKERS, N, STEPS, EVERY, TRIALS = 3, 500, 25, 5, 40
WHERE = ("weights", "message", "residual")
SHARE = ("shared", "own weights", "message")  # of a worker, where weights are shared


def flip(x: Tensor, chance: random.Random) -> None:
    """Flip one bit of one element of a float32 tensor."""
    bits = x.view(torch.int32)
    place, bit = chance.randrange(x.numel()), chance.randrange(32)
    value = int(bits[place]) ^ (1 << bit)
    bits[place] = value if value < 1 << 31 else value - (1 << 32)


class FaultyWorld(VirtualWorld):
    """A world that flips one bit in what one worker receives, once."""

    def __init__(self, size: int, chance: random.Random) -> None:
        super().__init__(size)
        self.chance, self.armed = chance, False

    def _answer(self, calls: list[object]) -> list[object]:  # type: ignore[override]
        replies = super()._answer(calls)  # type: ignore[arg-type]
        tag = getattr(calls[0], "tag", "")
        if self.armed and tag == "values" and not isinstance(calls[0], AllToAll):
            reply = replies[self.chance.randrange(self.size)]
            flip(reply if isinstance(reply, Tensor) else reply[0], self.chance)
            self.armed = False
        return replies


def trial(where: str, seed: int) -> tuple[str, int | None]:
    """Flip one bit; returns the outcome and after how many steps it was found."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    world = FaultyWorld(WORKERS, chance)
    reducers = virtual_reducers("topk", 0.05, world_size=WORKERS)
    weights = [torch.ones(N) for _ in range(WORKERS)]
    at = chance.randrange(5, STEPS - 2 * EVERY)
    for step in range(STEPS):
        if step == at and where == "weights":
            flip(weights[chance.randrange(WORKERS)], chance)
        if step == at and where == "residual":
            flip(reducers[chance.randrange(WORKERS)].residual, chance)
        world.armed = step == at and where == "message"
        grads = [torch.randn(N, generator=generator) for _ in range(WORKERS)]
        try:
            updates = world.run([reducer.reduce(grad) for reducer, grad in zip(reducers, grads, strict=True)])
            for weight, update in zip(weights, updates, strict=True):
                weight -= 0.01 * update
            if step % EVERY == EVERY - 1:
                world.run([check_replicas({"weights": weight}, step) for weight in weights])
        except ReplicasDiffer:
            return "found", step - at
        except Exception as error:
            return type(error).__name__, step - at
    if any(not weight.isfinite().all() for weight in weights):
        return "not finite, alike on all", None
    return "not seen", None


def share_trial(where: str, seed: int) -> tuple[str, int | None]:
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
        if step == at and where != "message":
            victim = chance.randrange(WORKERS)
            flip(replicas[victim].weights.shared if where == "shared" else weights[victim], chance)
        world.armed = step == at and where == "message"
        for own in weights:
            own -= 0.01 * torch.randn(N, generator=generator)
        try:
            driver.after_step()
            if step % EVERY == EVERY - 1:
                world.run([check_replicas(each.weights.by_name(), step) for each in replicas])
        except (ReplicasDiffer, NonFiniteWeights) as error:
            return "found" if isinstance(error, ReplicasDiffer) else "found, as it is not finite", step - at
    return "not seen", None


def _summary(outcomes: list[tuple[str, int | None]]) -> dict[str, object]:
    within = [steps for _, steps in outcomes if steps is not None]
    return {"outcomes": dict(Counter(name for name, _ in outcomes)), "most steps": max(within, default=None)}


def main(trials: int = TRIALS) -> dict[str, dict[str, object]]:
    found = {where: _summary([trial(where, seed) for seed in range(trials)]) for where in WHERE}
    shared = {f"share: {where}": _summary([share_trial(where, seed) for seed in range(trials)]) for where in SHARE}
    return found | shared


if __name__ == "__main__":
    print(json.dumps({"check_every": EVERY, "trials each": TRIALS, **main()}, indent=2))  # noqa: T201
