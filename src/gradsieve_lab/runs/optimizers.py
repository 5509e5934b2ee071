"""The optimizer of a run, and its learning rate in every step."""

import math

import torch
from torch import nn

from gradsieve.share.adamw import ReplicaAdamW
from gradsieve_lab.runs.config import Config
from gradsieve_lab.runs.methods import has_momentum


def make_optimizer(model: nn.Module, settings: Config) -> torch.optim.Optimizer:
    if settings.optimizer == "adam" and settings.options.get("noise") == "averaged":
        decay = settings.weight_decay
        return ReplicaAdamW(model.parameters(), settings.lr, weight_decay=decay, workers=settings.workers)
    if settings.optimizer == "adam":
        return torch.optim.AdamW(model.parameters(), settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.SGD(
        model.parameters(),
        settings.lr,
        momentum=0.0 if has_momentum(settings.sparsifier) else settings.momentum,
        weight_decay=settings.weight_decay,
    )


def learning_rate(settings: Config, step: int) -> float:
    """The learning rate of a step: a linear warm-up, then constant or a cosine to zero.

    >>> run = Config("mlp", steps=100, lr=1.0, warm_up=0.1, decay="cosine")
    >>> [round(learning_rate(run, step), 3) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    warm_up = round(settings.warm_up * settings.steps)
    if step < warm_up:
        return settings.lr * (step + 1) / warm_up
    if settings.decay != "cosine":
        return settings.lr
    return settings.lr * (1 + math.cos(math.pi * (step - warm_up) / (settings.steps - warm_up))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
