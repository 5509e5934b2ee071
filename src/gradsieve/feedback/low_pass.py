"""ScaleCom's low-pass filter: only a fraction of a new gradient enters the residual.

Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed Training",
NeurIPS 2020.
"""

from dataclasses import dataclass

from torch import Tensor

from gradsieve._check import fraction
from gradsieve.feedback.plain import Feedback


@dataclass(frozen=True)
class LowPass(Feedback):
    """`residual <- residual + beta * (grad - sent)`.

    It forgets on purpose: what was sent and what is kept no longer add up to the gradients.

    beta: in (0, 1]; 1 is plain error feedback; about 0.1 is recommended for large batches.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        fraction("beta", self.beta)

    def settle_(self, residual: Tensor, before: Tensor) -> None:
        if self.beta < 1:
            residual.lerp_(before.to(residual.dtype), 1 - self.beta)

    def for_gradients_only(self) -> str:
        return "filters residuals" if self.beta < 1 else ""
