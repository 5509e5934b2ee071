"""Lightning: `Trainer(strategy=GradsieveStrategy(density=1e-3))`. Fabric: `sparsify(fabric, model, density=1e-3)`.

Every rank's state is in the folder `gradsieve-NAME` beside each checkpoint file that the framework writes.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from gradsieve._check import BadInput, BadType, one_of
from gradsieve.ddp import Sieve
from gradsieve.integrations.common import MODES, Gradients, Weights, bare, need
from gradsieve.share import ShareSieve

need("lightning")

import lightning
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DDPStrategy

_WAY_OUT = "pass what fabric.setup returned, of a Fabric with strategy='ddp' and 2 or more devices"


class GradsieveStrategy(DDPStrategy):
    """DDP that sends only part of the gradient, or of the weights. `sieve` is set from the start of `fit`.

    With `mode="weights"`, validation and saved models use the agreed weights; after `fit` all replicas are equal.

    Args:
        mode: "gradients" (`gradsieve.sparsify`) or "weights" (`gradsieve.share`).
        ddp_options: options of Lightning's `DDPStrategy`.
        options: options of `gradsieve.sparsify` or `gradsieve.share`, such as sparsifier and density.
    """

    def __init__(
        self, mode: str = "gradients", ddp_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(**(ddp_options or {}))
        self.mode, self.options = one_of("mode", mode, MODES), options
        self._made: Gradients | None = None
        self._agreed = ExitStack()
        self._resumed = Path()

    @property
    def sieve(self) -> Sieve | ShareSieve | None:
        return None if self._made is None else self._made.sieve

    def setup(self, trainer: lightning.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit":
            assert self.model is not None
            scaler = getattr(self.precision_plugin, "scaler", None)
            kind = MODES[self.mode]
            self._made = kind(self.model, self.optimizers, scaler=scaler, way_out=_WAY_OUT, **self.options)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: lightning.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        report = None if self._made is None else self._made.sieve.report
        if report is not None and self.lightning_module is not None:
            self.lightning_module.log_dict(report.scalars(), on_step=True, on_epoch=False, rank_zero_only=True)
        return output

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._made is not None:
            self._agreed.enter_context(self._made.agreed())

    def on_validation_end(self) -> None:
        self._agreed.close()
        super().on_validation_end()

    def on_train_end(self) -> None:
        if self._made is not None:
            self._made.finish()
        super().on_train_end()

    def teardown(self) -> None:
        if self._made is not None:
            self._made.close()
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._agreed.close()  # a checkpoint may be due when validation has just ended
        state = super().lightning_module_state_dict()
        return state if self._made is None else self._made.agreed_copy(state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        folder = _beside(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._made is not None and "optimizer_states" in checkpoint:
            self._made.save(folder)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._resumed = _beside(checkpoint_path)
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        assert self._made is not None
        self._made.load(self._resumed)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)


def sparsify(fabric: Fabric, model: nn.Module, *arguments: Any, **options: Any) -> Sieve:
    """Send only part of the model's gradient from now on; takes the arguments of `gradsieve.sparsify`.

    Args:
        fabric: its strategy must be DDP. `fabric.save` and `fabric.load` of this model include the sieve.
        model: as `fabric.setup` returned it.
    """
    made = Gradients(model, (), *arguments, scaler=_scaler(fabric), way_out=_WAY_OUT, **options)
    _extend_checkpoints(fabric, made)
    return cast(Sieve, made.sieve)


def share(
    fabric: Fabric, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *arguments: Any, **options: Any
) -> ShareSieve:
    """Average the weights that drifted apart after every optimizer step; takes the arguments of `gradsieve.share`.

    Args:
        fabric: its strategy must be DDP, which stops averaging gradients. `fabric.save` and `fabric.load` of
            this model include the sieve; the saved model has the agreed weights.
        model, optimizer: as `fabric.setup` returned them.
    """
    made = Weights(model, optimizer, *arguments, scaler=_scaler(fabric), way_out=_WAY_OUT, **options)
    _extend_checkpoints(fabric, made)
    return made.sieve


def _scaler(fabric: Fabric) -> Any:
    if not isinstance(fabric, Fabric):
        raise BadType(f"fabric must be a Fabric, got {type(fabric).__name__}")
    return getattr(fabric.strategy.precision, "scaler", None)


def _extend_checkpoints(fabric: Fabric, made: Gradients) -> None:
    """Extend the strategy's two checkpoint methods to include the sieve: Fabric has no hook for that."""
    strategy = fabric.strategy
    save, load = strategy.save_checkpoint, strategy.load_checkpoint

    def save_checkpoint(path: str | Path, state: dict[str, Any], *arguments: Any, **options: Any) -> None:
        with made.agreed():
            save(path, state, *arguments, **options)
        for name in _names(state, made):
            made.save(_beside(path) / name)

    def load_checkpoint(path: str | Path, state: Any = None, *arguments: Any, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = load(path, state, *arguments, **options)
        for name in _names(state, made):
            made.load(_beside(path) / name)
        return found

    vars(strategy).update(save_checkpoint=save_checkpoint, load_checkpoint=load_checkpoint)


def _names(state: Any, made: Gradients) -> list[str]:
    """The names of the sieve's model in a saved or loaded state: one or none."""
    parts = state.items() if isinstance(state, Mapping) else ()
    return [name for name, part in parts if isinstance(part, nn.Module) and bare(part) is made.module]


def _beside(path: str | Path) -> Path:
    """The folder with all ranks' state that belongs to a checkpoint file."""
    if "://" in str(path):
        raise BadInput(
            f"checkpoints must be in a folder that all ranks see, got {path}: mount it, or copy them there"
        )
    file = Path(path).resolve()  # the last checkpoint may be a link
    return file.with_name(f"gradsieve-{file.name}")
