"""Ray Train: `sparsify(model)` or `share(model, optimizer)` in the function that a `TorchTrainer` runs.

    kept = gradsieve.integrations.ray.sparsify(ray.train.torch.prepare_model(model), density=1e-3)
    with kept.restored() as folder: ...             # folder is None, unless Ray restarts the run or resumes one
    with kept.reported({"loss": loss}) as folder: ...   # a Ray checkpoint with every rank's state

Workers need no shared folder: Ray copies each worker's part to its storage.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradsieve.ddp import Sieve
from gradsieve.integrations.common import Gradients, Weights, need
from gradsieve.reports import StepReport
from gradsieve.share import ShareSieve

need("ray")

import ray.train

_WAY_OUT = (
    "call it in a TorchTrainer's function with 2 or more workers, on what ray.train.torch.prepare_model returned"
)


class KeptByRay:
    """A sieve that is saved in Ray's checkpoints."""

    def __init__(self, made: Gradients) -> None:
        self._made = made

    @property
    def sieve(self) -> Sieve | ShareSieve:
        return self._made.sieve

    @property
    def report(self) -> StepReport | None:
        return self.sieve.report

    @contextmanager
    def restored(self) -> Iterator[Path | None]:
        """Yield the folder of the checkpoint to resume from, or None; load the sieve's state after the block.

        Load model and optimizer inside the block; with `share` every rank then gets its own weights back.
        """
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            yield None
            return
        with checkpoint.as_directory() as folder:
            yield Path(folder)
            self._made.load(Path(folder) / "gradsieve")

    @contextmanager
    def reported(self, metrics: Mapping[str, Any]) -> Iterator[Path]:
        """Yield a new folder; after the block, report it to Ray with `metrics` and those of the last step.

        Every rank must enter it. Let rank 0 write model and optimizer inside the block, where with `share` the
        model holds the agreed weights.
        """
        with tempfile.TemporaryDirectory(prefix="gradsieve-") as name:
            with self._made.agreed():
                yield Path(name)
            self._made.save(Path(name) / "gradsieve", shared=False)
            scalars = {} if self.report is None else self.report.scalars()
            checkpoint = ray.train.Checkpoint.from_directory(name)
            ray.train.report({**metrics, **scalars}, checkpoint=checkpoint)


def sparsify(model: nn.Module, *arguments: Any, scaler: Any = None, **options: Any) -> KeptByRay:
    """Send only part of the model's gradient from now on; takes the arguments of `gradsieve.sparsify`."""
    return KeptByRay(Gradients(model, (), *arguments, scaler=scaler, way_out=_WAY_OUT, **options))


def share(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *arguments: Any,
    scaler: Any = None,
    **options: Any,
) -> KeptByRay:
    """Average the weights that drifted apart after every optimizer step; takes the arguments of `gradsieve.share`.

    `prepare_model(model, parallel_strategy=None)` is enough; a DDP model stops averaging gradients.
    """
    return KeptByRay(Weights(model, optimizer, *arguments, scaler=scaler, way_out=_WAY_OUT, **options))
