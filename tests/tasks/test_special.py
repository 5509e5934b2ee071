"""What is special to single tasks, and real data sets where there are some."""

import importlib.util
import math
import os
import pickle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny import evaluate
from torch import nn

from gradsieve_lab.tasks import TASKS, DataError, bert, gpt, make_task
from gradsieve_lab.tasks._images import jitter
from gradsieve_lab.tasks._optimum import minimise

REAL = [(name, dataset) for name, task in TASKS.items() for dataset in task.DATASETS[1:]]
SIZES = {"mnist": 60_000, "cifar10": 50_000, "sst2": 60_614, "ml-100k": 99_057, "a9a": 32_561, "w8a": 49_749}


def test_minimum_of_a_small_problem() -> None:
    """Against plain Newton steps with the whole Hessian."""
    chance = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 6, generator=chance)
    signs = torch.where(torch.rand(50, generator=chance) < 0.5, -1.0, 1.0)
    found, value = minimise(rows, signs, 0.01)
    a, y, x = rows.double(), signs.double(), torch.zeros(6, dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(y * (a @ x))
        gradient = -a.T @ (y * (1 - p)) / 50 + 0.01 * x
        hessian = a.T @ ((p * (1 - p))[:, None] * a) / 50 + 0.01 * torch.eye(6, dtype=torch.float64)
        x = x - torch.linalg.solve(hessian, gradient)
    assert torch.allclose(found, x, rtol=0, atol=1e-12)
    assert value == pytest.approx(float(torch.log1p(torch.exp(-y * (a @ x))).mean() + 0.005 * x @ x), rel=1e-14)


def test_logreg_begins_a_shift_away_from_the_minimum() -> None:
    task = make_task("logreg", width=0.02, limit=300)
    data, model = task.load(), task.make_model()
    task.start(model)
    assert evaluate(task, model, data) > 1
    with torch.no_grad():
        next(model.parameters()).sub_(0.005 * 50)
    assert abs(evaluate(task, model, data)) < 1e-9


def test_logreg_smoothness() -> None:
    problem: Any = make_task("logreg", width=0.02, limit=300).problem  # type: ignore[attr-defined]
    largest = float(torch.linalg.matrix_norm(problem.rows.double(), 2))
    assert problem.smoothness == pytest.approx(largest**2 / 1200, rel=1e-5)


def test_logreg_reads_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.svm").write_text("1 1:1\n0 2:1\n1 1:2 2:1\n")
    task = make_task("logreg", dataset="mine.svm", data_dir=tmp_path)
    data = task.load()
    assert data.train[0].tolist() == [[1, 0], [0, 1], [2, 1]]
    assert evaluate(task, task.make_model(), data) > 0
    with pytest.raises(DataError, match="two classes in its first 1 rows"):
        make_task("logreg", dataset="mine.svm", data_dir=tmp_path, limit=1).load()
    (tmp_path / "zero.svm").write_text("1 1:0\n0 1:0\n")
    with pytest.raises(DataError, match="must hold a feature other than 0, got none"):
        make_task("logreg", dataset="zero.svm", data_dir=tmp_path).load()
    with pytest.raises(ValueError, match=r"width must be 1 with dataset mine.svm, got 0.5"):
        make_task("logreg", dataset="mine.svm", data_dir=tmp_path, width=0.5)


@pytest.mark.parametrize("name", ["mlp", "resnet", "vgg"])
def test_cifar_images(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(256, size=(4, 3072), dtype=np.uint8)
    for batch in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (folder / batch).write_bytes(pickle.dumps({b"data": pixels, b"labels": [0, 1, 2, 9]}))
    task = make_task(name, dataset="cifar10", data_dir=tmp_path, width=0.125)
    data = task.load()
    batch = task.batch(data, torch.arange(20), torch.Generator().manual_seed(0))
    assert batch[0].shape == (20, 3, 32, 32)
    assert math.isfinite(task.loss(task.make_model(), batch).item())


def test_jitter_moves_whole_images() -> None:
    images = torch.arange(1, 65).view(1, 1, 8, 8).repeat(50, 1, 1, 1)
    moved = jitter(images, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    signs = set()
    for image in moved[:, 0]:
        inside = image[(image > 0).any(1)][:, (image > 0).any(0)]
        assert min(inside.shape) >= 4
        steps = inside[:, 1:] - inside[:, :-1]
        assert len(steps.unique()) == 1
        signs.add(int(steps[0, 0]))
        assert bool((inside[1:] - inside[:-1] == 8).all())
    assert signs == {-1, 1}


def test_resnet18_on_digits() -> None:
    task = make_task("resnet", model="resnet18", width=0.125, limit=20)
    assert math.isfinite(task.loss(task.make_model(), task.load().train).item())


def test_tied_weights_are_one() -> None:
    tied, untied = (make_task("lstm", model=model, width=0.1, limit=10) for model in ("tied", "untied"))
    sizes = []
    for task in (tied, untied):
        task.load()
        sizes.append(len(list(task.make_model().parameters())))
    assert sizes[1] == sizes[0] + 1


def test_gpt_never_sees_the_future() -> None:
    model = gpt.Decoder(vocabulary=9, length=6, units=8).eval()
    tokens = torch.tensor([[1, 5, 7, 0, 2, 4]])
    changed = tokens.clone()
    changed[0, 3] = 8
    with torch.no_grad():
        before, after = model(tokens), model(changed)
        assert torch.allclose(model(tokens[:, :2]), before[:, :2], atol=1e-6)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


def test_gpt_begins_without_a_preference() -> None:
    """The first loss is that of a uniform guess, and the size is the one that docs and reports state."""
    task = make_task("gpt", limit=50)
    data, model = task.load(), task.make_model()
    vocabulary = int(cast(Any, task).vocabulary)
    assert task.loss(model, data.train).item() == pytest.approx(math.log(vocabulary), rel=0.02)
    assert sum(part.numel() for part in model.parameters()) == pytest.approx(350_000, rel=0.02)


def test_transformers_model() -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    task = make_task("bert", model="transformers", width=0.25, limit=50)
    data = task.load()
    task.loss(task.make_model(), data.train).backward()


def test_transformers_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'gradsieve\[transformers\]'$"):
        make_task("bert", model="transformers")


def test_padding_changes_nothing() -> None:
    model = bert.Encoder(9, 6, 8).eval()
    short, words = torch.tensor([[1, 5, 7, 0, 0, 0]]), torch.tensor([[1, 5, 7]])
    with torch.no_grad():
        padded = model(short)
        model.positions = nn.Parameter(model.positions[:3])
        assert torch.allclose(padded, model(words), atol=1e-6)


def test_ratings_file(tmp_path: Path) -> None:
    (tmp_path / "ml-100k").mkdir()
    lines = [f"{u}\t{i}\t3\t{u * i % 7}" for u in range(1, 5) for i in range(1, 12) if (u + i) % 2]
    (tmp_path / "ml-100k" / "u.data").write_text("\n".join(lines))
    task = make_task("ncf", dataset="ml-100k", data_dir=tmp_path)
    data = task.load()
    assert len(data.labels) == len(lines) - 4
    users, ranked = data.test
    trained = set(zip(*(part.tolist() for part in data.train), strict=True))
    for user, items in zip(users.tolist(), ranked.tolist(), strict=True):
        assert not trained & {(user, item) for item in items}
        assert items[0] not in items[1:]
    batch = task.batch(data, torch.arange(5), torch.Generator().manual_seed(0))
    assert batch[1].shape == (5, 5)


@pytest.mark.parametrize("lines", ["1\t1\t3\t0\n2\t2\t3\t0\n", "1\t1\t3\t0\n1\t2\t3\t0\n"])
def test_too_few_ratings(lines: str, tmp_path: Path) -> None:
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k" / "u.data").write_text(lines)
    with pytest.raises(DataError, match="dataset ml-100k must hold"):
        make_task("ncf", dataset="ml-100k", data_dir=tmp_path).load()


def test_no_number_is_no_hit() -> None:
    task = make_task("ncf", limit=50)
    data, model = task.load(), task.make_model()
    with torch.no_grad():
        for part in model.parameters():
            part.fill_(math.nan)
    assert task.score(model, data.test) == (0.0, 50)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dataset"), REAL)
def test_real_data(name: str, dataset: str) -> None:
    folder = os.environ.get("GRADSIEVE_DATA")
    if not folder:
        pytest.skip("GRADSIEVE_DATA, the folder of real data sets, is not set")
    try:
        task = make_task(name, dataset=dataset, data_dir=Path(folder))
    except DataError as error:
        pytest.skip(str(error))
    data = task.load()
    assert len(data.labels) == SIZES.get(dataset, len(data.labels))
    chance = torch.Generator().manual_seed(0)
    if name != "logreg":  # its first weights need the minimum
        loss = task.loss(task.make_model(), task.batch(data, torch.arange(4), chance))
        assert math.isfinite(loss.item())
