"""Experiment trackers: TensorBoard, W&B, MLflow. A record is written in any case."""

import importlib
import os
import re
from pathlib import Path
from typing import Any

from gradsieve._check import BadInput
from gradsieve_lab.runs.records import Line

_PLAIN = ("loss", "lr")
_OF_A_STEP = ("density", "imbalance", "buildup", "threshold", "residual_norm", "collectives")
_PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_EXTRAS = {"tensorboard": "tensorboard", "wandb": "integrations", "mlflow": "integrations"}


class Logger:
    """Base class of loggers, which itself logs nothing."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        """folder: of the run; name: of its method."""

    def add(self, scalars: dict[str, float], step: int) -> None:
        """Log the scalars of one step."""

    def close(self) -> None:
        """Write everything that was added."""

    def add_lines(self, lines: list[Line]) -> None:
        for line in lines:
            self.add(scalars_of(line), line["step"])


class TensorBoard(Logger):
    """Event files in the run's folder."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def add(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB(Logger):
    """A Weights & Biases run named after the folder; WANDB_MODE=offline keeps it in the folder."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        import wandb

        identity = re.sub(r"[^\w-]", "-", folder.resolve().name)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "gradsieve"),
                dir=str(folder),
                id=identity,
                name=folder.name,
                group=name,
                config=settings,
                resume="allow",
            )
        except wandb.errors.Error as problem:
            raise BadInput(f"wandb could not start: {problem}; log in, or set WANDB_MODE=offline") from problem

    def add(self, scalars: dict[str, float], step: int) -> None:
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        self._run.finish()


class MLflow(Logger):
    """An MLflow run, at MLFLOW_TRACKING_URI or in the run's folder."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder instead of a database
        from mlflow.tracking import MlflowClient

        place = os.environ.get("MLFLOW_TRACKING_URI") or (folder.resolve() / "mlruns").as_uri()
        self._client = MlflowClient(place)
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "gradsieve")
        known = self._client.get_experiment_by_name(title)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(title)
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, value)

    def add(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


LOGGERS: dict[str, type[Logger]] = {"": Logger, "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def need_logger(name: str) -> None:
    """Raise an error that names the extra to install if a tracker is missing."""
    if not name:
        return
    try:
        importlib.import_module(_PACKAGES[name])
    except ImportError:
        raise BadInput(f"--log {name} needs its package: pip install 'gradsieve[{_EXTRAS[name]}]'") from None


def scalars_of(line: Line) -> dict[str, float]:
    """The scalars of a record's line, named as in `report.scalars()`; unknown ones are left out."""
    if line["kind"] == "metric":
        return {"metric": line["value"]}
    found = {name: line[name] for name in _PLAIN}
    found |= {f"gradsieve/{name}": line[name] for name in _OF_A_STEP}
    found["gradsieve/ring_bytes"] = line["bytes"]
    known = {phase: seconds for phase, seconds in line["seconds"].items() if seconds is not None}
    found |= {f"gradsieve/{phase}_ms": 1e3 * seconds for phase, seconds in known.items()}
    return {name: value for name, value in found.items() if value is not None and value == value}
