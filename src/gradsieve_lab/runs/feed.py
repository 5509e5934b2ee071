"""The examples of each worker: a function of seed, rank and step, so that a run can resume from any step."""

import hashlib

import torch
from torch import Tensor

from gradsieve._check import BadInput
from gradsieve_lab.tasks import Data, Task
from gradsieve_lab.tasks.base import Batch


def mix(*numbers: int) -> int:
    """A seed from several numbers.

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Feed:
    """One worker's batches: its shard in a new order every epoch, without an incomplete last batch."""

    def __init__(self, task: Task, data: Data, shard: Tensor, batch: int, seed: int, rank: int) -> None:
        if batch > len(shard):
            raise BadInput(f"batch must be at most {len(shard)}, the examples of one worker, got {batch}")
        self.task, self.data, self.shard, self.size = task, data, shard, batch
        self.seed, self.rank = seed, rank
        self.steps_per_epoch = len(shard) // batch
        self._epoch, self._order = -1, shard

    def batch(self, step: int) -> Batch:
        """The batch of a step; also seeds torch's random generator, for randomness in the model."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            shuffle = torch.Generator().manual_seed(mix(self.seed, self.rank, epoch, 0))
            self._order = self.shard[torch.randperm(len(self.shard), generator=shuffle)]
            self._epoch = epoch
        indices = self._order[place * self.size : (place + 1) * self.size]
        # Not torch.manual_seed: without a GPU it records the caller's stack for later, half a millisecond.
        torch.default_generator.manual_seed(mix(self.seed, self.rank, step, 1))
        chance = torch.Generator().manual_seed(mix(self.seed, self.rank, step, 2))
        return self.task.batch(self.data, indices, chance)
