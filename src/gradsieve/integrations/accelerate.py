"""Accelerate: `sparsify(accelerator, model)` or `share(accelerator, model, optimizer)` after `prepare`.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sieve = gradsieve.integrations.accelerate.sparsify(accelerator, model, density=1e-3)

`accelerator.save_state` then writes every rank's state into its folder, and `load_state` reads it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from gradsieve._check import BadInput, BadType
from gradsieve.ddp import Sieve
from gradsieve.integrations.common import Gradients, Weights, bare, need
from gradsieve.share import ShareSieve

need("accelerate")

from accelerate import Accelerator
from accelerate.utils import DistributedType

_WAY_OUT = (
    "pass what accelerator.prepare returned, in a script started by `accelerate launch` with 2 or more processes"
)
_OTHER = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def sparsify(accelerator: Accelerator, model: nn.Module, *arguments: Any, **options: Any) -> Sieve:
    """Send only part of the model's gradient from now on; takes the arguments of `gradsieve.sparsify`.

    Args:
        accelerator: must use DDP; its `GradScaler`, if any, is picked up.
        model: as `accelerator.prepare` returned it.
    """
    check_ddp(accelerator)
    made = Gradients(model, (), *arguments, scaler=accelerator.scaler, way_out=_WAY_OUT, **options)
    _InCheckpoints(accelerator, made)
    return cast(Sieve, made.sieve)


def share(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *arguments: Any,
    **options: Any,
) -> ShareSieve:
    """Average the weights that drifted apart after every optimizer step; takes the arguments of `gradsieve.share`.

    A checkpoint's model file holds the agreed weights; each rank's own weights are stored beside it.

    Args:
        accelerator: must use DDP, which stops averaging gradients.
        model, optimizer: as `accelerator.prepare` returned them.
    """
    check_ddp(accelerator)
    made = Weights(model, optimizer, *arguments, scaler=accelerator.scaler, way_out=_WAY_OUT, **options)
    _InCheckpoints(accelerator, made)
    return made.sieve


class _InCheckpoints:
    """Hooks that save and load a sieve in `save_state` and `load_state`."""

    def __init__(self, accelerator: Accelerator, made: Gradients) -> None:
        self._accelerator, self._made = accelerator, made
        self._folder = Path()
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._find)
        # load_state calls this last, when model and optimizers already have rank 0's state.
        accelerator.register_for_checkpointing(self)

    def state_dict(self) -> dict[str, str]:
        """Only the folder's name: Accelerate saves rank 0's dict for all ranks. The folder holds the states."""
        return {"folder": self._folder.name}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        self._made.load(self._folder)

    def _save(self, models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        place = self._place(models)
        self._folder = Path(output_dir) / f"gradsieve_{place}"
        everywhere = self._accelerator.project_configuration.save_on_each_node
        self._made.save(self._folder, shared=not everywhere)
        if self._accelerator.is_local_main_process:
            weights[place] = self._made.agreed_copy(weights[place])

    def _find(self, models: list[nn.Module], input_dir: str) -> None:
        self._folder = Path(input_dir) / f"gradsieve_{self._place(models)}"
        self._made.check(self._folder)

    def _place(self, models: list[nn.Module]) -> int:
        for place, model in enumerate(models):
            if bare(model) is self._made.module:
                return place
        raise BadInput("model must be one that accelerator.prepare returned, got another: its state cannot be kept")


def check_ddp(accelerator: Accelerator) -> None:
    """Raise an error if the accelerator distributes the model by other means than DDP."""
    if not isinstance(accelerator, Accelerator):
        raise BadType(f"accelerator must be an Accelerator, got {type(accelerator).__name__}")
    kind = accelerator.distributed_type
    if kind in _OTHER:
        raise BadInput(
            f"accelerator must use DDP, got {kind.value}: leave its plugin out, or call gradsieve.share with the "
            "process group of the replicas and save the sieve beside save_state"
        )
