"""Random calls of everything public: each ends in a result, or in one clear sentence."""

import inspect
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsieve
from gradsieve import SPARSIFIERS, VirtualWorld
from gradsieve._check import BadInput
from gradsieve.share.auto import Auto
from gradsieve.worlds.waiting import seconds

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 10**400, -(10**400), 0.5, 1e-3, 1.0, 1e308, 5e-324, -0.0),
    *(math.inf, -math.inf, math.nan, "", "0.1", "exdyna", "auto", "fp32", b"x", [], [1], (), {}, {"a": 1}, set()),
    *(object, object(), lambda step: 0.1, lambda step: "x", lambda: 1, lambda step: math.nan),
    *(torch.tensor(0.1), torch.tensor([1, 2]), torch.float32, timedelta(seconds=1), 1 + 2j),
]
PLAIN = [0.1, 0.5, 1, 2, 4, "fp32", None, True]
VALUE = st.one_of(st.sampled_from(PLAIN), st.sampled_from(ODD))


def _options(call: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name not in ("self", "sparsifier", "labels")]


def _calls() -> dict[str, tuple[Callable[..., Any], list[str]]]:
    found: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, kind in SPARSIFIERS.items():
        found[name] = (
            lambda name=name, **given: gradsieve.make_sparsifier(name, **given),
            [*_options(kind), "zzz"],
        )
    for maker in (
        gradsieve.Budget,
        gradsieve.LowPass,
        gradsieve.Momentum,
        gradsieve.dgc_warm_up,
        Auto,
        VirtualWorld,
    ):
        found[maker.__name__] = (maker, _options(maker))
    found["seconds"] = (seconds, ["timeout"])
    found["make_sparsifier"] = (lambda **given: gradsieve.make_sparsifier(given.pop("name", "topk")), ["name"])

    def reducer(**given: Any) -> Any:
        made = gradsieve.SparseReducer(gradsieve.make_sparsifier("topk"), **given)
        made.set_density(given.get("density", 0.1))
        return made

    found["SparseReducer"] = (reducer, _options(gradsieve.SparseReducer))
    return found


CALLS = _calls()


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_random_calls_end_in_a_result_or_one_sentence(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(CALLS)))
    call, options = CALLS[name]
    chosen = data.draw(st.lists(st.sampled_from(options), unique=True, max_size=4)) if options else []
    given_ = {option: data.draw(VALUE) for option in chosen}
    if name == "SparseReducer":
        given_ = {"rank": 0, "world_size": 2, **given_}
    check_call(lambda: call(**given_), missing_arguments=True)


def check_call(call: Callable[[], Any], *, missing_arguments: bool = False) -> None:
    """It returns, or raises one sentence that is ours; Python's own words on missing arguments are as good."""
    words = ""
    try:
        call()
    except BadInput as error:
        words = str(error)
    except TypeError as error:
        if not missing_arguments or "argument" not in str(error):
            raise
    assert "\n" not in words
    assert not words or len(words) > 10


@pytest.mark.parametrize("value", ODD, ids=lambda value: str(value)[:20])
def test_every_odd_gradient_is_refused(value: Any) -> None:
    reducer = gradsieve.SparseReducer(gradsieve.make_sparsifier("topk"), 0.5, rank=0, world_size=1)
    check_call(lambda: VirtualWorld(1).run([reducer.reduce(value)]))
