"""The plots of a section: pure functions from runs to what plotly draws."""

import html
import math
import textwrap
from collections.abc import Sequence

from gradsieve_lab.report.curves import median, number, points, rounded, thin
from gradsieve_lab.report.lines import Json, Key, Pairs, Plot, axes, line_plot, log_axis, trace
from gradsieve_lab.report.style import NEUTRAL, Shown, Style
from gradsieve_lab.runs.records import Run

ASKED = Style(NEUTRAL.light, NEUTRAL.dark, "dash", "")
PHASES = {  # lightness differs too, for colour-blind readers
    "forward": Style("#2f4b66", "#5f7f9e"),
    "backward": Style("#6f93b5", "#9dbad6"),
    "select": Style("#d55e00", "#f5853f"),
    "communicate": Style("#e9b949", "#f3d27a"),
    "other": Style("#c3c9d1", "#48525d"),
}


def draw_all(shown: Sequence[Shown]) -> list[Plot]:
    """Every plot, in the order of the page; empty ones have a reason."""
    metrics = [metric_against(shown, column) for column in ("step", "bytes", "seconds")]
    draws = (loss, density, buildup, imbalance, threshold, residual, phases)
    replicas = [plot for plot in (spread(shown), hidden(shown)) if plot.data]  # only for runs that have some
    return metrics + [draw(shown) for draw in draws] + replicas


def metric_against(shown: Sequence[Shown], column: str) -> Plot:
    """The metric against steps, bytes or seconds."""
    metric = shown[0].run.metric
    axis, title, about = {
        "step": ("step", "steps", "The metric after each number of steps"),
        "bytes": (
            "bytes sent by a worker, in total",
            "bytes",
            "The metric against bytes sent; left is cheaper",
        ),
        "seconds": ("seconds of training", "time", "The metric against training time; left is faster"),
    }[column]
    about += f", {'higher' if metric.higher_is_better else 'lower'} is better."

    def pairs(run: Run) -> list[tuple[object, object]]:
        return [(line.get(column), line.get("value")) for line in run.metrics]

    layout = axes(axis, metric.name, log_x=column == "bytes", percent=metric.percent)
    empty = Plot(
        f"metric-{column}", f"{metric.name} against {title}", about, layout=layout, missing="no run was evaluated"
    )
    if column == "bytes":
        layout["xaxis"] |= {"exponentformat": "SI", "ticksuffix": "B"}
    return line_plot(empty, shown, pairs)


def spread(shown: Sequence[Shown]) -> Plot:
    """How far apart replicas are."""
    about = "Distance of a worker's weights from the mean where they were exchanged, relative to it."
    return _step_plot("spread", "replicas' spread", about, shown, "no run has a replica per worker")


def hidden(shown: Sequence[Shown]) -> Plot:
    """Communication that overlaps with computing."""
    about = "Seconds of communication per step that nobody waited for, because it overlapped with computing."
    return _step_plot("hidden", "hidden communication", about, shown, "no run exchanges while it computes")


def loss(shown: Sequence[Shown]) -> Plot:
    """The training loss."""
    return _step_plot("loss", "training loss", "Mean loss of the workers' batches.", shown, "no step has a loss")


def density(shown: Sequence[Shown]) -> Plot:
    """The realised density of the sparse runs, and the density asked for."""
    sparse = [each for each in shown if any((number(step.density) or 1.0) < 0.999 for step in each.run.steps)]
    about = "The fraction of the gradient that a step's update covers; dashed grey is the density asked for."
    if sparse and (full := [each.label for each in shown if each not in sparse and each.run.steps]):
        about += f" Not drawn, because each of their steps sends everything or nothing: {', '.join(full)}."
    layout = axes("step", "realised density", log_y=True, percent=True)
    reason = (
        "every step sends everything or nothing" if any(each.run.steps for each in shown) else "no run has a step"
    )
    empty = Plot("density", "realised density", about, layout=layout, missing=reason)
    plot = line_plot(empty, sparse, _steps("density"), noisy=True)
    asked: dict[tuple[object, ...], Json] = {}
    for each in sparse:
        n = number(each.run.header.get("n")) or math.nan
        xs, ys = points(((step.step, (number(step.k) or math.nan) / n) for step in each.run.steps), log_y=True)
        if any(y is not None and y < 0.999 for y in ys):
            line = trace("asked for", ASKED, thin(xs, ys), place=-1)
            same = tuple(dict.fromkeys(line["y"]))
            if same not in asked or len(asked[same]["x"]) < len(line["x"]):
                asked[same] = line | {"mode": "lines"}
    if plot.data:
        plot.data.extend(asked.values())
        plot.keys.extend([Key("asked for", ASKED)] if asked else [])
        layout["yaxis"] |= log_axis([y for line in plot.data for y in line["y"] if y is not None], least=2.0)
    return plot


