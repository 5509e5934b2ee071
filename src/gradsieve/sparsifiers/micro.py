"""MiCRO: exclusive partitions of equal size, and one threshold scaled online.

Yoon and Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN
Training", HiPC 2023.
"""

from dataclasses import dataclass

from gradsieve.exchange import Step
from gradsieve.sparsifiers._exclusive import Exclusive


@dataclass(eq=False)
class MiCRO(Exclusive):
    """ExDyna with static, equal partitions: where gradients are uneven, so are the workers' loads."""

    def span(self, partition: int, step: Step) -> tuple[int, int]:
        return partition * step.n // step.world_size, (partition + 1) * step.n // step.world_size
