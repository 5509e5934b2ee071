"""The command: what it refuses, keeps, resumes and writes; with small experiments in place of the real ones."""

import json
from pathlib import Path

import pytest
from studies import command
from studies.__main__ import app
from studies.reproduce import EXPERIMENTS
from studies.reproduce.base import EXDYNA_PAPER, Check, Experiment, Figure, Finding, Grid, Line
from studies.reproduce.outcomes import read_outcomes
from studies.reproduce.shelf import Shelf, dataset
from typer.testing import CliRunner

from gradsieve_lab.runs.running import Stop
from gradsieve_lab.runs.settings import Settings
from helpers import ROOT

SMALL = Settings("mlp", workers=2, virtual=True, steps=4, width=0.1, save=False)


def experiment(name: str, limit: float, made: list[str]) -> Experiment:
    """One that runs a tiny training, measures something and draws it; it holds if 3 is below the limit."""

    def run(shelf: Shelf) -> Finding:
        def measure() -> list[int]:
            made.append(name)
            return [1, 2, 3]

        losses = [line.loss for line in shelf.compare(SMALL, {"own": "topk"})["own"].steps]
        numbers = shelf.measure(f"numbers-{name}", measure)
        figure = Figure("loss", "loss", "step", "loss", [Line("topk", [0, 1, 2, 3], losses)], log_y=True)
        table = Grid("numbers", ["what", "value"], [["first", str(numbers[0])]])
        return Finding(
            [Check("3 below the limit", f"{numbers[2]}", numbers[2] < limit)], [figure], [table], "Note."
        )

    return Experiment(name, EXDYNA_PAPER, f"The claim of {name}.", 1, run)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The two experiments `good` and `bad` are all there is; the list fills with what was measured."""
    found: list[str] = []
    known = {"good": experiment("good", 4, found), "bad": experiment("bad", 3, found)}
    monkeypatch.setattr(command, "EXPERIMENTS", known)
    return found


def reproduce(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [*arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_verdicts_page_and_exit_codes(made: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, said = reproduce("good", "--out", str(out))
    assert code == 0
    assert "good: reproduced" in text
    assert "about 1 minute on 2 cores" in said
    code, text, _ = reproduce("all", "--json", "--out", str(out))
    assert code == 1
    good, bad = json.loads(text)
    assert (good["id"], good["finding"]["verdict"]) == ("good", "reproduced")
    assert (bad["id"], bad["finding"]["verdict"]) == ("bad", "not reproduced")
    assert made == ["good", "bad"]  # the first was not measured again
    assert len(list((out / "runs").iterdir())) == 1  # and the run is shared
    page = (out / "page.html").read_text()
    assert "1 of 2 experiments reproduced" in page
    assert "The claim of bad." in page
    assert [outcome.as_dict() for outcome in read_outcomes(out, ["good", "bad"])] == [good, bad]


def test_text_fits_80_columns(made: list[str], tmp_path: Path) -> None:
    _, text, _ = reproduce("all", "--out", str(tmp_path))
    assert max(len(line) for line in text.splitlines() if not line.startswith(("gradsieve 0", "page: "))) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("god",), "experiment must be one of good, bad, all, list, got 'god': did you mean good?"),
        (("list", "good"), "list must stand alone, got list, good"),
        (("good", "--only", "mlp"), "only is for density-control alone, got good"),
        (("good", "--only", "mpl"), "case must be one of cnn, mlp, ncf, madelon, w8a, lstm, wikitext, got 'mpl'"),
        (("good", "--out", str(ROOT / "README.md")), "out must be a folder, got the file"),
    ],
)
def test_bad_input(made: list[str], arguments: tuple[str, ...], words: str) -> None:
    code, _, said = reproduce(*arguments)
    assert code == 2
    assert words in " ".join(said.split())
    assert made == []


def test_quick_and_full_outcomes_do_not_mix(made: list[str], tmp_path: Path) -> None:
    assert reproduce("good", "--quick", "--out", str(tmp_path))[0] == 0
    code, _, said = reproduce("good", "--out", str(tmp_path))
    assert code == 2
    assert "out must hold outcomes of one kind" in said


def test_a_stranger_file_is_refused(made: list[str], tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text("{}")
    code, _, said = reproduce("good", "--out", str(tmp_path))
    assert code == 2
    assert "must be an outcome of python -m studies" in said


def test_an_interrupted_run_is_made_anew_and_a_finished_one_is_not(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, True, lambda progress: None, Stop())
    first = shelf.run(SMALL)
    record = first.folder / "records.jsonl"
    whole = record.read_text()
    assert shelf.run(SMALL).steps == first.steps
    record.write_text("".join(whole.splitlines(keepends=True)[:3]))  # as if it had been killed
    again = shelf.run(SMALL)
    assert [line.loss for line in again.steps] == [line.loss for line in first.steps]


def test_stopping_leaves_what_is_finished(made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = Stop()
    monkeypatch.setattr(command.running, "Stop", lambda: stops)
    run = command.EXPERIMENTS["good"].run

    def then_stop(shelf: Shelf) -> Finding:
        found = run(shelf)
        stops.signal = 2
        return found

    good = command.EXPERIMENTS["good"]
    monkeypatch.setitem(
        command.EXPERIMENTS, "good", Experiment(good.id, good.source, good.claim, good.minutes, then_stop)
    )
    code, text, said = reproduce("all", "--out", str(tmp_path))
    assert code == 130
    assert "the same command goes on where it was" in said
    assert "good: reproduced" in text
    assert "bad" not in text
    assert not (tmp_path / "bad.json").exists()
    stops.signal = 0
    monkeypatch.setitem(command.EXPERIMENTS, "good", good)
    assert reproduce("all", "--out", str(tmp_path))[0] == 1
    assert made == ["good", "bad"]


def test_list_names_every_experiment() -> None:
    code, text, _ = reproduce("list")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    listed = json.loads(reproduce("list", "--json")[1])
    assert [each["id"] for each in listed] == list(EXPERIMENTS)
    assert all(each["minutes"] > 0 and each["claim"] for each in listed)


def test_real_data_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRADSIEVE_DATA", str(tmp_path))
    assert dataset("mlp", "mnist") == ""
    (tmp_path / "libsvm").mkdir()
    (tmp_path / "libsvm" / "w8a").write_text("1 1:1\n-1 2:1\n")
    assert dataset("logreg", "w8a") == "w8a"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_is_committed_claims_what_the_code_claims(name: str) -> None:
    kept = ROOT / "benchmarks" / "reproduction" / f"{name}.json"
    if not kept.exists():
        pytest.skip(f"{name} was not run in full yet: python -m studies {name} --out benchmarks/reproduction")
    outcome = json.loads(kept.read_text())
    assert (outcome["claim"], outcome["source"]) == (EXPERIMENTS[name].claim, EXPERIMENTS[name].source)
