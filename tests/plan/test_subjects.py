"""What can be planned for: factories, and training scripts whose steps are watched."""

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from gradsieve.plan.subjects import made_by, watch

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

assert sys.argv[1:] == ["--steps", "%s"], sys.argv
dist.init_process_group("gloo")
assert dist.get_world_size() == 1
model = DistributedDataParallel(nn.Linear(20, 5))
optimizer = torch.optim.AdamW(model.parameters())
print("training")
for step in range(int(sys.argv[2])):
    try:
        time.sleep(0.02)
        model(torch.randn(3, 20)).sum().backward()
        optimizer.step()
    except Exception:
        pass  # as some training loops do
assert step < 100, "it was not stopped"
"""


def test_a_script_is_run_until_its_steps_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT % 10_000)
    before = list(sys.argv), list(sys.path)
    shapes, seconds = watch(script, ["--steps", "10000"])
    assert sorted(shapes) == [(5,), (5, 20)]
    assert 0.02 <= seconds < 2
    assert not dist.is_initialized()
    assert (list(sys.argv), list(sys.path)) == before
    assert os.environ["WORLD_SIZE"] == "64"
    assert os.environ["TORCHELASTIC_RUN_ID"] == "none"
    assert "training" not in capsys.readouterr().out
    script.write_text(SCRIPT % 2)
    with pytest.raises(ValueError, match="the script must make at least 3 optimizer steps, got 2"):
        watch(script, ["--steps", "2"])
    with pytest.raises(ValueError, match="must be a training script, got no such file"):
        watch(tmp_path / "missing.py", [])


def test_factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan_factories.py").write_text(
        "from torch import nn\n"
        "def alone(): return nn.Linear(3, 2)\n"
        "def both(): return nn.Linear(3, 2), lambda: None\n"
        "def wrong(): return 7\n"
    )
    assert made_by("plan_factories:alone")[1] is None
    assert callable(made_by("plan_factories:both")[1])
    for name, words in {
        "plan_factories:wrong": "must return a model, or a model and a function for its loss, got 7",
        "plan_factories:none": "must name a function of a module",
        "no_such_module:f": "could not be imported",
    }.items():
        with pytest.raises(ValueError, match=words):
            made_by(name)
