"""Checks of arguments: each raises one sentence with the name, the rule and the value."""

import difflib
import inspect
import math
import os
from collections.abc import Iterable, Mapping
from numbers import Number
from pathlib import Path
from typing import Any


class BadInput(ValueError):
    """A mistake of the user; the command line shows its one sentence without a traceback."""


class BadType(BadInput, TypeError):
    """An argument of the wrong type."""


def fraction(name: str, value: Any) -> float:
    """A number in (0, 1]."""
    if not 0 < number(name, value) <= 1:
        raise BadInput(f"{name} must be in (0, 1], got {value}")
    return float(value)


def positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    if not 0 < number(name, value) < math.inf:
        raise BadInput(f"{name} must be positive and finite, got {value}")
    return float(value)


def below_one(name: str, value: Any) -> float:
    """A number in [0, 1)."""
    if not 0 <= number(name, value) < 1:
        raise BadInput(f"{name} must be in [0, 1), got {value}")
    return float(value)


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadType(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise BadInput(
            f"{name} must be a number that a float can hold, got one of {len(str(value))} digits"
        ) from None


def function(name: str, value: Any, *arguments: Any) -> Any:
    """Call a function of the user; it must take these arguments."""
    try:
        inspect.signature(value).bind(*arguments)
    except (TypeError, ValueError):
        raise BadType(f"{name} must be a function of {len(arguments)} argument(s), got {value!r}") from None
    return value(*arguments)


def has_methods(name: str, value: Any, kind: str, *methods: str) -> None:
    """Check that an object of the user has certain methods."""
    for method in methods:
        if not callable(getattr(value, method, None)):
            raise BadType(f"{name} must be a {kind}, got {type(value).__name__}, which has no {method}()")


def sizes_of(name: str, value: Any) -> list[int]:
    """A list of whole numbers, none negative."""
    return [at_least(name, each, 0) for each in list_of(name, value)]


def dict_of(name: str, value: Any) -> dict[Any, Any]:
    """A copy of a dict; of None, an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadType(f"{name} must be a dict, got {value!r}")
    return dict(value)


def dict_with(name: str, value: Any, needed: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    """A dict with these keys, such as a part of a state dict."""
    found, needed = dict_of(name, value), set(needed)
    if not needed <= set(found) <= needed | set(optional):
        raise BadInput(f"{name} must have the keys {sorted(needed)}, got {sorted(map(str, found))}")
    return found


def path_of(name: str, value: Any) -> Path:
    """A path, given as a text or as a `Path`."""
    if not isinstance(value, str | os.PathLike):
        raise BadType(f"{name} must be a path, got {value!r}")
    return Path(value)


def list_of(name: str, value: Any) -> list[Any]:
    """A copy of a list or tuple."""
    if not isinstance(value, list | tuple | range):
        raise BadType(f"{name} must be a list, got {value!r}")
    return list(value)


def at_least(name: str, value: Any, smallest: int) -> int:
    """A whole number that is not below `smallest`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadType(f"{name} must be a whole number, got {value!r}")
    if value < smallest:
        raise BadInput(f"{name} must be at least {smallest}, got {value}")
    return value


def one_of(name: str, value: Any, known: Iterable[Any]) -> Any:
    """One of the known values."""
    known = list(known)
    # The words are names and numbers, and a tensor cannot be looked up among them.
    if not isinstance(value, (str, Number, type(None))) or value not in known:
        near = difflib.get_close_matches(str(value), [str(word) for word in known], 1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise BadInput(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}{hint}")
    return value


def check_rank(rank: Any, world_size: Any) -> None:
    """One of `world_size` workers."""
    at_least("world_size", world_size, 1)
    if at_least("rank", rank, 0) >= world_size:
        raise BadInput(f"rank must be below world_size {world_size}, got {rank}")
