"""The training loop, the same for real and virtual workers."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from gradsieve_lab.launch import Post
from gradsieve_lab.runs.engines import Engine
from gradsieve_lab.runs.facts import OWN, SECONDS, Facts
from gradsieve_lab.runs.loggers import LOGGERS
from gradsieve_lab.runs.optimizers import learning_rate
from gradsieve_lab.runs.records import Line, Recorder, Run
from gradsieve_lab.runs.settings import Settings

_AGREE_EVERY_S = 0.5  # workers talk about records and stopping about so often
_MOST_STEPS = 50  # and after so many steps at the latest


@dataclass(frozen=True)
class Progress:
    """What a person who waits wants to know."""

    label: str
    step: int
    steps: int
    loss: float
    metric: float | None
    density: float
    bytes: float
    seconds: float


class Training:
    """One run from its first or next step to its end. Every process of the run has one; the leader's records."""

    def __init__(self, engine: Engine, settings: Settings, folder: Path, post: Post) -> None:
        self.engine, self.settings, self.folder, self.post = engine, settings, folder, post
        self.recorder = Recorder(folder)
        self.done = 0
        self.stopping = False
        self.bytes = self.seconds = 0.0
        self.metric: float | None = None
        self._waiting: list[tuple[int, Facts]] = []
        self._patience = 1

    def run(self) -> str:
        """Train; returns how it ended: finished or stopped."""
        settings = self.settings
        kind = LOGGERS[settings.log if self.engine.leads else ""]
        self.logger = kind(self.folder, settings.label or settings.sparsifier, settings.as_dict())
        if self.done == 0:
            self._evaluate()
        self._counted = self._counter()
        while self.done < settings.steps and not self.stopping:
            self._step(self.done)
            self.done += 1
            last, due = self.done == settings.steps, self.done % settings.eval_every == 0
            saving = settings.checkpoint_every and self.done % settings.checkpoint_every == 0
            if last or due or saving or len(self._waiting) >= self._patience:
                self._agree()
            if due or last:
                self._evaluate()
            if settings.save and (saving or self.stopping or last):
                self.save()
        reason = "finished" if self.done == settings.steps else "stopped"
        if self.engine.leads:
            self.recorder.add([{"kind": "end", "reason": reason, "step": self.done}])
        self.logger.close()
        return reason

    def _step(self, step: int) -> None:
        lr = learning_rate(self.settings, step)
        facts = self.engine.step(step, lr)
        before, self._counted = self._counted, self._counter()
        facts.own["wire_bytes"] = self._counted - before
        facts.shared["lr"] = lr
        self._waiting.append((step, facts))

    def _counter(self) -> float:
        """What this host has sent by its interface's own count, if it is one of a lab."""
        return float(self.post.place.sent()[0]) if self.settings.lab_hosts else math.nan

    def _agree(self) -> None:
        """Average what the workers measured, record it, and find out whether anyone wants to stop."""
        rows = [[facts.own[name] for name in OWN] for _, facts in self._waiting]
        flat = torch.tensor(rows, dtype=torch.float64).flatten()
        told = self.engine.mean(
            torch.cat([flat, torch.tensor([float(self.post.stop_requested())], dtype=torch.float64)])
        )
        means, self.stopping = told[:-1].view(-1, len(OWN)).tolist(), bool(told[-1] > 0)
        lines = [self._line(step, facts, mean) for (step, facts), mean in zip(self._waiting, means, strict=True)]
        self._waiting = []
        spent = sum(line["seconds"]["step"] for line in lines)
        self._patience = min(_MOST_STEPS, max(1, round(_AGREE_EVERY_S * len(lines) / max(spent, 1e-9))))
        self.seconds += spent
        self.bytes += sum(line["bytes"] for line in lines)
        if self.engine.leads:
            self._record(lines)
            self._show(lines[-1])

    def _line(self, step: int, facts: Facts, mean: list[float]) -> Line:
        own = dict(zip(OWN, mean, strict=True))
        seconds = {name: own.pop(name) for name in SECONDS}
        return {"kind": "step", "step": step, **facts.shared, **own, "seconds": seconds}

    def _record(self, lines: list[Line]) -> None:
        self.recorder.add(lines)
        self.logger.add_lines(lines)

    def _show(self, last: Line) -> None:
        settings = self.settings
        self.post.tell(
            Progress(
                label=settings.label or settings.sparsifier,
                step=self.done,
                steps=settings.steps,
                loss=last["loss"],
                metric=self.metric,
                density=last["density"],
                bytes=self.bytes,
                seconds=self.seconds,
            )
        )

    def _evaluate(self) -> None:
        self.metric = self.engine.evaluate()
        if self.engine.leads:
            assert self.metric is not None
            line = {"kind": "metric", "step": self.done, "value": self.metric}
            self._record([{**line, "bytes": self.bytes, "seconds": self.seconds}])

    def save(self) -> None:
        """A checkpoint of everything that the next step needs."""
        self.engine.save(self.folder / "checkpoint", self.done)

    def load(self) -> int:
        """Take everything from the checkpoint; returns how many steps it had done."""
        self.done = self.engine.load(self.folder / "checkpoint")
        return self.done

    def go_on(self, record: Run) -> None:
        """Count on from what was recorded up to the checkpoint."""
        self.bytes = sum(line["bytes"] for line in record.steps)
        self.seconds = sum(line["seconds"]["step"] for line in record.steps)
        if record.metrics:
            self.metric = record.metrics[-1]["value"]
