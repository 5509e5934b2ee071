"""TensorBoard, for those who ask for it."""

from pathlib import Path
from typing import Any

from gradsieve_lab.runs.records import Line

_SHOWN = ("loss", "lr", "density", "imbalance", "threshold", "residual_norm", "bytes")


class Board:
    """Shows the lines of a record; does nothing if it is not wanted."""

    def __init__(self, folder: Path, wanted: bool) -> None:
        self._writer: Any = None
        if wanted:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"))

    def add(self, lines: list[Line]) -> None:
        if self._writer is None:
            return
        for line in lines:
            if line["kind"] == "metric":
                self._writer.add_scalar("metric", line["value"], line["step"])
                continue
            for name in _SHOWN:
                if line[name] is not None:
                    self._writer.add_scalar(name, line[name], line["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
