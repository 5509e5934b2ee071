"""What the README shows, works; what it says of itself, is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT, load

TEXT = (ROOT / "README.md").read_text()


def test_it_is_one_page() -> None:
    assert len(TEXT.splitlines()) <= 120


def test_its_table_says_what_the_rows_say() -> None:
    """The figures of the first rows are those of benchmarks/data."""
    rows = {(row["case"], row["links"]): float(row["median"]) for row in load("benchmarks/tables.py").read("lab")}
    cases = ("plain DDP", "100mbit"), ("exdyna", "100mbit"), ("PowerSGD rank 1", "100mbit"), ("plain DDP", "1gbit")
    for case, rate in cases:
        assert f"{rows[case, rate]:,.0f} ms" in TEXT, case
    assert f"{rows['exdyna', '1gbit']:,.0f} ms" in TEXT


def test_every_file_that_is_named_exists() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", TEXT) + re.findall(r"`([\w/]+\.(?:csv|cff|md|py))`", TEXT):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("file", ["measurements", "density", "faults", "judges", "plan", "reproduction", "share"])
def test_tables_are_those_of_the_rows(file: str) -> None:
    found = load("benchmarks/tables.py").filled(f"docs/{file}.md")
    assert found == (ROOT / f"docs/{file}.md").read_text(), "run: .venv/bin/python benchmarks/tables.py"


def test_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


MINIMAL = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 5)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def train():
    model = Toy()
    model = DistributedDataParallel(model)
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.zero_grad()
    outputs = model(torch.randn(20, 10))
    loss_fn(outputs, torch.randn(20, 5)).backward()
    optimizer.step()
    print(f"rank {dist.get_rank()} done\\n", end="", flush=True)
"""


# How torch ends some scripts on an overloaded machine, also without this package: docs/ddp.md.
TORCHS_CRASH = "terminate called without an active exception"


def torchrun(path: Path) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command = [sys.executable, *launcher, "--rdzv-endpoint", "localhost:0", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


DIFFS = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)


def applied(diff: str, script: str) -> str:
    """The script without what the diff takes away, with what it adds, and with its optimizer."""
    optimizer = re.search(r"^[ -](optimizer = .*)$", diff, re.MULTILINE)
    assert optimizer is not None
    lines, place = re.sub(r"optimizer = .*", optimizer[1], script).splitlines(), 0
    for line in diff.splitlines():
        code = line[1:].partition("#")[0].strip()
        if line.startswith("+"):
            place += 1
            lines.insert(place, f"    {code}")
            continue
        place = max((number for number, text in enumerate(lines) if text.strip() == code), default=place)
        if line.startswith("-"):
            assert lines.pop(place).strip() == code
            place -= 1
    return "\n".join(lines)


def test_the_diffs_apply_to_a_minimal_ddp_script(tmp_path: Path) -> None:
    """What the README shows, and nothing else but the import; both in one start of the processes, to be quick."""
    path, ways = tmp_path / "minimal.py", ("weights", "gradients")
    functions = [
        applied(diff, MINIMAL).replace("train()", f"{way}()") for diff, way in zip(DIFFS, ways, strict=True)
    ]
    calls = ['dist.init_process_group("gloo")', *(f"{way}()" for way in ways), "dist.destroy_process_group()"]
    path.write_text("\n".join(["import gradsieve", *functions, *calls]))
    for _ in range(3):
        done = torchrun(path)
        if TORCHS_CRASH not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank 0 done") == len(ways)
    assert done.stdout.count("rank 1 done") == len(ways)
