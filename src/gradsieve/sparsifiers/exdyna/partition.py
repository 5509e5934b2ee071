"""Blocks and partitions: which worker searches which part of the gradient, and how the borders follow the load.

The vector is cut into blocks of nearly equal size. A partition is a run of blocks, given by `bounds`: partition i
holds the blocks `bounds[i] <= j < bounds[i + 1]`. Loads are integers, so that workers on different machines compute
the same bounds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MEMORY = 3  # decay of a block's load per step: 1 - 2**-MEMORY = 7/8 of it stay
SHORT_MEMORY = 1  # the same when the load has moved: half of it stays
GROUPS = 64  # of blocks, by which a move of the load is detected: a single block has too few elements
UNIT = 1 << 16  # load of one selected element, fine enough for integer division
TOLERANCE = 1.05  # predicted imbalance below which the bounds stay as they are
BLOCKS_A_WORKER = 4  # minimum, whatever number of blocks was asked for


@dataclass(frozen=True)
class Blocks:
    """`count` blocks of `n` elements; their sizes differ by at most one."""

    n: int
    count: int

    def start(self, block: int) -> int:
        """The first element of a block; n for the block number `count`."""
        return block * self.n // self.count

    def counts(self, indices: Tensor) -> Tensor:
        """How many of the indices lie in each block."""
        blocks = ((indices + 1) * self.count - 1) // self.n
        return indices.new_zeros(self.count).scatter_add_(0, blocks, torch.ones_like(blocks))


def make_blocks(n: int, blocks: int, world_size: int) -> Blocks:
    """As many blocks as asked for, but at least four per worker, and none of them empty."""
    return Blocks(n, min(n, max(blocks, BLOCKS_A_WORKER * world_size)))


def even_bounds(blocks: int, world_size: int) -> tuple[int, ...]:
    """Partitions of equally many blocks, give or take one."""
    return tuple(i * blocks // world_size for i in range(world_size + 1))


def learn(load: Tensor, counts: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The load of every block after a step that selected `counts` elements in each; and these counts by groups.

    last: the counts by groups of the step before.
    """
    seen = counts * UNIT
    now = grouped(seen)
    if not load.any():
        return seen, now
    return load + ((seen - load) >> (SHORT_MEMORY if moved(now, last, grouped(load)) else MEMORY)), now


def moved(now: Tensor, last: Tensor, usual: Tensor) -> bool:
    """Whether two consecutive steps are much closer to each other than to the running average.

    Random changes, and those of one hard batch, differ between any two steps.
    """
    return 2 * int((now - last).abs().sum()) < int((now - usual).abs().sum())


def grouped(blocks: Tensor) -> Tensor:
    """Sums over groups of neighbouring blocks."""
    return _running_sum(blocks)[list(even_bounds(len(blocks), min(GROUPS, len(blocks))))].diff()


def rebalance(load: Tensor, bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Bounds that give all partitions nearly the same load; the old ones while they are good enough."""
    blocks, parts = len(load), len(bounds) - 1
    total = int(load.sum())
    if total == 0 or parts > blocks:
        return bounds
    # Blocks without a selected element have a weight too: some worker has to read them.
    weight = load * 64 + max(1, total // blocks)
    before = _running_sum(weight)
    whole = int(before[-1])
    heaviest = int(before[list(bounds)].diff().max())
    if heaviest * parts <= TOLERANCE * whole:
        return bounds
    targets = torch.arange(1, parts) * whole // parts
    right = torch.searchsorted(before, targets).clamp(1, blocks)
    nearer_left = targets - before[right - 1] < before[right] - targets
    cuts = (right - nearer_left.long()).tolist()
    return _at_least_one_block([0, *cuts, blocks])


def _running_sum(blocks: Tensor) -> Tensor:
    """The sum before each block, and the total."""
    return torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])


def _at_least_one_block(bounds: list[int]) -> tuple[int, ...]:
    """Move bounds apart where a single block is heavier than an equal share."""
    last, blocks = len(bounds) - 1, bounds[-1]
    for i in range(1, last):
        bounds[i] = min(max(bounds[i], bounds[i - 1] + 1), blocks - (last - i))
    return tuple(bounds)
