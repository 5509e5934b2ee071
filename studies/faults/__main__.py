"""The campaign as a command: `python -m studies.faults --quick`."""

import dataclasses
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

import typer

from gradsieve_lab.conditions import conditions
from studies.faults import disks
from studies.faults.kinds import KINDS, NEED_ROOT, QUICK, calm_runs, run_calm, run_trial, schedule
from studies.faults.results import Result

_LIMIT_S = 600.0  # for one trial; its own limits are shorter


def campaign(
    trials: Annotated[int, typer.Option(help="How many trials.")] = 1000,
    seconds: Annotated[float, typer.Option(help="Start no trial after so many seconds; 0 for no limit.")] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="The fast kinds only, for 2 minutes.")] = False,
    only: Annotated[list[str] | None, typer.Option("--only", help="One kind; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same trials.")] = 0,
    at_once: Annotated[int, typer.Option(help="How many trials run at the same time.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write one JSON line per trial to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines, nothing else.")] = False,
) -> None:
    """Break things on purpose, and count the trials that survive; exit code 0 only if all did."""
    if quick:
        trials, seconds = min(trials, 200), seconds or 120.0
    names = only or list(QUICK if quick else KINDS)
    left_out = [name for name in names if name in NEED_ROOT and not disks.root()]
    names = [name for name in names if name not in left_out]
    started, results = time.monotonic(), []
    planned = schedule(names, trials, random.Random(seed))
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        for result in _all(planned, names, Path(scratch), at_once, seconds):
            results.append(result)
            line = {"at": time.strftime("%Y-%m-%d %H:%M:%S"), **dataclasses.asdict(result)}
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if not as_json:
                typer.echo(f"{'ok  ' if result.survived else 'LOST'} {result.kind}: {result.what}", err=True)
    _summarise(results, time.monotonic() - started, left_out, as_json)
    sys.exit(any(not result.survived for result in results))


def _all(
    planned: list[tuple[str, float]], names: list[str], scratch: Path, at_once: int, seconds: float
) -> Iterator[Result]:
    """Run every trial in its own process, forked from one that has everything loaded; several at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["studies.faults.preload"])
    calm: dict[str, Any] = {}
    running: dict[Connection, tuple[str, Any, float]] = {}
    for name, run in calm_runs(names).items():
        here, process = _start(context, run_calm, run, _folder(scratch))
        try:
            calm[name] = here.recv()
        except EOFError:
            raise RuntimeError(f"the undisturbed run of {name} failed") from None
        process.join()
    started = time.monotonic()
    while planned or running:
        over = bool(seconds) and time.monotonic() - started > seconds
        if over:
            planned = []
        while planned and len(running) < at_once:
            name, seed = planned.pop(0)
            here, process = _start(context, run_trial, name, seed, _folder(scratch), calm)
            running[here] = (name, process, time.monotonic() + _LIMIT_S)
        for here in wait(list(running), timeout=1.0):
            assert isinstance(here, Connection)
            name, process, _ = running.pop(here)
            try:
                yield here.recv()
            except EOFError:
                yield Result(name, False, f"the trial itself ended with exit code {process.exitcode}")
            process.join()
        for here, (name, process, limit) in list(running.items()):
            if time.monotonic() > limit:
                process.kill()
                del running[here]
                yield Result(name, False, f"the trial hung for {_LIMIT_S:.0f} s")


def _start(context: Any, work: Any, *arguments: Any) -> tuple[Any, Any]:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(there, *arguments))
    process.start()
    there.close()
    return here, process


def _folder(scratch: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=scratch))


def _summarise(results: list[Result], seconds: float, left_out: list[str], as_json: bool) -> None:
    tried = Counter(result.kind for result in results)
    survived = Counter(result.kind for result in results if result.survived)
    rows = []
    for kind in tried:
        of_kind = [result for result in results if result.kind == kind]
        known = [result.known_s for result in of_kind if result.known_s is not None]
        median, most = (statistics.median(known), max(known)) if known else (None, None)
        row = {"kind": kind, "trials": tried[kind], "survived": survived[kind], "known_s": median, "most_s": most}
        lost: dict[str, Any] = {
            "lost_steps": [result.lost_steps for result in of_kind if result.lost_steps is not None],
            "lost_norm": [result.lost_norm for result in of_kind if result.lost_norm is not None],
        }
        rows.append(row | {name: max(values, default=None) for name, values in lost.items()})
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
        steps = "" if row["lost_steps"] is None else f", at most {row['lost_steps']} steps made again"
        norm = "" if row["lost_norm"] is None else f", at most a norm of {row['lost_norm']:.3g} lost"
        typer.echo(f"{row['kind']:<24}{row['survived']} of {row['trials']} survived{knew}{steps}{norm}")
    for name in left_out:
        typer.echo(f"{name:<24}left out: needs root")
    typer.echo(f"{sum(survived.values())} of {len(results)} trials survived, {seconds:.0f} s")


if __name__ == "__main__":
    typer.run(campaign)
