"""What every task promises, in a tiny setting of it."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import STEPS, TINY, digest, digests, evaluate, train

from gradsieve_lab.tasks import TASKS, DataError, make_task

every_task = pytest.mark.parametrize("name", list(TASKS))


@every_task
def test_same_data_and_model_twice(name: str) -> None:
    torch.manual_seed(1)
    first = digest(make_task(name, **TINY[name]))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert digest(make_task(name, **TINY[name])) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert digest(make_task(name, **TINY[name], seed=1)) != first


@pytest.mark.slow
def test_same_in_another_process() -> None:
    script = "import torch; torch.set_num_threads(2); import tiny; print(*tiny.digests())"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path}
    other = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert other.stdout.split() == digests()


@every_task
def test_examples_have_one_length(name: str) -> None:
    task = make_task(name, **TINY[name])
    data = task.load()
    assert {len(part) for part in data.train} == {len(data.labels)}
    assert len({len(part) for part in data.test}) == 1
    assert not data.labels.is_floating_point()
    if task.limit:
        assert len(data.labels) == task.limit
        assert len(data.test[0]) <= task.limit


@every_task
def test_every_weight_has_a_gradient(name: str) -> None:
    task = make_task(name, **TINY[name])
    data, model = task.load(), task.make_model()
    loss = task.loss(model, task.batch(data, torch.arange(8), torch.Generator().manual_seed(0)))
    assert loss.shape == ()
    assert math.isfinite(loss.item())
    loss.backward()
    assert all(part.grad is not None and bool(part.grad.isfinite().all()) for part in model.parameters())


@every_task
def test_scores_add_up(name: str) -> None:
    task = make_task(name, **TINY[name])
    data, model = task.load(), task.make_model().eval()
    with torch.no_grad():
        whole, half, rest = (
            task.score(model, tuple(p[a:b] for p in data.test)) for a, b in [(0, 60), (0, 25), (25, 60)]
        )
    assert whole[1] == half[1] + rest[1]
    assert whole[0] == pytest.approx(half[0] + rest[0], rel=1e-4)


@every_task
def test_chance_comes_from_the_generator(name: str) -> None:
    task = make_task(name, **TINY[name])
    data, indices = task.load(), torch.arange(8)
    first = task.batch(data, indices, torch.Generator().manual_seed(3))
    again = task.batch(data, indices, torch.Generator().manual_seed(3))
    assert all(map(torch.equal, first, again))


@every_task
def test_training_helps(name: str) -> None:
    task = make_task(name, **TINY[name])
    data, model = task.load(), task.make_model()
    task.start(model)
    before = evaluate(task, model, data)
    train(task, model, data, STEPS.get(name, 40))
    after = evaluate(task, model, data)
    assert math.isfinite(after)
    if task.METRIC.higher_is_better:
        assert after > before + 0.15
    else:
        assert after < before / 2


@every_task
def test_options_are_checked(name: str) -> None:
    for options, message in [
        ({"model": "x"}, "model must be one of .*, got 'x'"),
        ({"dataset": "x"}, "dataset must be one of .*, got 'x'"),
        ({"width": 0}, "width must be positive and finite, got 0"),
        ({"limit": -1}, "limit must be at least 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_task(name, **options)


@every_task
def test_missing_files_are_named_at_once(name: str, tmp_path: Path) -> None:
    for dataset in TASKS[name].DATASETS[1:]:
        with pytest.raises(DataError, match=f"must be in the data folder {tmp_path}, got no such file"):
            make_task(name, dataset=dataset, data_dir=tmp_path)
        with pytest.raises(DataError, match=f"dataset {dataset} needs a data folder"):
            make_task(name, dataset=dataset)


def test_unknown_task() -> None:
    with pytest.raises(ValueError, match=r"task must be one of logreg, mlp, .*, got 'vit'"):
        make_task("vit")
