"""What `pip install gradsieve` brings is enough to train: the wheel in an environment with nothing else."""

import contextlib
import os
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from helpers import ROOT

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve

assert "gradsieve_lab" not in sys.modules and "numba" not in sys.modules
folder = sys.argv[1]
dist.init_process_group("gloo")


def made(seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    return model, gradsieve.sparsify(model, density=0.05), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step * 2 + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()


model, sieve, optimizer = made(0)
train(model, optimizer, range(5))
sieve.save(folder, {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})
train(model, optimizer, range(5, 10))
other, again, second = made(1)
extra = again.load(folder)
other.load_state_dict(extra["model"])
second.load_state_dict({**optimizer.state_dict(), "state": {int(k): v for k, v in extra["optimizer"].items()}})
train(other, second, range(5, 10))
again.check_replicas()
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
dist.destroy_process_group()
print("resumed to the last bit")
"""
COMMAND = """
from gradsieve.__main__ import main

main()
"""


def needed(of: Distribution, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """All distributions here that one requires, without extras."""
    for requirement in map(Requirement, of.requires or []):
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name.lower() not in found:
            with contextlib.suppress(PackageNotFoundError):  # not for this platform
                found[requirement.name.lower()] = distribution(requirement.name)
                needed(found[requirement.name.lower()], found)
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, and links to what it requires."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(ROOT)]
    subprocess.run(pip, check=True, timeout=300)
    (own,) = distributions(path=[str(folder)])
    for each in needed(own, {}).values():
        for file in each.files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(each.locate_file(top))))
    return folder


def run(environment: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Isolated from everything else that is installed here."""
    path = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(environment),
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-S", *arguments], capture_output=True, text=True, timeout=300, env={**path, **more}
    )


def test_two_processes_train_save_and_resume(environment: Path, tmp_path: Path) -> None:
    for name in ("typer", "rich", "plotly", "sklearn", "scipy", "hypothesis"):
        assert not (environment / name).exists(), name
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    arguments = [*torchrun, "localhost:0", str(tmp_path / "train.py"), str(tmp_path / "saved")]
    # torchrun starts its workers by name: they must not find the site packages, either.
    done = run(environment, *arguments, PYTHON_EXEC=str(_isolated_python(tmp_path)), HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resumed to the last bit") == 2


def _isolated_python(folder: Path) -> Path:
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python


def test_the_command_says_what_is_missing(environment: Path) -> None:
    done = run(environment, "-c", COMMAND)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "gradsieve: the command needs typer, which is not installed: pip install 'gradsieve[lab]'"
    )


def test_the_doctor_needs_nothing_more(environment: Path) -> None:
    done = run(environment, "-m", "gradsieve", "doctor", "--seconds", "0.1", HOME=str(environment))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("all checks passed")


def test_sidco_says_that_it_needs_scipy(environment: Path) -> None:
    code = "from gradsieve import make_sparsifier as make; make('sidco'); make('sidco', distribution='gamma')"
    done = run(environment, "-c", code)
    assert done.stderr.strip().endswith('distribution "gamma" of sidco needs SciPy: pip install scipy')
