"""The methods that can be compared: sparsifiers, torch's own hooks, and baselines."""

import json
from dataclasses import dataclass, field
from typing import Any

from gradsieve._check import BadInput, at_least, fraction, one_of
from gradsieve.comm.wire import VALUES
from gradsieve.density import Budget
from gradsieve.sparsifiers import SPARSIFIERS, make_sparsifier

DENSE = "dense"
STEADY, BUDGET = "steady", "budget"
PEERS: dict[str, dict[str, Any]] = {  # name -> options and their defaults
    "fp16": {},
    "powersgd": {"rank": 1, "start": 10},  # rank of the approximation; steps before it begins, at least 2
}
ALONE, AVERAGE, SHARE = "alone", "average", "share"
REPLICATED: dict[str, dict[str, Any]] = {  # every worker trains its own replica; options as above
    ALONE: {},
    SHARE: {"sparsifier": "exdyna", "every": 1, "delay": 0, "judge": "auto", "noise": "own", "finish": 1},
    AVERAGE: {"every": None},  # steps between averages; None: as many as match the bytes of a sparse run
}


@dataclass(frozen=True)
class Method:
    """One way to combine the workers' updates. `label` distinguishes it in a comparison."""

    name: str
    density: float
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    values: str = "fp32"  # format of sent values
    spend: str = STEADY  # or BUDGET: the density is the mean over the run


def is_hook(name: str) -> bool:
    """Whether real processes use torch's own hook for this method; all hooks cover the whole gradient."""
    return name == DENSE or name in PEERS


def is_sparse(name: str) -> bool:
    """Whether a method sends only part of the gradient or weights: neither everything nor nothing."""
    return not is_hook(name) and name not in (ALONE, AVERAGE)


def is_open(method: Method) -> bool:
    """Whether this is an average that is to send as many bytes as another run, which must come first."""
    return method.name == AVERAGE and method.options["every"] is None


def parse_method(text: str, density: float) -> Method:
    """`name` or `name:option=value:option=value`; density, values and spend may be given like options.

    >>> method = parse_method("cltk:beta=0.1:density=0.05:values=bf16", density=0.01)
    >>> method.name, method.options, method.density, method.values
    ('cltk', {'beta': 0.1}, 0.05, 'bf16')
    >>> method.label
    'cltk beta=0.1 density=0.05 values=bf16'
    """
    name, *parts = (part.strip() for part in text.split(":"))
    one_of("sparsifier", name, [*SPARSIFIERS, *PEERS, *REPLICATED])
    options = dict(_option(part, text) for part in parts)
    label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
    density = fraction("density", options.pop("density", density))
    if name == SHARE:
        return _share(density, options, label)
    known = {**PEERS, **REPLICATED}
    if name in known:
        for option, value in options.items():
            one_of(f"option of {name}", option, known[name] or ["(none)"])
            at_least(option, value, 2 if option == "start" else 1)
        return Method(name, 1.0, {**known[name], **options}, label)
    values = one_of("values", options.pop("values", "fp32"), ("fp32",) if name == DENSE else VALUES)
    spend = one_of("spend", options.pop("spend", STEADY), (STEADY, BUDGET))
    made = make_sparsifier(name, **options)
    if spend == BUDGET and not made.SHOWS_MAGNITUDES:
        able = ", ".join(known for known, kind in SPARSIFIERS.items() if kind.SHOWS_MAGNITUDES)
        raise BadInput(f"spend=budget needs one of {able}, got {name}")
    return Method(name, 1.0 if name == DENSE else density, options, label, values, spend)


def _share(density: float, options: dict[str, Any], label: str) -> Method:
    values = one_of("values", options.pop("values", "fp32"), VALUES)
    options = {**REPLICATED[SHARE], **options}
    at_least("every", options["every"], 1)
    one_of("delay", options["delay"], (0, 1))
    one_of("noise", options["noise"], ("own", "averaged"))  # Adam's second moment: "averaged" needs ReplicaAdamW
    one_of("finish", options["finish"], (0, 1))  # 1: end with an average of all weights
    one_of("judge", options["judge"], ("auto", "drift", "curvature"))
    one_of("sparsifier", options["sparsifier"], SPARSIFIERS)
    own = {key: value for key, value in options.items() if key not in REPLICATED[SHARE]}
    if reason := make_sparsifier(options["sparsifier"], **own).for_gradients_only():
        raise BadInput(f"sparsifier of share must work on weights, got {options['sparsifier']}, which {reason}")
    return Method(SHARE, density, options, label, values)


def has_momentum(name: str) -> bool:
    """Whether a method applies momentum itself, so that the optimizer must not."""
    return name in SPARSIFIERS and "momentum" in make_sparsifier(name).options()


def as_spent(density: float, spend: str, steps: int) -> float | Budget:
    """The density of a run of `steps` steps, in every step or on average."""
    return Budget(density, total_steps=steps) if spend == BUDGET else density


def parse_methods(text: str, density: float) -> list[Method]:
    """Parse several methods, separated by commas; each only once."""
    methods = [parse_method(part, density) for part in text.split(",") if part.strip()]
    if not methods:
        raise BadInput(f"sparsifiers must name one at least, got {text!r}")
    for method in methods:
        if [other.label for other in methods].count(method.label) > 1:
            raise BadInput(f"sparsifiers must be named once each, got {method.label} again")
    return methods


def _option(part: str, text: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    if not equals:
        raise BadInput(f"an option of a sparsifier must be written name=value, got {part!r} in {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
