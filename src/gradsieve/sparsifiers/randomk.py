"""Random-k: k positions at random, the same on all workers.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradsieve._check import at_least
from gradsieve.comm import exchange
from gradsieve.comm.collectives import Program, immediately
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.sparsifiers.base import Sparsifier
from gradsieve.states import State


@dataclass(frozen=True)
class RandomK(Sparsifier[State]):
    """`S` = k positions drawn without repetition. All workers have the same generator, so no index is sent.

    seed: of the generator, combined with the step's index.
    """

    NEEDS_FINITE: ClassVar[bool] = False

    seed: int = 0

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        drawn = np.random.default_rng([self.seed, step.index]).choice(step.n, step.k, replace=False, shuffle=False)
        positions = torch.from_numpy(np.sort(drawn)).to(acc.device, torch.int64, non_blocking=True)
        return immediately(Selection(positions))

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.agreed(acc, selection, step)
