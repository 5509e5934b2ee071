"""Random calls of everything public: each ends in a result, or in one clear sentence."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from studies.faults.calls import CALLS, MOST, ODD, PLAIN, WITH_A_GROUP, check_call, random_call

import gradsieve
from gradsieve import VirtualWorld

MADE_BY_THE_LIBRARY = {
    *("CheckpointError", "NonFiniteWeights", "PeerLost", "ReplicasDiffer", "WorkersDiverged"),
    *("Plan", "Regrouped", "Selection", "Sent", "ShareReport", "Sparsifier", "Step", "StepReport", "Totals"),
}
VALUE = st.one_of(st.sampled_from(PLAIN), st.sampled_from(ODD))


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_random_calls_end_in_a_result_or_one_sentence(data: st.DataObject) -> None:
    call, options = CALLS[data.draw(st.sampled_from(sorted(CALLS)))]
    chosen = data.draw(st.lists(st.sampled_from(options), unique=True, max_size=MOST)) if options else []
    arguments = {option: data.draw(VALUE) for option in chosen}
    check_call(lambda: call(**arguments))


@pytest.mark.parametrize("kind", [gradsieve.Sieve, gradsieve.ShareSieve])
def test_every_public_method_is_called(kind: type) -> None:
    wanted = {f"{kind.__name__}.{name}" for name in vars(kind) if not name.startswith("_")}
    assert wanted <= set(WITH_A_GROUP)


def test_every_public_function_is_called() -> None:
    """Errors, and values that only the library makes, are left out."""
    called = {name.split(".")[0] for name in (*CALLS, *WITH_A_GROUP)}
    functions = {name for name in gradsieve.__all__ if callable(getattr(gradsieve, name))}
    assert functions - called == MADE_BY_THE_LIBRARY


@pytest.mark.usefixtures("one_process")
def test_a_tensor_is_no_delay() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"delay must be one of 0, 1, got tensor\(\[1, 2\]\)"):
        gradsieve.share(model, optimizer, delay=torch.tensor([1, 2]))  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("group", [0, "", torch.tensor([1, 2])], ids=str)
def test_what_is_no_process_group(group: Any) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="process_group must be a torch"):
        gradsieve.sparsify(model, process_group=group)


@pytest.mark.usefixtures("one_process")
def test_random_ways_to_sparsify_and_to_share_and_calls_of_all_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for texts that are taken for the names of folders
    chance = random.Random(0)
    for _ in range(200):
        name, arguments, outcome = random_call(chance, list(WITH_A_GROUP))
        assert outcome in ("a result", "a sentence"), (name, arguments, outcome)


@pytest.mark.parametrize("value", ODD, ids=lambda value: str(value)[:20])
def test_every_odd_gradient_is_refused(value: Any) -> None:
    reducer = gradsieve.SparseReducer(gradsieve.make_sparsifier("topk"), 0.5, rank=0, world_size=1)
    check_call(lambda: VirtualWorld(1).run([reducer.reduce(value)]))
