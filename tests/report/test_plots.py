"""The plots are plain data, whatever the runs look like."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from report_runs import four_runs, make_run

from gradsieve_lab.report.curves import AT_MOST, number, points, smooth, thin
from gradsieve_lab.report.lines import Plot
from gradsieve_lab.report.plots import PHASES, draw_all
from gradsieve_lab.report.style import DASHES, NEUTRAL, PALETTE, Shown, labels, styles
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.summary import summarise


def show(runs: list[Run]) -> list[Shown]:
    names = labels(runs)
    looks = styles(names)
    return [Shown(run, name, looks[name], i) for i, (run, name) in enumerate(zip(runs, names, strict=True))]


def plots(runs: list[Run]) -> dict[str, Plot]:
    found = {plot.key: plot for plot in draw_all(show(runs))}
    json.dumps([[plot.data, plot.layout] for plot in found.values()], allow_nan=False)
    return found


def empty(name: str) -> Run:
    return replace(make_run(name), steps=[], metrics=[], end=None)


def test_all_plots_of_the_usual_comparison_are_drawn() -> None:
    found = plots(four_runs())
    assert len(found) == 10
    for plot in found.values():
        assert plot.data
        assert not plot.missing
        assert plot.alt.startswith(("Lines of", "Stacked bars"))
        assert {"light", "dark", "place"} == set(plot.data[0]["meta"])


def test_replicas_have_two_plots_more() -> None:
    run = make_run("share")
    run.steps[:] = [replace(step, spread=0.1, hidden=0.002) for step in run.steps]
    found = plots([run])
    assert found["spread"].data
    assert found["hidden"].data
    assert "spread" not in plots([make_run("exdyna")])
    row = summarise(run)
    assert (row.spread_mean, row.hidden_ms) == (pytest.approx(0.1), pytest.approx(2.0))


def test_a_plot_without_data_says_why() -> None:
    found = plots([empty("topk")])
    assert all(not plot.data and plot.missing for plot in found.values())
    assert plots([make_run("topk")])["threshold"].missing == "no method here has one"
    assert plots([make_run("dense")])["density"].missing == "every step sends everything or nothing"


def test_runs_without_points_are_left_out_of_legends() -> None:
    found = plots([make_run("dense"), make_run("exdyna"), empty("topk")])
    assert [key.label for key in found["loss"].keys] == ["dense", "exdyna"]
    assert [key.label for key in found["threshold"].keys] == ["exdyna"]
    assert [key.label for key in found["density"].keys] == ["exdyna", "asked for"]
    assert "dense" in found["density"].about
    assert "topk" not in found["density"].about


def test_bytes_are_logarithmic_and_start_after_the_first_step() -> None:
    plot = plots(four_runs())["metric-bytes"]
    assert plot.layout["xaxis"]["type"] == "log"
    assert all(min(line["x"]) > 0 for line in plot.data)


def test_the_asked_density_is_drawn_once_for_all_who_ask_the_same() -> None:
    runs = [make_run("exdyna"), make_run("topk"), make_run("micro", density=0.001), make_run("deft", steps=1)]
    asked = [line for line in plots(runs)["density"].data if line["name"] == "asked for"]
    assert sorted(round(line["y"][0], 3) for line in asked) == [0.001, 0.01]
    assert all(len(line["x"]) == 300 and line["line"]["dash"] == "dash" for line in asked)


def test_one_point_is_visible() -> None:
    for plot in plots([make_run("exdyna", steps=1, every=1)]).values():
        assert plot.data
        assert all("markers" in line.get("mode", "markers") for line in plot.data if line["name"] != "asked for")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, True, "1"])
def test_values_that_are_no_numbers_are_gaps(bad: object) -> None:
    run = make_run("exdyna", steps=30, every=5)
    keys = ("loss", "density", "imbalance", "buildup", "threshold", "residual_norm")
    changes: dict[str, Any] = {**dict.fromkeys(keys, bad), "seconds": {"step": bad}}
    run.steps[7] = replace(run.steps[7], **changes)
    run.metrics[2]["value"] = bad
    found = plots([run])
    assert found["loss"].data[0]["y"][7] is None
    assert found["metric-step"].data[0]["y"][2] is None
    assert sum(len(line["x"]) for line in found["phases"].data) == len(PHASES)


def test_what_has_no_logarithm_is_a_gap() -> None:
    assert points([(0, 1), (1, 0), (2, 3)], log_x=True, log_y=True) == ([1, 2], [None, 3])
    assert points([(1, 0)], log_y=True) == ([], [])


def test_thinning_keeps_spikes_and_order() -> None:
    ys: list[float | None] = [0.0] * 20_000
    ys[777], ys[15_001], ys[40:60] = 9.0, -9.0, [None] * 20
    xs, thinned = thin(range(len(ys)), ys)
    assert len(xs) <= AT_MOST
    assert xs == sorted(xs)
    assert {9.0, -9.0} <= set(thinned)
    assert thin([1, 2], [None, 3]) == ([1, 2], [None, 3])


def test_a_long_run_stays_small() -> None:
    found = plots([make_run("exdyna", steps=5000)])
    assert all(len(line["x"]) <= AT_MOST for plot in found.values() for line in plot.data)
    assert len(found["loss"].data) == 2  # each step faintly, the mean on top


def test_the_running_mean_is_the_mean_and_keeps_gaps() -> None:
    ys: list[float | None] = [1.0, 3.0] * 100
    ys[50] = None
    xs, means = smooth(range(200), ys)
    assert len(xs) == len(means) == 200
    assert means[50] is None
    assert means[120] == pytest.approx(2, abs=0.25)


def test_phases_add_up_to_the_step() -> None:
    bars = plots([make_run("exdyna")])["phases"].data
    assert [bar["name"] for bar in bars] == list(PHASES)
    assert sum(bar["x"][0] for bar in bars) == pytest.approx(5.1, abs=0.3)


def test_names_are_no_markup_for_plotly() -> None:
    plot = plots([make_run("<b>exdyna</b> & co")])["loss"]
    assert plot.data[0]["name"] == "&lt;b&gt;exdyna&lt;/b&gt; &amp; co"
    assert plot.keys[0].label == "<b>exdyna</b> & co"


def test_twelve_runs_look_different_and_dense_is_neutral() -> None:
    looks = styles(["dense", *(f"method {i}" for i in range(12))])
    assert looks["dense"] == NEUTRAL
    assert len({(look.light, look.dash) for look in looks.values()}) == 13
    assert len({look.dash for look in looks.values()}) == len(DASHES)


def test_runs_of_the_same_name_say_what_sets_them_apart() -> None:
    assert labels([make_run("topk"), make_run("topk", seed=1)]) == ["topk seed=0", "topk seed=1"]
    assert labels([make_run("topk"), make_run("topk"), make_run("dense")]) == ["topk (1)", "topk (2)", "dense"]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(("light", "dark"), [*PALETTE, (NEUTRAL.light, NEUTRAL.dark)])
def test_colours_have_contrast_on_both_pages(light: str, dark: str) -> None:
    assert 1.05 / (luminance(light) + 0.05) >= 3
    assert (luminance(dark) + 0.05) / (luminance("#171b20") + 0.05) >= 3


def test_numbers() -> None:
    assert number(3) == 3.0
    assert number(False) is None
