"""The settings of a run, as given by the user: same settings, same run."""

import math
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gradsieve._check import BadInput, at_least, fraction, number, one_of, positive
from gradsieve_lab.netlab.rates import DEFAULT_RATE, Link, parse_links
from gradsieve_lab.runs.loggers import LOGGERS
from gradsieve_lab.runs.methods import AVERAGE, PEERS, STEADY, Method
from gradsieve_lab.tasks import TASKS, Task, make_task

OPTIMIZERS, DECAYS = ("sgd", "adam"), ("cosine", "constant")
_LIMITS = {
    "seconds": math.inf,
    "skew": 1.0,
    "momentum": 1.0,
    "warm_up": 1.0,
    "weight_decay": math.inf,
    "clip": math.inf,
}


@dataclass(frozen=True)
class Settings:
    """A user's settings of one run. Zero, empty or None leave the choice to the task's recipe: see `Config`."""

    task: str
    sparsifier: str = "exdyna"
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    values: str = "fp32"
    density: float = 0.01
    spend: str = STEADY
    dense_steps: int = 0
    workers: int = 4
    virtual: bool = False
    lab_hosts: int = 0  # in network namespaces; 0: no lab
    lab_rate: str = ""
    dataset: str = ""
    data_dir: str = ""
    model: str = ""
    width: float = 1.0
    limit: int = 0
    skew: float = 0.0
    steps: int = 0
    seconds: float = 0.0  # of training, after which a run ends at any step; 0: no limit
    batch: int = 0
    optimizer: str = ""
    lr: float = 0.0
    momentum: float | None = None
    weight_decay: float | None = None
    clip: float | None = None  # largest gradient norm; 0: no limit
    warm_up: float | None = None
    decay: str = ""
    seed: int = 0
    eval_every: int = 0
    checkpoint_every: int = 0
    save: bool = True  # leave a checkpoint when the run ends or is stopped
    log: str = ""  # an experiment tracker
    timeout: float = 300.0  # seconds that workers wait for each other

    def __post_init__(self) -> None:
        fraction("density", self.density)
        at_least("workers", self.workers, 1)
        positive("timeout", self.timeout)
        for name in ("lab_hosts", "dense_steps", "steps", "batch", "seed", "eval_every", "checkpoint_every"):
            at_least(name, getattr(self, name), 0)
        one_of("log", self.log, LOGGERS)
        if self.optimizer:
            one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.decay:
            one_of("decay", self.decay, DECAYS)
        if self.lr:
            positive("lr", self.lr)
        for name, most in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not 0 <= number(name, value) <= most:
                rule = f"in [0, {most:g}]" if most < math.inf else "at least 0"
                raise BadInput(f"{name} must be {rule}, got {value}")
        if self.virtual and self.sparsifier in PEERS:
            raise BadInput(
                f"{self.sparsifier} is torch's own hook and needs real processes: leave it or --virtual out"
            )
        if self.sparsifier == AVERAGE and self.options.get("every") is None:
            raise BadInput(
                "average needs the number of steps from one average to the next, such as average:every=100; "
                "only compare can choose it"
            )
        self._check_lab()

    def _check_lab(self) -> None:
        if self.lab_rate and not self.lab_hosts:
            raise BadInput(f"lab_rate needs --lab-hosts beside it, got {self.lab_rate} alone")
        if self.lab_hosts and self.virtual:
            raise BadInput("lab_hosts needs real processes: leave it or --virtual out")
        if self.lab_hosts:
            self.links()
            if self.workers % self.lab_hosts:
                raise BadInput(
                    f"workers must be a multiple of the lab's {self.lab_hosts} hosts, got {self.workers}"
                )

    def links(self) -> list[Link]:
        """The links of the lab's hosts."""
        return parse_links(self.lab_rate or DEFAULT_RATE, self.lab_hosts)

    def with_method(self, method: Method) -> "Settings":
        """The same run with another method."""
        return replace(
            self,
            sparsifier=method.name,
            options=method.options,
            label=method.label,
            density=method.density,
            values=method.values,
            spend=method.spend,
        )

    def make_task(self) -> Task:
        """Make the task, with data from `data_dir`, or else from $GRADSIEVE_DATA.

        With a folder but no data set, the task's first real data set found there is used.
        """
        folder = self.data_dir or os.environ.get("GRADSIEVE_DATA", "")
        one_of("task", self.task, TASKS)
        real = TASKS[self.task].DATASETS[1:]
        names = real if self.data_dir and not self.dataset else (self.dataset,)
        problems: list[BadInput] = []
        for name in names:
            try:
                return make_task(
                    self.task,
                    dataset=name,
                    data_dir=Path(folder) if folder else None,
                    model=self.model,
                    width=self.width,
                    limit=self.limit,
                    seed=self.seed,
                )
            except BadInput as problem:
                problems.append(problem)
        raise problems[0]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Settings":
        """Settings read from a record; unknown names are rejected."""
        values = dict(values)
        if values.pop("tensorboard", False):  # its name in records of version 1
            values["log"] = "tensorboard"
        for name in values:
            one_of("setting", name, [known.name for known in fields(cls)])
        return cls(**values)
