"""The command line as a person meets it."""

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import gradsieve
from gradsieve_lab.cli import app
from gradsieve_lab.cli.live import show
from gradsieve_lab.runs.records import read_run
from gradsieve_lab.runs.training import Progress
from gradsieve_lab.tasks.base import Metric

COLUMNS = 80
demo = import_module("gradsieve_lab.cli.demo")  # the package has a command of this name


def run(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    code = "from gradsieve_lab.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout)


COMMANDS = (
    "",
    "demo",
    "train",
    "compare",
    "simulate",
    "report",
    "info",
    "bench",
    "bench kernels",
    "bench step",
    "plan",
)
TINY = ("--workers", "2", "--steps", "6", "--width", "0.1", "--batch", "8")


def invoke(*arguments: str) -> Result:
    """In this process, to be quick."""
    return CliRunner().invoke(app, list(arguments), prog_name="gradsieve")


@pytest.mark.parametrize(
    ("hosts", "models", "methods"),
    [(2, slice(1), ["dense", "share"]), pytest.param(4, slice(2), None, marks=pytest.mark.slow)],
)
def test_demo_gives_every_method_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: int, models: slice, methods: list[str] | None
) -> None:
    parts = [
        replace(part, methods={name: part.methods[name] for name in methods or part.methods})
        for part in demo.PARTS[models]
    ]
    monkeypatch.setattr(demo, "PARTS", parts)
    monkeypatch.setattr(demo, "_HOSTS", hosts)
    out, number = tmp_path / "demo", sum(len(part.methods) for part in parts)
    done = invoke("demo", "--seconds", "0.2", "--loopback", "--out", str(out))
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines[2:-1]) <= COLUMNS
    assert "No slow links here: you asked for it." in done.stdout
    for method in parts[0].methods:
        assert len(re.findall(rf"^ {method} ", done.stdout, re.MULTILINE)) == len(parts), "one row per model"
        assert f"{method}: starting {hosts} workers ..." in done.stderr
    assert lines[-1] == f"report: {(out / 'report.html').as_uri()}"
    said = [line.split(":")[0] for line in lines if re.match(r"A small .*: ", line)]
    assert said == ["A small GPT on Python's own source text", "A small CNN on handwritten digits"][models]
    rows = list(csv.DictReader((out / "summary.csv").open()))
    assert len(rows) == number
    assert all(row["end"] == "finished" and float(row["seconds"]) >= 0.2 for row in rows)


def test_a_run_can_be_limited_in_time(tmp_path: Path) -> None:
    done = invoke(
        "train", "mlp", "--virtual", *TINY[:2], *TINY[4:], "--seconds", "0.05", "--out", str(tmp_path / "r")
    )
    assert done.exit_code == 0, done.stderr
    run = read_run(tmp_path / "r")
    assert run.end is not None
    assert run.end["reason"] == "finished"
    assert 0 < len(run.steps) < 400
    assert run.metrics[-1]["step"] == len(run.steps)


def test_alone_it_names_what_a_newcomer_needs() -> None:
    done = invoke()
    assert done.exit_code == 0
    assert re.findall(r"^  gradsieve (\w+)", done.stdout, re.MULTILINE) == ["demo", "compare", "lab"]
    assert max(len(line) for line in done.stdout.splitlines()) <= COLUMNS


def test_version() -> None:
    done = invoke("--version")
    assert done.exit_code == 0
    assert done.stdout.startswith(f"gradsieve {gradsieve.__version__}")


def test_simulate_offers_only_what_it_takes() -> None:
    shown = invoke("simulate", "--help").stdout
    assert not [word for word in ("--lab", "lab host", "--timeout") if word in shown]
    assert "--lab-hosts" in invoke("train", "--help").stdout


def test_small_virtual_models_take_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And afterwards there are as many as before."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    used: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", used.append)
    assert invoke("simulate", "mlp", "--out", str(tmp_path / "run"), *TINY).exit_code == 0
    assert used == [1, torch.get_num_threads()]


