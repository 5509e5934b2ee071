"""Methods and settings: bad ones are refused before anything starts."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from gradsieve import SPARSIFIERS
from gradsieve_lab.runs.config import Config, resolve
from gradsieve_lab.runs.feed import Feed
from gradsieve_lab.runs.methods import parse_method, parse_methods
from gradsieve_lab.runs.optimizers import learning_rate, make_optimizer
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.tasks import make_task
from gradsieve_lab.tasks.shards import shards


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exdina", "got 'exdina': did you mean exdyna?"),
        ("cltk:beta", "an option of a sparsifier must be written name=value, got 'beta'"),
        ("cltk:alpha=1", "option of cltk must be one of beta, got 'alpha'"),
        ("cltk:beta=7", "beta must be"),
        ("topk:density=2", "density must be in (0, 1], got 2"),
        ("powersgd:rank=0", "rank must be at least 1, got 0"),
        ("powersgd:start=1", "start must be at least 2, got 1"),
        ("fp16:rank=1", "option of fp16 must be one of (none), got 'rank'"),
        ("topk,topk", "sparsifiers must be named once each, got topk again"),
        (" , ", "sparsifiers must name one at least"),
    ],
)
def test_bad_methods(text: str, words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        parse_methods(text, 0.01)
    assert words in str(caught.value)


def test_methods_that_send_everything_say_so() -> None:
    assert [parse_method(name, 0.01).density for name in ("dense", "fp16", "powersgd", "topk")] == [1, 1, 1, 0.01]


def test_momentum_is_applied_once() -> None:
    """Where the sparsifier has it, the optimizer has none; Adam's is no SGD momentum."""
    model = torch.nn.Linear(2, 2)
    for name, optimizer, sparsifiers, theirs in (
        ("dgc", "sgd", {"momentum": 0.8}, 0.0),
        ("dgc", "adam", {"momentum": 0.0}, None),
        ("topk", "sgd", {}, 0.8),
        ("powersgd", "sgd", {}, 0.8),
    ):
        run = Config("mlp", sparsifier=name, optimizer=optimizer, lr=0.1, momentum=0.8)
        assert run.all_options() == sparsifiers
        assert make_optimizer(model, run).param_groups[0].get("momentum") == theirs
    assert Config("mlp", sparsifier="dgc", options={"momentum": 0.5}).all_options() == {"momentum": 0.5}


def test_all_sparsifiers_can_be_named() -> None:
    assert [method.name for method in parse_methods(",".join(SPARSIFIERS), 0.01)] == list(SPARSIFIERS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"steps": -1}, "steps must be at least 0, got -1"),
        ({"skew": 1.5}, "skew must be in [0, 1], got 1.5"),
        ({"momentum": -0.1}, "momentum must be in [0, 1], got -0.1"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
        ({"clip": -1.0}, "clip must be at least 0, got -1.0"),
        ({"optimizer": "adamw"}, "optimizer must be one of sgd, adam, got 'adamw'"),
        ({"lr": float("nan")}, "lr must be positive and finite, got nan"),
        ({"decay": "linear"}, "decay must be one of cosine, constant"),
        ({"sparsifier": "powersgd", "virtual": True}, "powersgd is torch's own hook and needs real processes"),
    ],
)
def test_bad_settings(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        Settings("mlp", **changes)
    assert words in str(caught.value)


def test_settings_survive_a_record() -> None:
    settings = Settings("mlp", options={"beta": 0.5}, sparsifier="cltk", skew=0.5)
    assert Settings.from_dict(settings.as_dict()) == settings
    with pytest.raises(ValueError, match="setting must be one of"):
        Settings.from_dict({"task": "mlp", "colour": "red"})


def test_the_learning_rate_follows_the_batch() -> None:
    task = make_task("mlp")
    rates = [resolve(Settings("mlp", workers=workers), task).lr for workers in (4, 8)]
    assert rates[1] == pytest.approx(2 * rates[0])
    adam = [resolve(Settings("mlp", workers=workers, optimizer="adam"), task).lr for workers in (4, 8)]
    assert adam[1] == pytest.approx(2**0.5 * adam[0])
    assert resolve(Settings("mlp", workers=8, lr=0.3), task).lr == 0.3


def test_the_learning_rate_ends_at_zero_and_never_jumps() -> None:
    run = Config("mlp", steps=200, lr=0.5, warm_up=0.1, decay="cosine")
    rates = [learning_rate(run, step) for step in range(200)]
    assert max(rates) == 0.5
    assert rates[-1] < 1e-3
    assert max(abs(b - a) for a, b in pairwise(rates)) < 0.026


def test_an_epoch_shows_every_example_once() -> None:
    task = make_task("mlp", limit=64)
    data = task.load()
    piece = shards(data.labels, 4, 0.0, 0)[2]
    feeds = [Feed(task, data, piece, batch=5, seed=3, rank=2) for _ in range(2)]
    assert feeds[0].steps_per_epoch == 3
    epochs = []
    for epoch in range(2):
        images = [tuple(image.flatten().tolist()) for s in range(3) for image in feeds[0].batch(3 * epoch + s)[0]]
        assert len(set(images)) == len(images) == 15
        epochs.append(images)
    assert epochs[0] != epochs[1]
    again = feeds[1].batch(5)[0]  # straight to the sixth step
    assert [tuple(image.flatten().tolist()) for image in again] == epochs[1][10:]
    with pytest.raises(ValueError, match="batch must be at most 16, the examples of one worker, got 17"):
        Feed(task, data, piece, batch=17, seed=0, rank=0)
