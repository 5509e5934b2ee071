"""ExDyna's constants and rules as its authors released them, quirks included: for comparison only.

Their public code rounds where their paper does not: the mean count and the elements of a moved block are cut to
whole numbers, and a pair that would shrink a partition below the minimum is skipped.
"""

from dataclasses import dataclass

from torch import Tensor

from gradsieve._check import BadInput
from gradsieve.collectives import Program
from gradsieve.exchange import Step
from gradsieve.sparsifiers.hard_threshold import authors_rule

BLOCKS = 1024
ALIGNMENT = 32
MIN_SHARE = 4  # a partition keeps at least a quarter of its even share of blocks
HEAVY, LIGHT = 1.05, 0.95238
ABOVE, BELOW = 1.1, 0.909
FASTER, DRIFT, SLOWER = 1.005, 1.00125, 0.995


@dataclass(frozen=True)
class ReleasedBlocks:
    """1,024 blocks of a multiple of 32 elements; the remainder is glued to the last one."""

    n: int
    count: int = BLOCKS

    @property
    def size(self) -> int:
        return self.n // self.count // ALIGNMENT * ALIGNMENT

    def start(self, block: int) -> int:
        return self.n if block == self.count else block * self.size


def check_supported(n: int, world_size: int) -> None:
    """The released code fails outside these limits; here it says so."""
    if n < BLOCKS * ALIGNMENT:
        raise BadInput(
            f'compat="release" needs n >= {BLOCKS * ALIGNMENT}, below which its blocks are empty, got {n}'
        )
    if not 2 <= world_size <= BLOCKS // MIN_SHARE:
        raise BadInput(f'compat="release" needs 2 <= world_size <= {BLOCKS // MIN_SHARE}, got {world_size}')


def released_bounds(world_size: int) -> list[int]:
    """As even as possible, the first partitions taking one block more."""
    each, more = divmod(BLOCKS, world_size)
    return [i * each + min(i, more) for i in range(world_size + 1)]


def released_rebalance(bounds: list[int], counts: list[int], blocks: ReleasedBlocks) -> list[int]:
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
    return bounds


class ReleasedThreshold:
    """Starts at the authors' rule and is scaled by one of three factors a step. The state is the threshold.

    Inside the band the threshold only rises, so the density settles below the target.
    """

    counts = None  # the workers tell each other how many elements they send

    def __init__(self, k: int) -> None:
        self.state: list[float | None] = [authors_rule(k)]

    @property
    def decided(self) -> float | None:
        return self.state[0]

    @property
    def level(self) -> float:
        return self.state[0] or 0.0

    def select(self, acc: Tensor, hits: Tensor, span: tuple[int, int], step: Step) -> Program[Tensor]:
        """A worker without a hit sends one position, which moves on with the step."""
        yield from ()
        start, stop = span
        return hits if len(hits) else hits.new_tensor([start + step.index % (stop - start)])

    def observe(self, selected: int, step: Step) -> None:
        ratio = selected / step.k
        self.state = [self.level * (FASTER if ratio > ABOVE else DRIFT if ratio > BELOW else SLOWER)]

    def rescale(self, factor: float) -> None:
        self.state = [self.level * factor]
