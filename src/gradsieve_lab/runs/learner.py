"""A model and the optimizer that trains it."""

import time
from typing import Any

from torch import nn

from gradsieve_lab.runs.config import Config
from gradsieve_lab.runs.optimizers import make_optimizer, set_learning_rate


class Learner:
    """One copy of the model, with its own optimizer."""

    def __init__(self, model: nn.Module, settings: Config) -> None:
        self.model, self.clip = model, settings.clip
        self.optimizer = make_optimizer(model, settings)

    def update(self, lr: float) -> float:
        """Take an optimizer step with the gradients in `.grad`; returns its seconds."""
        started = time.perf_counter()
        set_learning_rate(self.optimizer, lr)
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return time.perf_counter() - started

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, which may come from a checkpoint."""
        self.model.load_state_dict(state["model"])
        optimizer = state["optimizer"]
        # JSON turned the parameters' numbers into strings.
        numbered = {int(key): value for key, value in optimizer["state"].items()}
        self.optimizer.load_state_dict({**optimizer, "state": numbered})
