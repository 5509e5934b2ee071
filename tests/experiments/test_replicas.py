"""Replicas of their own: training alone, plain averages of all weights, and those that drifted farthest."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_training import TINY, StopAfter, train, whole_settings, without

from gradsieve_lab.runs.comparing import check, compare, with_equal_bytes
from gradsieve_lab.runs.methods import parse_method, parse_methods
from gradsieve_lab.runs.running import Stop
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.runs.summary import dense_bytes, summarise

PLAIN = replace(TINY, optimizer="sgd", momentum=0.0, lr=0.05)


def with_method(settings: Settings, method: str) -> Settings:
    return settings.with_method(parse_method(method, 0.05))


def replicas(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The weights and buffers of every worker in the last checkpoint."""
    parts = [load_file(part) for part in sorted(folder.glob("checkpoint/step-*/rank-*.safetensors"))]
    return [{name: value for name, value in part.items() if "/model/" in name} for part in parts]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert one
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


METHODS = ["alone", "average:every=5", "share", "share:delay=1:every=2:values=fp8"]


@pytest.mark.parametrize("method", METHODS)
def test_one_worker_is_plain_training(tmp_path: Path, method: str) -> None:
    settings = replace(TINY, workers=1)
    ours, plain = (train(with_method(settings, name), tmp_path / name[:5]) for name in (method, "dense"))
    assert [line.loss for line in ours.steps] == [line.loss for line in plain.steps]
    assert [line["value"] for line in ours.metrics] == [line["value"] for line in plain.metrics]


def test_an_average_in_every_step_of_plain_sgd_is_dense(tmp_path: Path) -> None:
    ours, plain = (train(with_method(PLAIN, name), tmp_path / name[:5]) for name in ("average:every=1", "dense"))
    assert [line.loss for line in ours.steps] == pytest.approx([line.loss for line in plain.steps], rel=1e-5)
    assert ours.steps[-1].bytes == pytest.approx(dense_bytes(ours), rel=1e-3)


def test_alone_sends_nothing(tmp_path: Path) -> None:
    done = train(with_method(TINY, "alone"), tmp_path / "run")
    row = summarise(done)
    assert (row.bytes_total, row.density_mean, row.collectives_per_step, row.compression) == (0, 0, 0, None)
    assert len(replicas(tmp_path / "run")) == 1  # the others could not change the metric


def test_averages_are_due_every_so_many_steps_and_last(tmp_path: Path) -> None:
    done = train(with_method(TINY, "average:every=5"), tmp_path / "run")
    sending = [line.step for line in done.steps if line.bytes]
    assert sending == [4, 9, 11]
    assert [line.density for line in done.steps] == [float(step in sending) for step in range(12)]
    assert [line.collectives for line in done.steps] == [int(step in sending) for step in range(12)]
    row = summarise(done)
    assert row.compression == pytest.approx(12 / 3, rel=1e-3)
    first, *others = replicas(tmp_path / "run")
    assert len(others) == 2
    for other in others:
        assert_same(first, other)


def test_running_statistics_are_averaged_too(tmp_path: Path) -> None:
    settings = Settings("resnet", workers=2, virtual=True, steps=2, batch=4, width=0.25, limit=40, eval_every=5)
    train(with_method(settings, "average:every=2"), tmp_path / "run")
    one, other = replicas(tmp_path / "run")
    assert any("running_var" in name for name in one)
    assert_same(one, other)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_goes_on_to_the_last_bit(tmp_path: Path, method: str, optimizer: str) -> None:
    settings = with_method(replace(TINY, optimizer=optimizer), method)
    whole = train(settings, tmp_path / "whole")
    stopped = train(settings, tmp_path / "stopped", stop=StopAfter(1, tmp_path / "stopped"))
    assert 1 < len(stopped.steps) < settings.steps
    resumed = train(whole_settings(stopped), tmp_path / "stopped", resume=True)
    assert without(resumed, "seconds", "handshake_bytes") == without(whole, "seconds", "handshake_bytes")
    for pair in zip(replicas(tmp_path / "whole"), replicas(tmp_path / "stopped"), strict=True):
        assert_same(*pair)


