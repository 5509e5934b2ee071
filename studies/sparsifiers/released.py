"""ExDyna's constants and rules as its authors released them, quirks included: for comparison only.

Their public code rounds where their paper does not: the mean count and the elements of a moved block are truncated,
and a pair that would shrink a partition below the minimum is skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import Tensor

from gradsieve.comm import exchange
from gradsieve.extend import (
    BadInput,
    Program,
    Selection,
    Sent,
    Shape,
    Span,
    Sparsifier,
    State,
    Step,
    Window,
    immediately,
    shared,
)
from gradsieve.sparsifiers.hard_threshold import authors_rule

BLOCKS = 1024
ALIGNMENT = 32
MIN_SHARE = 4  # a partition keeps at least a quarter of its even share of blocks
HEAVY, LIGHT = 1.05, 0.95238
ABOVE, BELOW = 1.1, 0.909
FASTER, DRIFT, SLOWER = 1.005, 1.00125, 0.995


@dataclass(frozen=True)
class ReleasedBlocks:
    """1,024 blocks of a multiple of 32 elements; the remainder is added to the last one."""

    n: int
    count: int = BLOCKS

    @property
    def size(self) -> int:
        return self.n // self.count // ALIGNMENT * ALIGNMENT

    def start(self, block: int) -> int:
        return self.n if block == self.count else block * self.size


def check_supported(n: int, world_size: int) -> None:
    """Refuse sizes outside the limits within which the released code works."""
    if n < BLOCKS * ALIGNMENT:
        raise BadInput(
            f"released_exdyna needs n >= {BLOCKS * ALIGNMENT}, below which its blocks are empty, got {n}"
        )
    if not 2 <= world_size <= BLOCKS // MIN_SHARE:
        raise BadInput(f"released_exdyna needs 2 <= world_size <= {BLOCKS // MIN_SHARE}, got {world_size}")


def released_bounds(world_size: int) -> tuple[int, ...]:
    """As even as possible, the first partitions taking one block more."""
    each, more = divmod(BLOCKS, world_size)
    return tuple(i * each + min(i, more) for i in range(world_size + 1))


def released_rebalance(bounds: Sequence[int], counts: Sequence[int], blocks: ReleasedBlocks) -> tuple[int, ...]:
    """One sweep over adjacent pairs: a block goes from a heavy partition to a light neighbour.

    `counts` are in partition order.
    """
    bounds, counts = list(bounds), list(counts)
    parts, selected = len(counts), sum(counts)
    mean = selected // parts
    moved = int(blocks.size * (selected / blocks.n))
    fewest = BLOCKS / (MIN_SHARE * parts)
    for i in range(parts - 1):
        left, right = counts[i] / mean, counts[i + 1] / mean
        if left > HEAVY and right < LIGHT and bounds[i + 1] - bounds[i] - 1 >= fewest:
            bounds[i + 1] -= 1
            counts[i] -= moved
            counts[i + 1] += moved
        elif left < LIGHT and right > HEAVY and bounds[i + 2] - bounds[i + 1] - 1 >= fewest:
            bounds[i + 1] += 1
            counts[i] += moved
            counts[i + 1] -= moved
    return tuple(bounds)


def scaled(threshold: float, selected: int, k: int) -> float:
    """Scaled by one of three factors. Inside the band it only rises: the density settles below the target."""
    ratio = selected / k
    return threshold * (FASTER if ratio > ABOVE else DRIFT if ratio > BELOW else SLOWER)


@dataclass(frozen=True)
class ReleasedState(State):
    threshold: float = shared(power=1)
    bounds: tuple[int, ...] = shared((), per_worker=True)


@dataclass(frozen=True)
class ReleasedMiCRO(Sparsifier[ReleasedState]):
    """Static, equal partitions; the threshold starts at the authors' rule and is scaled from step to step."""

    EXCLUSIVE: ClassVar[bool] = True

    def init(self, shape: Shape) -> ReleasedState:
        return ReleasedState(authors_rule(shape.k))

    def partitions(self, state: ReleasedState, step: Step) -> list[Span]:
        edges = [part * step.n // step.world_size for part in range(step.world_size + 1)]
        return list(pairwise(edges))

    def window(self, state: ReleasedState, step: Step) -> Window:
        owned = (step.index + step.rank) % step.world_size
        return Window(state.threshold, *self.partitions(state, step)[owned])

    def select(self, state: ReleasedState, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        """A worker without a hit sends one position, which moves on with the step."""
        _, start, stop = self.window(state, step)
        picked = hits if len(hits) else hits.new_tensor([start + step.index % (stop - start)])
        parts = self.partitions(state, step)
        spans = [parts[(step.index + rank) % step.world_size] for rank in range(step.world_size)]
        return immediately(Selection(picked, spans=spans, threshold=state.threshold))

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.disjoint(acc, selection, step)

    def update(self, state: ReleasedState, selection: Selection, sent: Sent, step: Step) -> ReleasedState:
        return ReleasedState(scaled(state.threshold, sum(sent.counts), step.k), state.bounds)

    def for_gradients_only(self) -> str:
        return "starts with a threshold for gradients"


@dataclass(frozen=True)
class ReleasedExDyna(ReleasedMiCRO):
    """Blocks that move between neighbouring partitions, one per step and pair."""

    def init(self, shape: Shape) -> ReleasedState:
        check_supported(shape.n, shape.world_size)
        return ReleasedState(authors_rule(shape.k), released_bounds(shape.world_size))

    def partitions(self, state: ReleasedState, step: Step) -> list[Span]:
        edges = [ReleasedBlocks(step.n).start(block) for block in state.bounds]
        return list(pairwise(edges))

    def update(self, state: ReleasedState, selection: Selection, sent: Sent, step: Step) -> ReleasedState:
        counts = [sent.counts[(part - step.index) % step.world_size] for part in range(step.world_size)]
        bounds = released_rebalance(state.bounds, counts, ReleasedBlocks(step.n))
        return ReleasedState(scaled(state.threshold, sum(sent.counts), step.k), bounds)
