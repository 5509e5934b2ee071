"""The campaign as a command: `python -m studies.faults --quick`."""

import dataclasses
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from gradsieve_lab.conditions import conditions
from studies.faults import commands, disks
from studies.faults.trials import Result, Trial, link_trial, worker_trial

KINDS: dict[str, tuple[Trial, int]] = {  # with how often each is tried
    "kill a worker": (worker_trial("kill"), 10),
    "term a worker": (worker_trial("term"), 6),
    "stop a worker": (worker_trial("stop"), 6),
    "raise a worker": (worker_trial("raise"), 6),
    "disk full": (disks.full_disk, 8),
    "read-only folder": (disks.read_only, 2),
    "damaged files": (disks.damaged, 20),
    "two runs in one folder": (disks.two_runs, 4),
    "a link fails": (link_trial, 3),
    "train": (commands.command_trial, 3),
    "torchrun": (commands.torchrun_trial, 1),
}
_NEED_ROOT = ("disk full", "read-only folder", "a link fails")
_QUICK = ("kill a worker", "term a worker", "stop a worker", "raise a worker", "disk full", "damaged files")


def campaign(
    trials: Annotated[int, typer.Option(help="How many trials.")] = 1000,
    seconds: Annotated[float, typer.Option(help="Start no trial after so many seconds; 0 for no limit.")] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="The fast kinds only, for 2 minutes.")] = False,
    only: Annotated[list[str] | None, typer.Option("--only", help="One kind; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same trials.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write one JSON line per trial to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines, nothing else.")] = False,
) -> None:
    """Break things on purpose, and count what survives; ends with 0 only if all did."""
    if quick:
        trials, seconds = min(trials, 200), seconds or 120.0
    names = only or list(_QUICK if quick else KINDS)
    left_out = [name for name in names if name in _NEED_ROOT and not disks.root()]
    names = [name for name in names if name not in left_out]
    chance, started = random.Random(seed), time.monotonic()
    results: list[Result] = []
    while len(results) < trials and not (seconds and time.monotonic() - started > seconds):
        name = chance.choices(names, [KINDS[name][1] for name in names])[0]
        result = _one(name, random.Random(chance.random()))
        results.append(result)
        line = {"at": time.strftime("%Y-%m-%d %H:%M:%S"), **dataclasses.asdict(result)}
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if not as_json:
            typer.echo(f"{'ok  ' if result.survived else 'LOST'} {result.kind}: {result.what}", err=True)
    _summarise(results, time.monotonic() - started, left_out, as_json)
    sys.exit(any(not result.survived for result in results))


def _one(name: str, chance: random.Random) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        return KINDS[name][0](chance, folder)
    except Exception as error:
        return Result(name, False, f"the trial itself failed: {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _summarise(results: list[Result], seconds: float, left_out: list[str], as_json: bool) -> None:
    tried = Counter(result.kind for result in results)
    survived = Counter(result.kind for result in results if result.survived)
    rows = []
    for kind in tried:
        known = [result.known_s for result in results if result.kind == kind and result.known_s is not None]
        median, most = (statistics.median(known), max(known)) if known else (None, None)
        rows.append(
            {"kind": kind, "trials": tried[kind], "survived": survived[kind], "known_s": median, "most_s": most}
        )
    if as_json:
        failures = [dataclasses.asdict(result) for result in results if not result.survived]
        facts = {"seconds": seconds, "conditions": conditions(), "left_out": left_out}
        typer.echo(json.dumps({"kinds": rows, "failures": failures, **facts}, indent=2))
        return
    for row in rows:
        knew = (
            ""
            if row["known_s"] is None
            else f", known after {row['known_s']:.1f} s (at most {row['most_s']:.1f} s)"
        )
        typer.echo(f"{row['kind']:<24}{row['survived']} of {row['trials']} survived{knew}")
    for name in left_out:
        typer.echo(f"{name:<24}left out: needs root")
    typer.echo(f"{sum(survived.values())} of {len(results)} trials survived, {seconds:.0f} s")


if __name__ == "__main__":
    typer.run(campaign)
