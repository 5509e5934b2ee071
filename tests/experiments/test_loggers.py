"""Experiment trackers: TensorBoard, W&B offline and MLflow in a folder show what the record has."""

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_training import TINY, train

from gradsieve._check import BadInput
from gradsieve_lab.runs import loggers
from gradsieve_lab.runs.loggers import need_logger, scalars_of
from gradsieve_lab.runs.settings import Settings
from helpers import skip_without


def test_tensorboard(tmp_path: Path) -> None:
    skip_without("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = train(replace(TINY, log="tensorboard"), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(12))
    assert events.Scalars("metric")[-1].value == pytest.approx(done.metrics[-1]["value"])


def wandb_records(data: bytes) -> Iterator[bytes]:
    """W&B's file: a header of 7 bytes, then LevelDB's log format with blocks of 32 KiB."""
    block, place, parts = 1 << 15, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("wandb")
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    done = train(replace(TINY, log="wandb"), tmp_path / "run")
    wandb.teardown()  # its service writes the last lines when it ends
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-run.wandb")
    rows = []
    for data in wandb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            names = ["/".join(item.nested_key) or item.key for item in record.history.item]
            values = [json.loads(item.value_json) for item in record.history.item]
            rows.append(dict(zip(names, values, strict=True)))
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(12))
    assert steps[-1]["gradsieve/density"] == pytest.approx(done.steps[-1].density)
    assert [row["metric"] for row in rows if "metric" in row][-1] == pytest.approx(done.metrics[-1]["value"])


def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    done = train(replace(TINY, log="mlflow"), tmp_path / "run")
    client = MlflowClient((tmp_path / "run" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("gradsieve")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["task"] == TINY.task
    history = client.get_metric_history(run.info.run_id, "gradsieve/density")
    assert [point.step for point in history] == list(range(12))
    assert history[-1].value == pytest.approx(done.steps[-1].density)


def test_what_loggers_are_given(tmp_path: Path) -> None:
    done = train(replace(TINY, log=""), tmp_path / "run")
    found = scalars_of(done.steps[-1].to_line())
    assert {"loss", "lr", "gradsieve/density", "gradsieve/ring_bytes", "gradsieve/select_ms"} <= set(found)
    assert all(isinstance(value, int | float) for value in found.values())
    assert scalars_of(done.metrics[-1]) == {"metric": done.metrics[-1]["value"]}
    with pytest.raises(ValueError, match="log must be one of"):
        replace(TINY, log="paper")
    assert Settings.from_dict({"task": "mlp", "tensorboard": True}).log == "tensorboard"  # as older records have it
    assert Settings.from_dict({"task": "mlp", "tensorboard": False}).log == ""


@pytest.mark.parametrize(("name", "extra"), [("tensorboard", "tensorboard"), ("wandb", "integrations")])
def test_a_missing_package_is_named(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_logger("")
    monkeypatch.setitem(loggers._PACKAGES, name, "not_installed_here")
    with pytest.raises(BadInput, match=rf"--log {name} needs its package: pip install 'gradsieve\[{extra}\]'"):
        need_logger(name)
