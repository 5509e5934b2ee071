"""The docs: every code block runs, every error is on the troubleshooting page, every page is in the navigation."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import gradsieve
from gradsieve_lab.cli import app
from helpers import ROOT, load

NOT_RUN = "Not run in the tests: "
PAGES = sorted((ROOT / "docs").rglob("*.md"))
COMMAND = re.compile(r"(?:sudo )?(?:\.venv/bin/)?gradsieve ([^#]*)")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, its title, its text."""

    page: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    fence = re.compile(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for page in PAGES:
        text = page.read_text()
        for found in fence.finditer(text):
            line = text[: found.start()].count("\n") + 1
            yield Block(str(page.relative_to(ROOT)), line, found[1], found[2] or "", found[3])


ALL = list(blocks())
RUN = [block for block in ALL if not block.title.startswith(NOT_RUN)]


def of(*languages: str) -> list[Block]:
    return [block for block in RUN if block.language in languages]


def test_a_block_that_is_not_run_says_why() -> None:
    for block in ALL:
        if block.title.startswith(NOT_RUN):
            assert len(block.title) > len(NOT_RUN) + 5, block
        assert block.language in ("python", "bash", "console", "text", "diff", "yaml", ""), block


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process, so that blocks may train."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build() -> nn.Module:
    return nn.Linear(32, 32)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_block(block: Block, tmp_path: Path) -> None:
    """As it stands; names that a reader has, such as `model`, are given. One with a title is a file: a script."""
    if block.title:
        path = tmp_path / block.title
        path.write_text(block.text)
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        command = [sys.executable, *launcher, "--rdzv-endpoint", "localhost:0", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", done.stdout)]
        assert losses[-1] < losses[0]
        assert "times fewer bytes than plain DDP" in done.stdout
        return
    run(block, block.text)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("block", of("diff"), ids=str)
def test_diff_block(block: Block) -> None:
    """What is left after the change."""
    run(block, "\n".join(line[1:] for line in block.text.splitlines() if line[:1] in "+ "))


def run(block: Block, text: str) -> None:
    given: dict[str, Any] = {"build": build, "gradsieve": gradsieve, "nn": nn, "model": build()}
    exec(compile(text, str(block), "exec"), given | {"DistributedDataParallel": DistributedDataParallel})


def commands() -> list[tuple[str, str]]:
    found = []
    for block in of("bash", "console"):
        for line in block.text.splitlines():
            if match := COMMAND.match(line.strip()):
                found.append((str(block), match[1].strip()))
    return found


@pytest.mark.parametrize(("place", "command"), commands())
def test_commands_are_understood(place: str, command: str) -> None:
    """Every `gradsieve` command of the docs: its options exist and take such values, short of running it."""
    words = shlex.split(command.replace("...", ""))
    if words[:2] == ["lab", "run"]:
        words = words[: words.index("--")]
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="gradsieve")
    assert result.exit_code == 0, f"{place}: {result.output}"
    known = set(re.findall(r"--[a-z-]+", result.output))
    for option in (word for word in words if word.startswith("--")):
        assert option in known, f"{place}: {option}"


def test_errors_are_all_on_the_page() -> None:
    errors = load("docs/errors.py")
    for module, kind, message in errors.raised():
        assert errors.covered(module), f"{module}: no part of docs/troubleshooting.md is about {kind}: {message}"
    assert errors.filled() == errors.PAGE.read_text(), "run: .venv/bin/python docs/errors.py"


def test_every_page_has_its_place() -> None:
    """In the navigation, or in it as a line to be uncommented."""
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert str(page.relative_to(ROOT / "docs")) in nav, page


def test_links_out_of_the_docs_exist() -> None:
    """mkdocs checks links between pages; this checks the paths that pages name in backticks."""
    for page in PAGES:
        for path in re.findall(r"`((?:examples|benchmarks|docs|src)/[\w/.-]+\.\w+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page}: {path}"
