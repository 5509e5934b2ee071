"""Random calls of all public functions: each must return a result or raise one clear sentence.

Run it:  python -m studies.faults.calls
"""

import inspect
import json
import math
import random
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
MOST = 4  # options of one call
_OWN = ("self", "sparsifier", "labels", "options", "ddp_model", "model", "optimizer", "join", "advise")


def _options(call: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name not in _OWN]


def _reducer(**given: Any) -> Any:
    given = {"rank": 0, "world_size": 2, **given}
    made = gradsieve.SparseReducer(gradsieve.make_sparsifier("topk"), **given)
    made.set_density(given.get("density", 0.1))
    return made


def _sparsify(**given: Any) -> None:
    """In a group of one worker."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    sieve = gradsieve.sparsify(model, given.pop("sparsifier", "topk"), **given)
    sieve.set_density(given.get("density", 0.1))


def _share(**given: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradsieve.share(model, optimizer, given.pop("sparsifier", "topk"), **given).close()


def _table() -> dict[str, tuple[Callable[..., Any], list[str]]]:
    found: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, kind in SPARSIFIERS.items():
        found[name] = (
            lambda name=name, **given: gradsieve.make_sparsifier(name, **given),
            [*_options(kind), "zzz"],
        )
    makers = (gradsieve.Budget, gradsieve.LowPass, gradsieve.Momentum, gradsieve.dgc_warm_up, Auto, VirtualWorld)
    for maker in makers:
        found[maker.__name__] = (maker, _options(maker))
    found["seconds"] = (seconds, ["timeout"])
    found["make_sparsifier"] = (lambda **given: gradsieve.make_sparsifier(given.pop("name", "topk")), ["name"])
    found["SparseReducer"] = (_reducer, _options(gradsieve.SparseReducer))
    return found


CALLS = _table()
WITH_A_GROUP = {  # of torch.distributed
    "sparsify": (_sparsify, ["sparsifier", "zzz", *_options(gradsieve.sparsify)]),
    "share": (_share, ["sparsifier", "zzz", *_options(gradsieve.share)]),
}


def check_call(call: Callable[[], Any]) -> str:
    """Check that a call returns or raises one of our sentences, or Python's own on missing arguments."""
    words = ""
    try:
        call()
    except BadInput as error:
        words = str(error)
        assert "\n" not in words
        assert len(words) > 10
    except TypeError as error:
        if not re.search(r"missing \d+ required|unexpected keyword argument", str(error)):
            raise
        words = str(error)
    return words


def random_call(chance: random.Random, names: list[str]) -> tuple[str, dict[str, Any], str]:
    """Call one of these functions with random options; returns both and the outcome."""
    name = chance.choice(names)
    call, options = {**CALLS, **WITH_A_GROUP}[name]
    chosen = chance.sample(options, chance.randrange(min(MOST, len(options)) + 1))
    given = {option: chance.choice(PLAIN if chance.random() < 0.5 else ODD) for option in chosen}
    try:
        return name, given, "a sentence" if check_call(lambda: call(**given)) else "a result"
    except Exception as error:
        return name, given, f"{type(error).__name__}: {error}"


def main(
    calls: Annotated[int, typer.Option(help="How many.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Same seed, same calls.")] = 0,
) -> None:
    """Count the outcomes, and print every call that ended in neither a result nor a sentence."""
    warnings.simplefilter("ignore")
    chance, found = random.Random(seed), Counter[str]()
    odd: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        names = [*CALLS, *WITH_A_GROUP, *WITH_A_GROUP]
        for _ in range(calls):
            name, given, outcome = random_call(chance, names)
            if outcome in ("a result", "a sentence"):
                found[outcome] += 1
            else:
                odd.append(f"{name}({given}): {outcome}")
        dist.destroy_process_group()
    typer.echo(json.dumps({"calls": calls, **found, "neither": len(odd), "which": odd[:50]}, indent=2))
    raise typer.Exit(bool(odd))


if __name__ == "__main__":
    typer.run(main)
