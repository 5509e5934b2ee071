"""DGC: a threshold from a sample of the magnitudes, and momentum that is applied before the exchange.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR 2018.
"""

from dataclasses import dataclass

from torch import Tensor

from gradsieve import ops
from gradsieve.comm.collectives import Program, immediately
from gradsieve.comm.step import Selection, Step
from gradsieve.feedback import Feedback, Momentum, Plain
from gradsieve.sparsifiers.base import Sparsifier, largest, select_from
from gradsieve.states import State

SAMPLED = 0.01  # of the elements, or
EXPECTED = 2  # as many as make the sample contain two of the k largest on average
FEWEST, MOST = 0.8, 1.3  # of k: how many may be sent
LOWER, LOWERED = 0.8, 10  # factor for a threshold that too few pass, and how often it is applied at most


@dataclass(frozen=True)
class DGC(Sparsifier[State]):
    """`S_r` = positions above a threshold that 1 % of the magnitudes suggest, refined until 0.8 k to 1.3 k pass it.

    momentum: of `gradsieve.Momentum`, its feedback; the optimizer must have no momentum of its own.
    clip: of its feedback as well: the largest norm of a tensor's gradient; None for no limit.
    """

    momentum: float = 0.9
    clip: float | None = None

    def __post_init__(self) -> None:
        Momentum(self.momentum, self.clip)

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        threshold = sampled_threshold(acc, step)
        for level in (*(threshold * LOWER**i for i in range(LOWERED)), 0.0):
            used, picked = level, select_from(acc, level)
            if len(picked) >= FEWEST * step.k:
                break
        if len(picked) > MOST * step.k:
            picked = picked[largest(acc[picked], step.k)]
            used = float(ops.read(acc[picked].abs().min())[0])
        return immediately(Selection(picked, threshold=used))

    def feedback(self) -> Feedback:
        return Momentum(self.momentum, self.clip) if self.momentum or self.clip else Plain()


def sampled_threshold(acc: Tensor, step: Step) -> float:
    """The magnitude that k/n of a sample reach; every stride-th element, starting one further in each step."""
    wanted = max(SAMPLED * step.n, EXPECTED * step.n / step.k)
    stride = max(1, int(step.n / wanted))
    sample = acc[step.index % stride :: stride].abs()
    return float(ops.read(sample.topk(max(1, round(len(sample) * step.k / step.n))).values.min())[0])
