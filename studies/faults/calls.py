"""Random calls of all public functions and of all methods of what they make.

Each must return a result or raise one clear sentence.
Run it:  python -m studies.faults.calls
"""

import inspect
import json
import math
import os
import random
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
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
_OWN = ("self", "args", "kwargs", "settings", "options", "join", "advise")
_KEYS = [  # of the state dicts of sieves
    *("version", "sparsifier", "options", "rank", "world_size", "n", "step", "residual", "state", "scale"),
    *("rounds", "weights", "shared", "auto", "unread", "pending"),
]
N = 8  # elements of a vector


def _options(call: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name not in _OWN]


def _reducer(**given: Any) -> Any:
    given = {"sparsifier": gradsieve.make_sparsifier("topk"), "rank": 0, "world_size": 2, **given}
    made = gradsieve.SparseReducer(**given)
    made.set_density(given.get("density", 0.1))
    return made


def _opened() -> gradsieve.SparseReducer:
    """A reducer of one worker after a step."""
    reducer = gradsieve.SparseReducer(gradsieve.make_sparsifier("topk"), 0.25, rank=0, world_size=1)
    VirtualWorld(1).run([reducer.reduce(torch.ones(N))])
    return reducer


def _reduce(**given: Any) -> None:
    VirtualWorld(1).run([_opened().reduce(**{"grad": torch.ones(N), **given})])


def _restored(make: Callable[[], Any]) -> Callable[..., None]:
    """A state dict with some of its values replaced."""

    def call(**given: Any) -> None:
        with _closing(make()) as owner:
            state = owner.state_dict()
            owner.load_state_dict({**state, **{key: value for key, value in given.items() if key in state}})

    return call


def _virtual(**given: Any) -> None:
    gradsieve.virtual_reducers(given.pop("sparsifier", "topk"), **{"world_size": 2, **given})


def _adamw(**given: Any) -> None:
    gradsieve.ReplicaAdamW(**{"params": nn.Linear(4, 4).parameters(), **given})


def _plan(**given: Any) -> None:
    few = {"densities": [0.1], "every": [1], "ranks": [1]}
    gradsieve.plan(**{"model": 64, "workers": 2, "link": "100mbit", "step_ms": 5.0, **few, **given})


def _world(**given: Any) -> None:
    gradsieve.ProcessGroupWorld(**given).close()


def _sieve(**given: Any) -> gradsieve.Sieve:
    """In a group of one worker."""
    model = {} if "ddp_model" in given else {"ddp_model": DistributedDataParallel(nn.Linear(4, 4))}
    return gradsieve.sparsify(**{"sparsifier": "topk", **model, **given})


def _sparsify(**given: Any) -> None:
    with _closing(_sieve(**given)) as sieve:
        sieve.set_density(given.get("density", 0.1))


def _share_sieve(**given: Any) -> gradsieve.ShareSieve:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gradsieve.share(**{"model": model, "optimizer": optimizer, "sparsifier": "topk", **given})


def _share(**given: Any) -> None:
    with _closing(_share_sieve(**given)):
        pass


@contextmanager
def _closing(owner: Any) -> Iterator[Any]:
    """Ends what a sieve has begun."""
    try:
        yield owner
    finally:
        if isinstance(owner, gradsieve.ShareSieve):
            owner.close()
        if isinstance(owner, gradsieve.Sieve | gradsieve.ShareSieve):
            owner.world.close()


def _methods(make: Callable[[], Any], kind: type) -> dict[str, tuple[Callable[..., Any], list[str]]]:
    """All public methods of a sieve, each of a new one."""

    def call(name: str, **given: Any) -> None:
        with _closing(make()) as owner:
            found = getattr(owner, name)(**given)
            if hasattr(found, "__enter__"):
                with found:
                    pass

    def reads(name: str) -> None:
        with _closing(make()) as owner:
            getattr(owner, name)

    found: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, value in vars(kind).items():
        if not name.startswith("_"):
            options = [] if isinstance(value, property) else _options(value)
            found[f"{kind.__name__}.{name}"] = (
                partial(reads if isinstance(value, property) else call, name),
                options,
            )
    found[f"{kind.__name__}.load_state_dict of a changed one"] = (_restored(make), _KEYS)
    return found


def _table() -> dict[str, tuple[Callable[..., Any], list[str]]]:
    found: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, kind in SPARSIFIERS.items():
        found[name] = (
            lambda name=name, **given: gradsieve.make_sparsifier(name, **given),
            [*_options(kind), "zzz"],
        )
    makers = (
        *(gradsieve.Budget, gradsieve.LowPass, gradsieve.Momentum, gradsieve.Plain, gradsieve.dgc_warm_up),
        *(Auto, VirtualWorld, gradsieve.Meter),
    )
    for maker in makers:
        found[maker.__name__] = (maker, _options(maker))
    found["seconds"] = (seconds, ["timeout"])
    found["make_sparsifier"] = (lambda **given: gradsieve.make_sparsifier(given.pop("name", "topk")), ["name"])
    found["SparseReducer"] = (_reducer, _options(gradsieve.SparseReducer))
    found["SparseReducer.reduce"] = (_reduce, ["grad", "out"])
    for name in ("set_density", "load_state_dict", "rescale"):
        options = _options(getattr(gradsieve.SparseReducer, name))
        found[f"SparseReducer.{name}"] = (lambda name=name, **given: getattr(_opened(), name)(**given), options)
    found["SparseReducer.load_state_dict of a changed one"] = (_restored(_opened), list(_opened().state_dict()))
    found["virtual_reducers"] = (
        _virtual,
        [*_options(gradsieve.virtual_reducers), *_options(gradsieve.SparseReducer)],
    )
    found["ReplicaAdamW"] = (_adamw, _options(gradsieve.ReplicaAdamW))
    return found


CALLS = _table()
WITH_A_GROUP = {  # of torch.distributed
    "sparsify": (_sparsify, ["zzz", *_options(gradsieve.sparsify)]),
    "share": (_share, ["zzz", *_options(gradsieve.share)]),
    "plan": (_plan, _options(gradsieve.plan)),
    "ProcessGroupWorld": (_world, _options(gradsieve.ProcessGroupWorld)),
    **_methods(_sieve, gradsieve.Sieve),
    **_methods(_share_sieve, gradsieve.ShareSieve),
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
        os.chdir(folder)  # for texts that are taken for the names of folders
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        names = [*CALLS, *WITH_A_GROUP]
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
