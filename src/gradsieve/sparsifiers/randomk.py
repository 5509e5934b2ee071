"""Random-k: k positions at random, the same on all workers.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradsieve import exchange
from gradsieve._check import at_least
from gradsieve.collectives import Program
from gradsieve.exchange import Exchanged, Step
from gradsieve.sparsifiers.base import Sparsifier


@dataclass(eq=False)
class RandomK(Sparsifier):
    """`S` = k positions drawn without repetition, from a generator that all workers have: no index travels.

    seed: another seed, other positions; each step has its own.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        drawn = np.random.default_rng([self.seed, step.index]).choice(step.n, step.k, replace=False, shuffle=False)
        return torch.from_numpy(np.sort(drawn)).to(acc.device, torch.int64)

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        return exchange.agreed(acc, picked, pulse, step)
