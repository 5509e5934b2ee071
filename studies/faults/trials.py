"""Trials: one fault each, and its outcome."""

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradsieve_lab.netlab.network import Network, network
from gradsieve_lab.netlab.rates import parse_links
from studies.faults.launching import Launch, free_port, launch
from studies.faults.results import CALM, SLACK_S, Result, Trial
from studies.faults.worker import MODES, PHASES, Plan


def calm(mode: str, folder: Path) -> str:
    """The final weights of an undisturbed run."""
    weights = launch(Plan(mode, str(folder / "calm"), str(folder / "reports"))).weights
    assert weights is not None, "the undisturbed run must finish"
    return weights


def worker_trial(fault: str) -> Trial:
    """A worker is killed, stopped, or raises an error; the others must notice, and the run continues."""

    def trial(chance: random.Random, folder: Path) -> Result:
        mode, phase = chance.choice(MODES), chance.choice(PHASES)
        kind = f"{fault} a worker"
        plan = Plan(
            mode,
            str(folder / "checkpoint"),
            str(folder / "reports"),
            victim=chance.randrange(3),
            phase=phase,
            count=1 if phase in ("startup", "handshake") else chance.randrange(1, 4),
            fault=fault,
            regroup=chance.random() < 0.3 and phase != "startup",
            port=free_port() if chance.random() < 0.5 else 0,
        )
        weights = CALM[mode]
        first = launch(plan)
        what = f"{mode}, rank {plan.victim} in {phase}{', store in rank 0' if plan.port else ''}"
        if first.hung:
            return Result(kind, False, f"{what}: ranks {first.hung} hung")
        if first.fault_at is None:
            return Result(kind, first.weights == weights, f"{what}: the moment never came")
        known = max(report["at"] for report in first.survivors(plan.victim)) - first.fault_at
        wrong = _wrong(plan, first, known)
        lost = max((report.get("lost_norm") or 0.0 for report in first.survivors(plan.victim)), default=0.0)
        if wrong:
            return Result(kind, False, f"{what}: {wrong}", known)
        if plan.regroup and all(report["outcome"] == "regrouped" for report in first.survivors(plan.victim)):
            return Result(kind, True, f"{what}: went on without it", known, lost_norm=lost)
        again = launch(replace(plan, victim=-1, fault="", port=0))
        ok = again.weights == weights and not list(Path(plan.folder).rglob("*.partial"))
        by = ", known by DDP's own collective" if any(map(_by_ddp, first.survivors(plan.victim))) else ""
        how = "resumed to the same weights" if ok else "other weights"
        return Result(kind, ok, f"{what}{by}: {how}", known, _steps_lost(first, again))

    return trial


def _steps_lost(first: Launch, again: Launch) -> int | None:
    """The steps that were complete when a run failed, and that its successor had to make again."""
    reached = [report["step"] for report in first.reports.values() if "step" in report]
    begun = [report["from"] for report in again.reports.values() if "from" in report]
    return max(reached) - min(begun) if reached and begun else None


def _wrong(plan: Plan, done: Launch, known: float) -> str:
    if plan.phase == "startup":
        return ""  # torch's own rendezvous: it ends by its own timeout
    for report in done.survivors(plan.victim):
        outcome = report["outcome"]
        if _by_ddp(report):
            continue
        if outcome not in ("lost", "regrouped", "finished"):
            return f"rank {report['rank']} ended with {outcome}: {report.get('words', '')}"
        if outcome != "finished" and report["ranks"] != [plan.victim]:
            return f"rank {report['rank']} names {report['ranks']}: {report.get('words', '')}"
    return "" if known < plan.timeout + SLACK_S else f"known after {known:.0f} s only"


def _by_ddp(report: dict[str, Any]) -> bool:
    """Whether a worker was in one of DDP's own collectives: DDP rebuilds its buckets in the second step."""
    return report["outcome"] == "RuntimeError" and "_pre_forward" in report["in"]


def link_trial(chance: random.Random, folder: Path) -> Result:
    """A link is down for a while or forever, or loses nine tenths of its rate."""
    how = chance.choice(["down 1 s", "down 10 s", "down for ever", "a tenth of its rate"])
    mode, kind = chance.choice(MODES), "a link fails"
    plan = Plan(mode, str(folder / "checkpoint"), str(folder / "reports"), pause=0.3, timeout=6.0)
    weights = CALM[mode]
    with network(parse_links("100mbit", 3)) as made:
        victim = chance.randrange(3)

        def meanwhile(processes: list[object]) -> None:
            time.sleep(chance.uniform(0.5, 3.0))
            (Path(plan.reports) / "fault").write_text(str(time.monotonic()))
            _disturb(made, victim, how)

        done = launch(plan, made.places(3), meanwhile)
    outcomes = {report["outcome"] for report in done.reports.values()}
    if done.hung:
        return Result(kind, False, f"{mode}, {how}: ranks {done.hung} hung")
    if outcomes == {"finished"} and done.weights == weights:
        return Result(kind, True, f"{mode}, {how}: went on as if nothing had happened")
    again = launch(replace(plan, pause=0.0))
    known = max(report["at"] for report in done.reports.values()) - (done.fault_at or 0.0)
    ok = again.weights == weights and known < plan.timeout + SLACK_S + 10
    return Result(kind, ok, f"{mode}, {how}: {sorted(outcomes)}, then resumed", known, _steps_lost(done, again))


def _disturb(made: Network, victim: int, how: str) -> None:
    if how == "a tenth of its rate":
        made.set_rate(victim, 10_000_000)
        return
    made.set_link(victim, up=False)
    if how != "down for ever":
        time.sleep(float(how.split()[1]))
        made.set_link(victim, up=True)
