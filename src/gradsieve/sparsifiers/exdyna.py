"""ExDyna: exclusive partitions whose borders follow the work, and one threshold scaled online.

Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning",
CCGrid 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradsieve._check import BadInput, at_least
from gradsieve.exchange import Exchanged, Step
from gradsieve.sparsifiers import _release
from gradsieve.sparsifiers._exclusive import Exclusive, by_partition
from gradsieve.sparsifiers._partition import TOLERANCE, Blocks, even_bounds, grouped, learn, make_blocks, rebalance

BLOCKS = 4096  # a hot layer of a tenth of the model is still cut into 400


@dataclass(eq=False)
class ExDyna(Exclusive):
    """Blocks are grouped into one partition a worker, and regrouped so that all select about as much.

    blocks: how finely the vector is cut, by default into 4,096; more blocks balance better and cost a little more
        bookkeeping.
    """

    blocks: int | None = None
    SHARED: ClassVar[tuple[str, ...]] = (*Exclusive.SHARED, "bounds", "load", "last")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks is None:
            self.blocks = _release.BLOCKS if self.compat else BLOCKS
        at_least("blocks", self.blocks, 1)
        if self.compat and self.blocks != _release.BLOCKS:
            raise BadInput(f'blocks must be {_release.BLOCKS} with compat="release", got {self.blocks}')

    def setup(self, step: Step, sizes: Sequence[int]) -> None:
        super().setup(step, sizes)
        self._blocks: Blocks | _release.ReleasedBlocks
        if self.compat:
            _release.check_supported(step.n, step.world_size)
            self._blocks = _release.ReleasedBlocks(step.n)
            self.bounds = _release.released_bounds(step.world_size)
        else:
            self._blocks = make_blocks(step.n, self.blocks or BLOCKS, step.world_size)
            self.bounds = even_bounds(self._blocks.count, step.world_size)
        self.load = torch.zeros(self._blocks.count, dtype=torch.int64)
        self.last = grouped(self.load)  # of the last step

    def span(self, partition: int, step: Step) -> tuple[int, int]:
        first, behind = self.bounds[partition : partition + 2]
        return self._blocks.start(first), self._blocks.start(behind)

    def observe(self, sent: Exchanged, step: Step) -> None:
        super().observe(sent, step)
        if isinstance(self._blocks, _release.ReleasedBlocks):
            self.bounds = _release.released_rebalance(self.bounds, by_partition(sent.counts, step), self._blocks)
        elif sent.indices is not None:
            self.load, self.last = learn(self.load, self._blocks.counts(sent.indices).cpu(), self.last)
            if max(sent.counts) * step.world_size > TOLERANCE * sum(sent.counts):
                self.bounds = rebalance(self.load, self.bounds)
