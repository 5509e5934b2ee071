"""The recipes of docs/launchers.md: the one for torchrun runs on two hosts, the others are well-formed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gradsieve_lab.netlab.network import network
from gradsieve_lab.netlab.programs import run_everywhere
from gradsieve_lab.netlab.rates import parse_links
from helpers import ROOT

TEXT = (ROOT / "docs" / "launchers.md").read_text()
BLOCKS = re.findall(r"^## (\w+).*?```(bash|yaml)\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
RECIPES = {title: body for title, _, body in BLOCKS}


def test_recipes_are_well_formed() -> None:
    assert list(RECIPES) == ["torchrun", "SLURM", "Ray", "Kubernetes"]
    for title in ("torchrun", "SLURM", "Ray"):
        done = subprocess.run(["bash", "-n"], input=RECIPES[title], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    job = yaml.safe_load(RECIPES["Kubernetes"])
    assert job["kind"] == "TrainJob"
    assert job["spec"]["trainer"]["numNodes"] == 2


@pytest.mark.lab
def test_torchrun_on_two_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    recipe = RECIPES["torchrun"].replace("train.py", str(ROOT / "examples" / "ddp.py"))
    with network(parse_links("1gbit", 2)) as made:
        place = f'export PATH="{Path(sys.executable).parent}:$PATH" NODE_RANK="$RANK" HEAD="{made.address(0)}"\n'
        code = run_everywhere(made, ["bash", "-ec", place + recipe], lambda: False)
    out, err = capfd.readouterr()
    assert code == 0, err[-3000:]
    assert re.search(r"step 59: loss \d\.\d+, sent 1\.\d+%", out), out
