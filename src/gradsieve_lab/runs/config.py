"""The complete configuration of a run: the user's settings, completed by the task's recipe."""

from dataclasses import dataclass, fields
from typing import Any

from gradsieve.density import Budget
from gradsieve_lab.runs.methods import ALONE, as_spent, has_momentum
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.tasks import Task

_EVALUATIONS = 20  # per run, by default
_FROM_RECIPE = ("momentum", "weight_decay", "warm_up", "clip")


@dataclass(frozen=True)
class Config(Settings):
    """Settings in which every field has its final value, for engines; made by `resolve`."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    warm_up: float = 0.0

    def all_options(self) -> dict[str, Any]:
        """The sparsifier's options, with SGD's momentum if the sparsifier applies it."""
        if not has_momentum(self.sparsifier):
            return self.options
        return {"momentum": self.momentum if self.optimizer == "sgd" else 0.0, **self.options}

    def make_density(self) -> float | Budget:
        """The density for the reducer: one for every step, or a budget for the run."""
        return as_spent(self.density, self.spend, self.steps)


def resolve(settings: Settings, task: Task) -> Config:
    """Fill in missing settings from the task's recipe, with the learning rate scaled to the batch."""
    recipe = task.recipe
    batch, steps = settings.batch or recipe.batch, settings.steps or recipe.steps
    together = 1 if settings.sparsifier == ALONE else settings.workers  # workers whose examples a step uses
    scale = batch * together / recipe.base_batch if recipe.base_batch and not settings.lr else 1.0
    # Adam's steps do not grow with the gradient: its rate follows the noise, hence the square root.
    optimizer = settings.optimizer or recipe.optimizer
    given = {each.name: getattr(settings, each.name) for each in fields(settings)}
    chosen = {name: getattr(recipe, name) if given[name] is None else given[name] for name in _FROM_RECIPE}
    decided = {
        "dataset": task.dataset,
        "model": task.model,
        "batch": batch,
        "steps": steps,
        "optimizer": optimizer,
        "lr": settings.lr or recipe.lr * (scale**0.5 if optimizer == "adam" else scale),
        "decay": settings.decay or recipe.decay,
        "eval_every": settings.eval_every or max(1, round(steps / _EVALUATIONS)),
    }
    return Config(**{**given, **chosen, **decided})
