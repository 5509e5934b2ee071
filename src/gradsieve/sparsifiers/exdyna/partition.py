"""Blocks and partitions: who looks at which part of the gradient, and how that follows the work.

The vector is cut into blocks of nearly equal size. A partition is a run of blocks, given by `bounds`: partition i
holds the blocks `bounds[i] <= j < bounds[i + 1]`. Loads are integers, so that workers on different machines come to
the same bounds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MEMORY = 3  # a block's load keeps 7/8 of what it was: 1 - 2**-MEMORY
SHORT_MEMORY = 1  # and only half when the work has moved
GROUPS = 64  # of blocks, in which it is seen whether it has: single blocks have too few elements to tell
UNIT = 1 << 16  # the load of one selected element, fine enough for the memory's divisions
TOLERANCE = 1.05  # predicted imbalance below which the bounds stay as they are
BLOCKS_A_WORKER = 4  # at least, whatever number of blocks was asked for


@dataclass(frozen=True)
class Blocks:
    """`count` blocks of `n` elements; their sizes differ by at most one."""

    n: int
    count: int

    def start(self, block: int) -> int:
        """The first element of a block; of the one behind the last: n."""
        return block * self.n // self.count

    def counts(self, indices: Tensor) -> Tensor:
        """How many of the indices lie in each block."""
        blocks = ((indices + 1) * self.count - 1) // self.n
        return indices.new_zeros(self.count).scatter_add_(0, blocks, torch.ones_like(blocks))


def make_blocks(n: int, blocks: int, world_size: int) -> Blocks:
    """As many blocks as asked for, but several a worker, and none of them empty."""
    return Blocks(n, min(n, max(blocks, BLOCKS_A_WORKER * world_size)))


def even_bounds(blocks: int, world_size: int) -> tuple[int, ...]:
    """Partitions of as many blocks each, as far as that goes."""
    return tuple(i * blocks // world_size for i in range(world_size + 1))


def learn(load: Tensor, counts: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The load of every block after a step that selected `counts` elements of it; and the step in groups, of which
    `last` are those of the step before."""
    seen = counts * UNIT
    now = grouped(seen)
    if not load.any():
        return seen, now
    return load + ((seen - load) >> (SHORT_MEMORY if moved(now, last, grouped(load)) else MEMORY)), now


def moved(now: Tensor, last: Tensor, usual: Tensor) -> bool:
    """Whether two steps in a row are much more like each other than like what is usual.

    What is only chance, or whose batch was hard, differs between any two steps.
    """
    return 2 * int((now - last).abs().sum()) < int((now - usual).abs().sum())


def grouped(blocks: Tensor) -> Tensor:
    """Sums over groups of neighbouring blocks."""
    return _running_sum(blocks)[list(even_bounds(len(blocks), min(GROUPS, len(blocks))))].diff()


def rebalance(load: Tensor, bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Bounds under which all partitions have nearly the same load; the old ones while they are good enough."""
    blocks, parts = len(load), len(bounds) - 1
    total = int(load.sum())
    if total == 0 or parts > blocks:
        return bounds
    # Blocks in which nothing was selected are spread too: somebody has to read them.
    weight = load * 64 + max(1, total // blocks)
    before = _running_sum(weight)  # from it all bounds are found at once, wherever surplus and gaps are
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
    """What stands before each block, and behind the last."""
    return torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])


def _at_least_one_block(bounds: list[int]) -> tuple[int, ...]:
    """Push bounds apart where a single block is heavier than a whole share."""
    last, blocks = len(bounds) - 1, bounds[-1]
    for i in range(1, last):
        bounds[i] = min(max(bounds[i], bounds[i - 1] + 1), blocks - (last - i))
    return tuple(bounds)
