"""The training loop on virtual workers: the same every time, and it can go on from anywhere."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradsieve import density
from gradsieve_lab.runs.methods import parse_method
from gradsieve_lab.runs.records import NAME, Run
from gradsieve_lab.runs.running import Stop, run
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.runs.summary import summarise

TINY = Settings("mlp", workers=3, virtual=True, steps=12, batch=8, width=0.1, eval_every=4, density=0.05)


def ignore(progress: object) -> None:
    pass


def train(settings: Settings, folder: Path, **more: Any) -> Run:
    done = run(settings, folder, ignore, more.pop("stop", Stop()), **more)
    assert done is not None
    return done


def without(run: Run, *names: str) -> list[dict[str, Any]]:
    lines = [*(step.to_line() for step in run.steps), *run.metrics]
    return [{key: value for key, value in line.items() if key not in names} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("checkpoint/step-*/extra.safetensors")))


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


class StopAfter(Stop):
    """Asks to stop once so many steps were recorded."""

    def __init__(self, steps: int, folder: Path) -> None:
        super().__init__()
        self.steps, self.record = steps, folder / NAME

    def requested(self) -> bool:
        return self.record.exists() and self.record.read_text().count('"kind": "step"') >= self.steps


@pytest.mark.parametrize("method", ["dense", "topk", "exdyna", "randomk"])
def test_the_same_settings_give_the_same_run(tmp_path: Path, method: str) -> None:
    settings = TINY.with_method(parse_method(method, 0.05))
    one, other = (train(settings, tmp_path / name) for name in ("one", "other"))
    assert without(one, "seconds") == without(other, "seconds")
    assert_same_weights(tmp_path / "one", tmp_path / "other")
    changed = train(replace(settings, seed=1), tmp_path / "changed")
    assert without(one, "seconds") != without(changed, "seconds")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("method", ["dense", "cltk", "exdyna"])
def test_a_stopped_run_goes_on_to_the_last_bit(tmp_path: Path, method: str, optimizer: str) -> None:
    settings = replace(TINY, optimizer=optimizer).with_method(parse_method(method, 0.05))
    whole = train(settings, tmp_path / "whole")
    stopped = train(settings, tmp_path / "stopped", stop=StopAfter(1, tmp_path / "stopped"))
    assert stopped.end is not None
    assert stopped.end["reason"] == "stopped"
    assert 1 < len(stopped.steps) < settings.steps
    resumed = train(Settings.from_dict(stopped.settings), tmp_path / "stopped", resume=True)
    # The first step of a process begins with a handshake, which is marked as such and counted apart.
    marks = [line.step for line in resumed.steps if line.handshake_bytes]
    assert marks == ([] if method == "dense" and not marks else [0, len(stopped.steps)])
    assert without(resumed, "seconds", "handshake_bytes") == without(whole, "seconds", "handshake_bytes")
    assert summarise(resumed).bytes_total == summarise(whole).bytes_total
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")


def test_tied_weights_are_saved_and_go_on(tmp_path: Path) -> None:
    settings = Settings("lstm", workers=2, virtual=True, steps=6, batch=4, width=0.1, limit=60, eval_every=2)
    whole = train(settings, tmp_path / "whole")
    stopped = train(settings, tmp_path / "stopped", stop=StopAfter(1, tmp_path / "stopped"))
    assert len(stopped.steps) < 6
    train(whole_settings(stopped), tmp_path / "stopped", resume=True)
    assert whole.settings["model"] == "tied"
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")


def test_the_gradient_is_clipped_right_before_the_step(tmp_path: Path) -> None:
    """With plain SGD at a rate of 1 a step is as long as the gradient."""
    settings = replace(TINY, steps=1, lr=1.0, momentum=0.0, weight_decay=0.0, warm_up=0.0, decay="constant")
    first = {name: part.clone() for name, part in TINY.make_task().make_model().state_dict().items()}
    lengths = {}
    for clip in (0.0, 1e-3, 1e6):
        train(replace(settings, clip=clip).with_method(parse_method("dense", 1.0)), tmp_path / str(clip))
        last = {
            name.rpartition("/")[2]: part
            for name, part in weights(tmp_path / str(clip)).items()
            if "model/" in name
        }
        assert last.keys() == first.keys()
        lengths[clip] = torch.cat([(last[name] - first[name]).flatten() for name in first]).norm().item()
    assert lengths[1e-3] == pytest.approx(1e-3, rel=1e-3)
    assert lengths[0.0] == lengths[1e6] > 1e-2


def test_what_was_recorded_after_the_checkpoint_is_done_again(tmp_path: Path) -> None:
    """As after a crash: the last checkpoint is older than the record."""
    settings = replace(TINY, checkpoint_every=5)
    whole = train(settings, tmp_path / "whole")
    folder = tmp_path / "crashed"
    train(replace(settings, steps=10), folder)
    with (folder / NAME).open("a") as file:
        file.write(json.dumps({**whole.steps[10].to_line(), "loss": -1.0}) + "\n" + '{"kind": "st')
    resumed = train(replace(whole_settings(whole), steps=12), folder, resume=True)
    assert [line.step for line in resumed.steps] == list(range(12))
    assert min(line.loss for line in resumed.steps) >= 0


def whole_settings(run: Run) -> Settings:
    return Settings.from_dict(run.settings)


def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    stopped = train(TINY, tmp_path / "run", stop=StopAfter(1, tmp_path / "run"))
    settings = replace(whole_settings(stopped), workers=5, steps=30)
    resumed = train(settings, tmp_path / "run", resume=True)
    assert len(resumed.steps) == 30
    assert resumed.settings["workers"] == 5
    assert resumed.steps[-1].loss < resumed.steps[0].loss


def test_first_steps_can_be_dense(tmp_path: Path) -> None:
    done = train(replace(TINY, dense_steps=3), tmp_path / "run")
    densities = [line.density for line in done.steps]
    assert densities[:3] == [1.0] * 3
    assert max(densities[3:]) < 0.06


def test_skewed_shards_train_too(tmp_path: Path) -> None:
    done = train(replace(TINY, skew=1.0, workers=5), tmp_path / "run")
    assert done.end is not None
    even = train(replace(TINY, workers=5), tmp_path / "even")
    assert [line.loss for line in done.steps] != [line.loss for line in even.steps]


def test_evaluations_come_first_last_and_in_between(tmp_path: Path) -> None:
    done = train(replace(TINY, steps=10), tmp_path / "run")
    assert [line["step"] for line in done.metrics] == [0, 4, 8, 10]
    assert done.metrics[-1]["bytes"] == pytest.approx(sum(line.bytes for line in done.steps))


def test_without_save_there_is_no_checkpoint(tmp_path: Path) -> None:
    train(replace(TINY, save=False), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [NAME]


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="out must be a new folder"):
        train(TINY, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_used_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch must be at most"):
        train(replace(TINY, batch=5000), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_budget_is_for_the_run_also_when_that_becomes_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(density.budget, "HEAD_START", 0.8)  # so that some of this little run is taken for a surge
    budget = replace(TINY, steps=110).with_method(parse_method("exdyna:spend=budget", 0.05))
    first = train(budget, tmp_path / "run")
    assert sum(line.union for line in first.steps) == pytest.approx(110 * first.steps[0].k, rel=0.02)
    longer = train(replace(budget, steps=150), tmp_path / "run", resume=True)
    assert len(longer.steps) == 150
    assert sum(line.union for line in longer.steps) == pytest.approx(150 * first.steps[0].k, rel=0.02)
    assert len({line.union for line in longer.steps}) > 1  # not the same in every step


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """`nohup` ignores SIGHUP: the run must not end at logout."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop().watching() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