@pytest.mark.parametrize("method", METHODS)
def test_another_number_of_workers_is_refused(tmp_path: Path, method: str) -> None:
    stopped = train(with_method(TINY, method), tmp_path / "run")
    with pytest.raises(ValueError, match="a replica for each of 3 workers, got 5 workers: go on with --workers 3"):
        train(replace(whole_settings(stopped), workers=5, steps=30), tmp_path / "run", resume=True)


def test_alone_learns_at_the_rate_of_its_own_batch(tmp_path: Path) -> None:
    rates = [train(with_method(TINY, name), tmp_path / name).settings["lr"] for name in ("alone", "dense")]
    assert rates[1] == pytest.approx(3 * rates[0])


def test_an_average_takes_the_bytes_of_the_first_sparse_run(tmp_path: Path) -> None:
    methods = parse_methods("average,dense,alone,exdyna,topk", 0.05)
    check(TINY, methods)
    runs = compare(replace(TINY, save=False), methods, tmp_path / "all", lambda progress: None, Stop())
    averages = round(summarise(runs[2]).bytes_total / dense_bytes(runs[2]))
    every = math.ceil(TINY.steps / averages)
    assert every > 1
    assert [run.name for run in runs] == ["dense", "alone", "exdyna", "topk", f"average every={every}"]
    assert runs[-1].settings["options"] == {"every": every}
    assert with_equal_bytes(methods[0], [runs[3]]).options["every"] < every  # top-k sends more


def test_an_average_needs_a_number_of_steps_or_a_sparse_run() -> None:
    with pytest.raises(ValueError, match="got none: name one, or write average:every=100"):
        check(TINY, parse_methods("dense,alone,average", 0.05))
    with pytest.raises(ValueError, match="such as average:every=100"):
        with_method(TINY, "average")


def test_share_with_every_weight_in_every_step_is_dense(tmp_path: Path) -> None:
    ours, plain = (train(with_method(PLAIN, name), tmp_path / name[:5]) for name in ("share:density=1", "dense"))
    assert [line.loss for line in ours.steps] == pytest.approx([line.loss for line in plain.steps], rel=1e-4)


def test_share_records_its_rounds(tmp_path: Path) -> None:
    done = train(with_method(TINY, "share:every=3:finish=0"), tmp_path / "run")
    sending = [line.step for line in done.steps if line.bytes]
    assert sending == [2, 5, 8, 11]
    for line in done.steps:
        assert line.density == pytest.approx(0.05 if line.step in sending else 0.0, rel=0.01)
        assert (line.residual_norm is not None) == (line.step in sending)
    finished = train(with_method(TINY, "share"), tmp_path / "finished")
    assert finished.steps[-1].density == 1
    assert finished.steps[-1].bytes > dense_bytes(finished) > finished.steps[-2].bytes
    first, *others = replicas(tmp_path / "finished")
    for other in others:
        assert_same(first, other)


def test_dense_steps_of_share_are_dense(tmp_path: Path) -> None:
    settings = replace(TINY, dense_steps=TINY.steps)
    ours, plain = (train(with_method(settings, name), tmp_path / name) for name in ("share", "dense"))
    assert [line.loss for line in ours.steps] == pytest.approx([line.loss for line in plain.steps], rel=1e-5)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("share:every=0", "every must be at least 1, got 0"),
        ("share:delay=2", "delay must be one of 0, 1, got 2"),
        ("share:judge=loss", "judge must be one of auto, drift, curvature, got 'loss'"),
        ("share:sparsifier=dgc", "sparsifier of share must work on weights, got dgc, which applies momentum"),
        ("share:blocks=0", "blocks must be at least 1, got 0"),
        ("share:depth=3", "option of exdyna must be one of"),
    ],
)
def test_bad_share(method: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_method(method, 0.05)
