"""The training loop, the same for real and virtual workers."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from gradsieve_lab.launch import Post
from gradsieve_lab.runs.config import Config
from gradsieve_lab.runs.engines import Engine
from gradsieve_lab.runs.loggers import LOGGERS
from gradsieve_lab.runs.optimizers import learning_rate
from gradsieve_lab.runs.records import Line, Recorder, Run
from gradsieve_lab.runs.step_record import Measured, Stepped, StepRecord

_AGREE_EVERY_S = 0.5  # about how often workers exchange records and stop requests
_MOST_STEPS = 50  # between two of these exchanges
EVALUATIONS = 10  # of a run that is limited in time


@dataclass(frozen=True)
class Starting:
    """Sent before a run starts its workers; the first `Progress` follows once they train."""

    label: str
    workers: int


@dataclass(frozen=True)
class Progress:
    """Progress of a run, for the live display."""

    label: str
    step: int
    steps: int
    loss: float
    metric: float | None
    density: float
    bytes: float
    seconds: float
    limit: float = 0.0  # seconds after which the run ends; 0: after its last step

    @property
    def fraction(self) -> float:
        """How much of the run is done, in [0, 1]."""
        return min(1.0, max(self.step / self.steps, self.seconds / self.limit if self.limit else 0.0))

    @property
    def over(self) -> bool:
        return self.fraction == 1.0


class Training:
    """One run from its first or next step to its end. Every process of the run has one; the leader's writes."""

    def __init__(self, engine: Engine, settings: Config, folder: Path, post: Post) -> None:
        self.engine, self.settings, self.folder, self.post = engine, settings, folder, post
        self.recorder = Recorder(folder)
        self.done = 0
        self.stopping = False
        self.bytes = self.seconds = 0.0
        self.metric: float | None = None
        self._evaluated = 0.0  # seconds at the last evaluation
        self._waiting: list[tuple[int, float, Stepped]] = []
        self._agree_after = 1  # steps

    def run(self) -> str:
        """Train; returns how it ended: finished or stopped."""
        settings = self.settings
        kind = LOGGERS[settings.log if self.engine.leads else ""]
        self.logger = kind(self.folder, settings.label or settings.sparsifier, settings.as_dict())
        if self.done == 0:
            self._evaluate()
        self._counted = self._counter()
        while not self._over() and not self.stopping:
            self._step(self.done)
            self.done += 1
            due = self.done % settings.eval_every == 0 and not settings.seconds
            saving = settings.checkpoint_every and self.done % settings.checkpoint_every == 0
            if due or saving or self.done == settings.steps or len(self._waiting) >= self._agree_after:
                self._agree()
            last = self._over()
            if due or last or self._evaluation_is_due():
                self._evaluate()
            if settings.save and (saving or self.stopping or last):
                self.save()
        reason = "finished" if self._over() else "stopped"
        if self.engine.leads:
            self.recorder.add([{"kind": "end", "reason": reason, "step": self.done}])
        self.logger.close()
        return reason

    def _over(self) -> bool:
        """Whether the last step is done or the time is up; the same on all workers."""
        settings = self.settings
        return self.done == settings.steps or 0 < settings.seconds <= self.seconds

    def _evaluation_is_due(self) -> bool:
        """Whether the next evaluation of a run that is limited in time is due."""
        return self.settings.seconds > 0 and self.seconds >= self._evaluated + self.settings.seconds / EVALUATIONS

    def _step(self, step: int) -> None:
        lr = learning_rate(self.settings, step)
        done = self.engine.step(step, lr)
        before, self._counted = self._counted, self._counter()
        self._waiting.append((step, lr, done.with_measured(wire_bytes=self._counted - before)))

    def _counter(self) -> float:
        """Bytes sent by this host, counted by its interface; NaN outside a lab."""
        return float(self.post.place.sent()[0]) if self.settings.lab_hosts else math.nan

    def _agree(self) -> None:
        """Average what the workers measured, record it, and check whether any of them wants to stop."""
        waiting, self._waiting = self._waiting, []
        rows = torch.tensor([done.measured.to_row() for _, _, done in waiting], dtype=torch.float64)
        wish = torch.tensor([float(self.post.stop_requested())], dtype=torch.float64)
        replies = self.engine.mean(torch.cat([rows.flatten(), wish]))
        self.stopping = bool(replies[-1] > 0)
        means = [Measured(*row) for row in replies[:-1].view(rows.shape).tolist()]
        records = [
            StepRecord.of(step, lr, done.exchange, mean)
            for (step, lr, done), mean in zip(waiting, means, strict=True)
        ]
        spent = sum(mean.step_s for mean in means)
        self._agree_after = min(_MOST_STEPS, max(1, round(_AGREE_EVERY_S * len(means) / max(spent, 1e-9))))
        self.seconds += spent
        self.bytes += sum(mean.bytes for mean in means)
        if self.engine.leads:
            self._record([record.to_line() for record in records])
            self._show(records[-1])

    def _record(self, lines: list[Line]) -> None:
        self.recorder.add(lines)
        self.logger.add_lines(lines)

    def _show(self, last: StepRecord) -> None:
        settings = self.settings
        self.post.tell(
            Progress(
                label=settings.label or settings.sparsifier,
                step=self.done,
                steps=settings.steps,
                loss=math.nan if last.loss is None else last.loss,
                metric=self.metric,
                density=last.density,
                bytes=self.bytes,
                seconds=self.seconds,
                limit=settings.seconds,
            )
        )

    def _evaluate(self) -> None:
        self.metric, self._evaluated = self.engine.evaluate(), self.seconds
        if self.engine.leads:
            assert self.metric is not None
            line = {"kind": "metric", "step": self.done, "value": self.metric}
            self._record([{**line, "bytes": self.bytes, "seconds": self.seconds}])

    def save(self) -> None:
        """Save everything that the next step needs."""
        self.engine.save(self.folder / "checkpoint", self.done)

    def load(self) -> int:
        """Load the checkpoint; returns how many steps were done."""
        self.done = self.engine.load(self.folder / "checkpoint")
        return self.done

    def go_on(self, record: Run) -> None:
        """Restore totals from what was recorded up to the checkpoint."""
        self.bytes = sum(step.bytes for step in record.steps)
        self.seconds = sum(step.seconds.get("step") or 0.0 for step in record.steps)
        if record.metrics:
            self.metric = record.metrics[-1]["value"]
