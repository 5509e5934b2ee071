"""Training tasks small enough for a laptop, with embedded data, and with real data if available."""

from typing import Any

from gradsieve._check import one_of
from gradsieve_lab.tasks.base import Batch, Data, DataError, Metric, Recipe, Task
from gradsieve_lab.tasks.bert import BERT
from gradsieve_lab.tasks.cnn import CNN
from gradsieve_lab.tasks.gpt import GPT
from gradsieve_lab.tasks.logreg import LogReg
from gradsieve_lab.tasks.lstm import LSTM
from gradsieve_lab.tasks.mlp import MLP
from gradsieve_lab.tasks.ncf import NCF
from gradsieve_lab.tasks.resnet import ResNet
from gradsieve_lab.tasks.shards import shards
from gradsieve_lab.tasks.vgg import VGG

TASKS: dict[str, type[Task]] = {
    "logreg": LogReg,
    "mlp": MLP,
    "cnn": CNN,
    "resnet": ResNet,
    "vgg": VGG,
    "lstm": LSTM,
    "gpt": GPT,
    "bert": BERT,
    "ncf": NCF,
}


def make_task(name: str, **options: Any) -> Task:
    """
    >>> make_task("mlp", width=0.5).dataset
    'digits'
    """
    return TASKS[one_of("task", name, TASKS)](**options)


__all__ = [
    "TASKS",
    "Batch",
    "Data",
    "DataError",
    "Metric",
    "Recipe",
    "Task",
    "make_task",
    "shards",
]