def buildup(shown: Sequence[Shown]) -> Plot:
    """Positions sent per position asked for."""
    about = "Positions sent per position asked for: 1 is exact, more means that workers chose different ones."
    return _step_plot("buildup", "build-up", about, shown, "no method reports it")


def imbalance(shown: Sequence[Shown]) -> Plot:
    """How uneven the workers' shares are."""
    about = "The largest worker's share over the mean share: 1 is even, more means padding on the wire."
    return _step_plot("imbalance", "imbalance", about, shown, "no method reports it")


def threshold(shown: Sequence[Shown]) -> Plot:
    """The threshold of the methods that have one."""
    about = "The magnitude from which an entry is sent, for methods with a threshold; logarithmic."
    return _step_plot("threshold", "threshold", about, shown, "no method here has one", log_y=True)


def residual(shown: Sequence[Shown]) -> Plot:
    """What error feedback holds back: its norm, or the squared norm if only that was measured."""
    about = "What error feedback holds back for later steps, mean over workers; it should level off."
    if any(number(step.residual_norm) is not None for each in shown for step in each.run.steps):
        return _step_plot("residual_norm", "residual norm", about, shown, "")
    return _step_plot("error", "residual, squared norm", about, shown, "no run measured it")


def phases(shown: Sequence[Shown]) -> Plot:
    """Where the time of a step goes, as stacked bars of medians."""
    about = "Median time of each phase of a step; the remaining time is other."
    times: list[tuple[Shown, dict[str, float]]] = []
    for each in shown:
        raw = [step.seconds for step in each.run.steps]
        found = {phase: 1e3 * (median(line.get(phase) for line in raw) or 0.0) for phase in (*PHASES, "step")}
        found["other"] = max(0.0, found["step"] - sum(found[phase] for phase in PHASES if phase != "other"))
        if any(found.values()):
            times.append((each, found))
    if not times:
        return Plot("phases", "time of a step", about, missing="no run has times")
    names = [
        "<br>".join(html.escape(part, quote=False) for part in textwrap.wrap(each.label, 22)) for each, _ in times
    ]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": phase,
            "y": list(range(len(times))),  # not the names, of which two may look the same
            "x": rounded(found[phase] for _, found in times),
            "meta": {"light": style.light, "dark": style.dark, "place": -1},
            "hovertemplate": f"{phase}: %{{x:.3~g}} ms<extra></extra>",
        }
        for phase, style in PHASES.items()
    ]
    layout = axes("milliseconds", "") | {
        "barmode": "stack",
        "bargap": 0.4,
        "height": max(340, 100 + 38 * len(times)),
    }
    ticks = {"tickmode": "array", "tickvals": list(range(len(times))), "ticktext": names}
    layout["yaxis"] = {"autorange": "reversed", "showgrid": False, "type": "linear", **ticks}
    alt = "; ".join(f"{each.label} {found['step']:.3g} ms" for each, found in times)
    keys = [Key(phase, style, bar=True) for phase, style in PHASES.items()]
    return Plot(
        "phases", "time of a step", about, data, layout, keys, f"Stacked bars of the time of a step: {alt}."
    )


def _step_plot(
    key: str, title: str, about: str, shown: Sequence[Shown], missing: str, *, log_y: bool = False
) -> Plot:
    empty = Plot(key, title, about, layout=axes("step", title, log_y=log_y), missing=missing)
    return line_plot(empty, shown, _steps(key), noisy=True)


def _steps(key: str) -> Pairs:
    return lambda run: [(step.step, getattr(step, key)) for step in run.steps]
