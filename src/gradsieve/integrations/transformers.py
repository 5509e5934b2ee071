"""Hugging Face Transformers: `Trainer(..., callbacks=[GradsieveCallback(density=1e-3)])`.

Every rank's state is in the Trainer's own checkpoints, and the metrics of each step are in its logs.
"""

import inspect
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gradsieve._check import BadInput, one_of
from gradsieve.ddp import Sieve
from gradsieve.integrations.common import MODES, Gradients, need
from gradsieve.share import ShareSieve

need("transformers")
need("accelerate")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gradsieve.integrations.accelerate import check_ddp

_WAY_OUT = "start the script with torchrun or `accelerate launch`, with 2 or more processes"


class GradsieveCallback(TrainerCallback):
    """Callback that makes a `Trainer` send only part of the gradient, or of the weights.

    With `mode="weights"`, evaluations and saved models use the agreed weights, and all replicas are equal after
    training. `sieve` is set from the first step on.

    Args:
        mode: "gradients" (`gradsieve.sparsify`) or "weights" (`gradsieve.share`).
        options: options of `gradsieve.sparsify` or `gradsieve.share`, such as sparsifier and density.
    """

    def __init__(self, mode: str = "gradients", **options: Any) -> None:
        self.mode, self.options = one_of("mode", mode, MODES), options
        self._made: Gradients | None = None
        self._agreed = ExitStack()

    @property
    def sieve(self) -> Sieve | ShareSieve | None:
        return None if self._made is None else self._made.sieve

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer, resumed = _caller()
        check_ddp(trainer.accelerator)
        if state.is_hyper_param_search:
            raise BadInput(
                "GradsieveCallback must not be used in hyperparameter_search: leave it out of that Trainer"
            )
        if self._made is None or not self._made.serves(trainer.model_wrapped):
            scaler = trainer.accelerator.scaler
            kind, optimizer = MODES[self.mode], kwargs["optimizer"]
            self._made = kind(trainer.model_wrapped, optimizer, scaler=scaler, way_out=_WAY_OUT, **self.options)
        if resumed:
            self._made.load(Path(resumed) / "gradsieve")
        handler = trainer.callback_handler
        others = [each for each in handler.callbacks if not isinstance(each, _Scalars)]
        # A new list: the handler is iterating over the old one. First, to run before the reporting callbacks.
        handler.callbacks = [_Scalars(self._made), *others]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._agreed.close()
        if self._made is not None and (control.should_evaluate or control.should_save):
            self._agreed.enter_context(self._made.agreed())

    on_epoch_end = on_step_end

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._agreed.close()

    on_epoch_begin = on_step_begin

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._agreed.close()
        if self._made is not None and not args.save_only_model:
            checkpoint = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._made.save(checkpoint / "gradsieve", shared=not args.save_on_each_node)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "train_runtime" in logs:  # training has ended; the best model is loaded next
            self._agreed.close()
            if self._made is not None:
                self._made.finish()
                self._made.close()


class _Scalars(TrainerCallback):
    """Callback that adds the last step's metrics to the Trainer's logs."""

    def __init__(self, made: Gradients) -> None:
        self._made = made

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        report = self._made.sieve.report
        if logs is not None and "loss" in logs and report is not None:
            logs |= report.scalars()
            state.log_history[-1] |= report.scalars()


def _caller() -> tuple[Trainer, str | None]:
    """Find the Trainer whose `train` is running, and the folder it resumes from: callbacks receive neither."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "train" and isinstance(owner, Trainer):
            return owner, frame.f_locals.get("resume_from_checkpoint")
        frame = frame.f_back
    raise RuntimeError("GradsieveCallback must be called by Trainer.train")