def test_compare_on_virtual_workers_is_the_same_every_time(tmp_path: Path) -> None:
    results = []
    for name in ("one", "other"):
        methods = "dense,topk,cltk:beta=0.5,exdyna,exdyna:density=0.02"
        arguments = ("compare", "mlp", "--virtual", "--json", "--sparsifiers", methods, *TINY)
        done = invoke(*arguments, "--out", str(tmp_path / name))
        assert done.exit_code == 0, done.stderr
        assert done.stderr == ""
        rows = json.loads(done.stdout)
        results.append([{key: row[key] for key in row if not key.endswith(("_ms", "seconds"))} for row in rows])
    assert results[0] == results[1]
    methods = [row["method"] for row in results[0]]
    assert methods == ["dense", "topk", "cltk beta=0.5", "exdyna", "exdyna density=0.02"]
    densities = [row["density_mean"] for row in results[0]]
    assert densities[0] == 1.0
    assert densities[4] == pytest.approx(0.02, rel=0.05)
    assert (tmp_path / "one" / "exdyna-density-0.02" / "records.jsonl").exists()


def test_simulate_prints_these_keys_in_this_order(tmp_path: Path) -> None:
    done = invoke("simulate", "mlp", "--sparsifier", "topk", "--density", "0.05", "--json", *TINY)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    keys = """task, sparsifier, workers, steps, density_target, density_mean, density_max, density_last,
        density_within_5pct, selected_total, bytes_per_step, bytes_total, collectives_per_step, total_error,
        residual_norm_last, imbalance_mean, buildup_mean, metric_name, metric_best, metric_last, loss_last,
        seconds"""
    assert list(found) == [key.strip() for key in keys.split(",")]
    assert (found["task"], found["sparsifier"], found["workers"], found["steps"]) == ("mlp", "topk", 2, 6)
    assert found["density_target"] == 0.05
    assert found["buildup_mean"] == pytest.approx(found["density_mean"] / 0.05, rel=0.01)
    assert found["bytes_total"] == pytest.approx(6 * found["bytes_per_step"])
    for_people = invoke("simulate", "mlp", "--sparsifier", "topk", "--out", str(tmp_path / "run"), *TINY)
    assert "buildup_mean" in for_people.stdout
    assert (tmp_path / "run" / "records.jsonl").exists()


