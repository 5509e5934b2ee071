"""Reports as flat numbers, for loggers."""

import json
import math
from dataclasses import replace

import torch

from gradsieve import ShareReport, VirtualWorld, virtual_reducers
from gradsieve.reports import StepReport


def one_report() -> StepReport:
    reducers = virtual_reducers("exdyna", 0.1, world_size=2)
    VirtualWorld(2).run([reducer.reduce(torch.randn(1000)) for reducer in reducers])
    report = reducers[0].report
    assert report is not None
    return report


def test_scalars_are_plain_finite_numbers_with_flat_names() -> None:
    report = one_report()
    found = report.scalars()
    assert found["gradsieve/density"] == report.density
    assert found["gradsieve/bytes_sent"] == report.bytes_sent
    assert found["gradsieve/communicate_ms"] == 1e3 * report.seconds["communicate"]
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert all(name.startswith("gradsieve/") and name.count("/") == 1 for name in found)
    json.dumps(found, allow_nan=False)


def test_what_is_not_known_is_left_out() -> None:
    report = replace(one_report(), threshold=None, residual_norm=math.nan)
    assert not {"gradsieve/threshold", "gradsieve/residual_norm"} & set(report.scalars())


def test_a_round_has_its_own_numbers() -> None:
    known = vars(one_report())
    found = ShareReport(**known, round=3, restored=[1], spread=0.5).scalars()
    assert (found["gradsieve/round"], found["gradsieve/restored"], found["gradsieve/spread"]) == (3.0, 1.0, 0.5)
