"""Every task in a tiny setting, and a plain loop to train it with."""

import hashlib
from typing import Any

import torch
from torch import nn

from gradsieve_lab.tasks import TASKS, Data, Task, make_task

TINY: dict[str, dict[str, Any]] = {
    "logreg": {"width": 0.01, "limit": 200},
    "mlp": {"limit": 500},
    "cnn": {"limit": 500},
    "resnet": {"width": 0.5, "limit": 500},
    "vgg": {"width": 0.125, "limit": 500},
    "lstm": {"width": 0.25, "limit": 500},
    "gpt": {"width": 0.25, "limit": 500},
    "bert": {"width": 0.5, "limit": 2000},
    "ncf": {"width": 0.5},
}
STEPS = {"bert": 250, "ncf": 200, "vgg": 60}
WORKERS = 4  # those a recipe is made for


def evaluate(task: Task, model: nn.Module, data: Data) -> float:
    model.eval()
    with torch.no_grad():
        scores = [
            task.score(model, tuple(part[i : i + 100] for part in data.test))
            for i in range(0, len(data.test[0]), 100)
        ]
    model.train()
    return task.value(sum(score for score, _ in scores) / sum(count for _, count in scores), model)


def train(task: Task, model: nn.Module, data: Data, steps: int) -> None:
    """One process with the batches of four, the learning rate rising and falling in a straight line."""
    recipe, chance = task.recipe, torch.Generator().manual_seed(0)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), recipe.lr)
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), recipe.lr, recipe.momentum)
    for step in range(steps):
        if recipe.decay != "constant":
            optimizer.param_groups[0]["lr"] = recipe.lr * min(
                1, (step + 1) / steps * 10, (steps - step) / steps * 2
            )
        indices = torch.randint(len(data.labels), (WORKERS * recipe.batch,), generator=chance)
        optimizer.zero_grad()
        task.loss(model, task.batch(data, indices, chance)).backward()
        optimizer.step()


def digest(task: Task) -> str:
    """Of all that a worker begins with."""
    data = task.load()
    total = hashlib.sha256()
    for part in (*data.train, *data.test, data.labels, *task.make_model().state_dict().values()):
        total.update(part.contiguous().numpy().tobytes())
    return total.hexdigest()


def digests() -> list[str]:
    return [digest(make_task(name, **TINY[name])) for name in TASKS if name != "logreg"]