def test_report_is_rebuilt_from_records(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    made = invoke("compare", "mlp", "--virtual", "--sparsifiers", "dense,exdyna", "--out", str(out), *TINY)
    assert made.exit_code == 0, made.stderr
    page = tmp_path / "new" / "page.html"
    done = invoke("report", str(out), "--out", str(page), "--csv", str(tmp_path / "tables"))
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"report of 2 runs: {page}\n"
    assert page.read_text() == (out / "report.html").read_text()
    assert (tmp_path / "tables" / "summary.csv").read_text() == (out / "summary.csv").read_text()
    single = invoke("report", str(out / "exdyna"), "--out", str(page))
    assert single.stdout == f"report of 1 run: {page}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--seconds", "0"), "seconds must be positive, got 0"),
        (("demo", "--rate", "fast"), "rate must be a number with kbit, mbit or gbit, such as 100mbit, got 'fast'"),
        (("demo", "--out", "."), "out must be a new folder, got ., which exists"),
        (("train", "mlp", "--density", "1.5"), "density must be in (0, 1], got 1.5"),
        (("train", "mlp", "--workers", "0"), "workers must be at least 1, got 0"),
        (("compare", "mlp", "--sparsifiers", "dense,none"), "sparsifier must be one of dense, topk"),
        (("train", "mlp", "--sparsifier", "average"), "average needs the number of steps from one average"),
        (("simulate", "mlp", "--sparsifier", "average"), "such as average:every=100; only compare can choose it"),
        (("train", "mlp", "--sparsifier", "average:every=0"), "every must be at least 1, got 0"),
        (("train", "mlp", "--sparsifier", "alone:every=2"), "option of alone must be one of (none), got 'every'"),
        (("compare", "mlp", "--sparsifiers", "dense,alone,average"), "as many bytes as a sparse method beside it"),
        (("train",), "task must be one of logreg, mlp, cnn, resnet, vgg, lstm, gpt, bert, ncf, got none"),
        (("train", "resnt"), "got 'resnt': did you mean resnet?"),
        (("train", "mlp", "--sparsifier", "exdina"), "got 'exdina': did you mean exdyna?"),
        (("train", "mlp", "--workers", "5000"), "as processes of this machine, got 5000: take --virtual"),
        (("simulate", "mlp", "--workers", "5000"), "workers must be at most 1500, one training example each, got"),
        (("train", "mlp", "--virtual", "--batch", "900"), "batch must be at most 375"),
        (("train", "mlp", "--dataset", "mnist"), "dataset mnist needs a data folder"),
        (("train", "mlp", "--data-dir", "/nowhere"), "mnist/train-images-idx3-ubyte must be in the data folder"),
        (("train", "mlp", "--out", "."), "out must be a new folder, got ., which exists"),
        (("train", "--resume", "/nowhere"), "/nowhere must be readable, got No such file or directory"),
        (("train", "mlp", "--virtual", "--out", "/proc/new"), "/proc/new could not be made: No such file"),
        (("compare", "mlp", "--virtual", "--sparsifiers", "fp16"), "fp16 is torch's own hook and needs real"),
        (("compare", "mlp", "--sparsifiers", "topk,topk"), "sparsifiers must be named once each, got topk again"),
        (("simulate", "mlp", "--skew", "2"), "skew must be in [0, 1], got 2"),
        (("report", "/nowhere"), "/nowhere must be readable, got No such file or directory"),
        (("report", "tests"), "tests must hold a record, got no records.jsonl in it"),
        (("report", "README.md"), "README.md must hold one JSON object a line"),
        (("bench", "kernels", "--n", "5"), "n must be at least 1000000, got 5"),
        (
            ("lab", "run", "--rate", "10"),
            "rate must be a number with kbit, mbit or gbit, such as 100mbit, got '10'",
        ),
        (("lab", "run", "--hosts", "0", "--", "train"), "hosts must be between 1 and 64, got 0"),
        (("lab", "run"), "lab run must be told what to run"),
        (("train", "mlp", "--lab-rate", "1gbit"), "lab_rate needs --lab-hosts beside it, got 1gbit alone"),
        (("train", "mlp", "--lab-hosts", "2", "--virtual"), "lab_hosts needs real processes"),
        (("train", "mlp", "--lab-hosts", "2", "--workers", "3"), "workers must be a multiple of the lab's 2 hosts"),
        (
            ("train", "mlp", "--sparsifier", "exdyna:values=int8"),
            "values must be one of fp32, bf16, fp8, got 'int8'",
        ),
        (("bench", "lab", "--rates", "1gbit,x"), "rate must be a number with"),
        (("bench", "wire", "--steps", "0"), "steps must be at least 1, got 0"),
        (("bench", "step", "--workers", "2,x"), "workers must be a whole number, got 'x'"),
        (("bench", "step", "--density", "0"), "density must be in (0, 1], got 0.0"),
        (("bench", "kernels", "--out", "."), "out must be a file, got the folder ."),
        (("plan",), "one of WHAT, --parameters, --model-bytes must be given, got none"),
        (("plan", "--parameters", "1x"), "parameters must be a number such as 125M, got '1x'"),
        (("plan", "--parameters", "1M", "--model-bytes", "4M"), "got --parameters, --model-bytes"),
        (("plan", "--parameters", "1M", "--workers", "4"), "workers and link must be given"),
        (("plan", "--parameters", "1M", "--workers", "4", "--link", "1gbit"), "step_ms must be given"),
        (("plan", "nothing"), "WHAT must be MODULE:factory or a script that ends in .py, got 'nothing'"),
        (("plan", "--parameters", "1M", "--densities", "a"), "densities must be numbers separated by commas"),
        (("plan", "--parameters", "1M", "--html", "."), "out must be a file, got the folder ."),
    ],
)
def test_bad_input(arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One sentence, exit code 2, and no file anywhere."""
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    if arguments[0] != "report":
        monkeypatch.chdir(tmp_path)
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train", "compare", "simulate"])
def test_unreadable_data(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    for split in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (folder / f"{split}-{kind}-ubyte").write_bytes(b"not an idx file")
    out = tmp_path / "out"
    arguments = [command, "mlp", "--dataset", "mnist", "--data-dir", str(tmp_path / "data"), "--out", str(out)]
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert "train-images-idx3-ubyte must be an idx file of 3 dimensions" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--seconds", "many"), "Invalid value for '--seconds'"),
        (("trian",), "Did you mean 'train'?"),
        (("train", "--desity", "1"), "--density"),
    ],
)
def test_bad_usage_suggests_what_is_near(arguments: tuple[str, ...], words: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_and_shows_an_example(command: str) -> None:
    done = invoke(*command.split(), "--help")
    assert done.exit_code == 0
    assert "Example: gradsieve" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= COLUMNS
    assert "..." not in done.stdout.replace("[ARGS]...", "").replace("{RUN}...", "")  # nothing was cut off


@pytest.mark.parametrize("label", ["exdyna", "exdyna compat=release density=0.001"])
@pytest.mark.parametrize("step", [1, 123456])
def test_the_live_line_fits(label: str, step: int) -> None:
    metric = Metric("hit rate@10", higher_is_better=True, percent=True)
    line = show(Progress(label, step, 2 * step, 0.012345, 0.765432, 0.00123, 1.23e9, 4321.0), metric)
    assert len(line) <= COLUMNS
    for part in ("exdyna", f"{step}/{2 * step}", "0.0123", "hit rate@10 76.5 %", "0.0012", "1.23 GB", "72:01"):
        assert part in line


def test_info() -> None:
    done = invoke("info")
    assert done.exit_code == 0
    assert "exdyna" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= COLUMNS
    known = json.loads(invoke("info", "--json").stdout)
    assert known["sparsifiers"]["cltk"] == {"beta": 1.0}


@pytest.mark.slow
def test_bench_kernels_writes_rows(tmp_path: Path) -> None:
    """A small run: the figures mean nothing, the rows must be complete."""
    out = tmp_path / "new" / "kernels.csv"
    done = run("bench", "kernels", "--n", "2000000", "--repeats", "1", "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(out.open()))
    printed = json.loads(done.stdout)["rows"]
    assert len(rows) == len(printed)
    assert {row["benchmark"] for row in rows} == {"kernels", "step", "selection", "memory"}
    assert all(float(row["median"]) > 0 and row["machine"] and row["date"] for row in rows if row["unit"] == "ms")
    assert [p.name for p in out.parent.iterdir()] == ["kernels.csv"]


@pytest.mark.slow
def test_bench_step_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "step.csv"
    done = run("bench", "step", "--workers", "2", "--repeats", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(out.open()))
    assert {"plain DDP", "exdyna", "fp16 hook", "compute alone"} <= {row["case"] for row in rows}
    assert max(len(line) for line in done.stdout.splitlines()) <= COLUMNS


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError])
def test_our_own_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """Only what was raised for the user becomes one sentence."""

    def broken(*arguments: object, **options: object) -> None:
        raise error("a mistake of ours")

    monkeypatch.setattr("gradsieve_lab.cli.runs.parse_methods", broken)
    done = invoke("compare", "mlp", *TINY)
    assert type(done.exception) is error
    assert "gradsieve: " not in done.output


def test_plan_in_numbers(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    given = ("plan", "--parameters", "100k", "--workers", "4096", "--link", "100mbit", "--step-ms", "50")
    few = ("--densities", "0.01", "--every", "1")
    done = invoke(*given, *few, "--html", str(page))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= COLUMNS  # the last is a path
    assert lines[0].startswith("100,000 parameters, 4,096 workers, 100 Mbit/s, 0.12 ms latency, 50 ms")
    assert "4,096 workers are an extrapolation on paper." in done.stdout.replace("\n", " ")
    assert "<svg" in page.read_text()
    machine = invoke(*given, *few, "--json")
    assert json.loads(machine.stdout)["ways"][0]["name"] == "plain DDP"


FACTORY = """
import torch
from torch import nn

def build():
    model = nn.Linear(100, 10)
    x = torch.randn(4, 100)
    return model, lambda: model(x).square().mean()
"""


def test_plan_measures_between_ranks(tmp_path: Path) -> None:
    """Under torchrun: the network, how busy processors are, and the step of a factory's model."""
    (tmp_path / "factory_of_mine.py").write_text(FACTORY)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    command = ("-m", "gradsieve", "plan", "factory_of_mine:build", "--densities", "0.1", "--every", "1", "--json")
    done = subprocess.run(
        [sys.executable, *torchrun, "--rdzv-endpoint", "localhost:0", *command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["parameters"], found["workers"]) == (1010, 2)
    assert found["compute_ms"] > 0
    assert found["link"]["bandwidth"] > 1e6
    assert 0 <= found["link"]["latency"] < 1
