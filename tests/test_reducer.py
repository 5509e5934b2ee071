"""The reducer's own rules: what it accepts, what it says otherwise, what it reports."""

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from studies.sparsifiers.released import ReleasedState
from torch import Tensor

from gradsieve import Budget, Sent, SparseReducer, VirtualWorld, dgc_warm_up, make_sparsifier, ops
from gradsieve.density import Density, Schedule
from gradsieve.feedback import Feedback
from gradsieve.sparsifiers.hard_threshold import authors_rule
from gradsieve.sparsifiers.sage import SAGEState
from helpers import Group, assert_same, gradients, run_in_pieces


def make(**changes: object) -> SparseReducer:
    settings: dict[str, object] = {"density": 0.01, "rank": 0, "world_size": 1, **changes}
    return SparseReducer(make_sparsifier("topk"), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"density": 0}, ValueError, r"density must be in \(0, 1\], got 0"),
        ({"density": 1.5}, ValueError, r"density must be in \(0, 1\], got 1.5"),
        ({"density": -0.1}, ValueError, "got -0.1"),
        ({"density": math.nan}, ValueError, "got nan"),
        ({"density": "0.1"}, TypeError, "density must be a number, a function of the step or a Budget, got '0.1'"),
        ({"density": True}, TypeError, "density must be a number, got True"),
        ({"rank": 1}, ValueError, "rank must be below world_size 1, got 1"),
        ({"rank": -1}, ValueError, "rank must be at least 0, got -1"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"world_size": 2.0}, TypeError, "world_size must be a whole number, got 2.0"),
    ],
)
def test_bad_settings(changes: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(**changes)


def test_sparsifier_must_be_one() -> None:
    with pytest.raises(TypeError, match="sparsifier must be a Sparsifier"):
        SparseReducer("exdyna", 0.1, rank=0, world_size=1)  # type: ignore[arg-type]


def test_reducers_may_share_a_sparsifier(sparsifier: str) -> None:
    """It has no state: what one reducer learns with it, another does not notice."""
    made, world = make_sparsifier(sparsifier), VirtualWorld(2)
    groups = [[SparseReducer(made, 0.02, rank=rank, world_size=2) for rank in range(2)] for _ in range(2)]
    alone = [Group(sparsifier, 0.02, 2) for _ in range(2)]
    for step in range(12):
        for scale, reducers, other in zip((1.0, 100.0), groups, alone, strict=True):
            grads = [scale * grad for grad in gradients("normal", 500, 2, step)]
            found = world.run([reducer.reduce(grad) for reducer, grad in zip(reducers, grads, strict=True)])
            assert torch.equal(found[0], other.step(grads)[0]), f"step {step}"
    for reducers, other in zip(groups, alone, strict=True):
        assert_same({r.rank: r.state_dict() for r in reducers}, dict(enumerate(other.states())))


@pytest.mark.parametrize(
    ("grad", "error", "words"),
    [
        (torch.zeros(10, dtype=torch.int64), TypeError, "grad must be a tensor of one of .*, got int64"),
        (torch.zeros(10, dtype=torch.complex64), TypeError, "got complex64"),
        ([1.0, 2.0], TypeError, r"got \[1.0, 2.0\]"),
        (torch.zeros(2, 5), ValueError, r"grad must be a contiguous vector .*, got shape \(2, 5\)"),
        (torch.zeros(20)[::2], ValueError, "grad must be a contiguous vector"),
        (torch.zeros(0), ValueError, "with an element at least"),
        (torch.zeros(11), ValueError, "grad must have n = 10 elements as before, got 11"),
        (torch.zeros(10, dtype=torch.float16), TypeError, "grad must stay float32, got float16"),
    ],
)
def test_bad_gradients_between_steps(grad: torch.Tensor, error: type[Exception], words: str) -> None:
    reducer, world = make(), VirtualWorld(1)
    world.run([reducer.reduce(torch.ones(10))])
    before = reducer.state_dict()
    with pytest.raises(error, match=words):
        world.run([reducer.reduce(grad)])
    assert_same(reducer.state_dict(), before)
    world.run([reducer.reduce(torch.ones(10))])


@pytest.mark.parametrize("out", [torch.zeros(9), torch.zeros(10).double(), torch.zeros(20)[::2]])
def test_bad_out(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="out must be a contiguous float32 vector of 10"):
        make().reduce(torch.ones(10), out=out)


def test_sizes_must_add_up() -> None:
    with pytest.raises(ValueError, match="sizes must add up to n = 10, got 9"):
        make(sizes=[4, 5]).reduce(torch.ones(10))


def test_order_of_calls() -> None:
    reducer = make()
    with pytest.raises(RuntimeError, match="residual does not exist before the first step"):
        _ = reducer.residual
    with pytest.raises(RuntimeError, match="states do not exist before the first step"):
        _ = reducer.states
    assert reducer.report is None
    VirtualWorld(1).run([reducer.reduce(torch.ones(10))])
    assert reducer.report is not None
    assert reducer.report.step == 0
    assert len(reducer.residual) == 10


def test_world_of_another_size() -> None:
    programs = [
        SparseReducer(make_sparsifier("topk"), 0.1, rank=r, world_size=3).reduce(torch.ones(9)) for r in range(2)
    ]
    with pytest.raises(ValueError, match="world_size must be the number of workers, 2, got 3"):
        VirtualWorld(2).run(programs)


def test_two_workers_with_one_rank() -> None:
    programs = [
        SparseReducer(make_sparsifier("topk"), 0.1, rank=0, world_size=2).reduce(torch.ones(9)) for _ in range(2)
    ]
    with pytest.raises(ValueError, match="rank must be the worker's place in the world, 1, got 0"):
        VirtualWorld(2).run(programs)


def test_workers_that_resume_at_different_steps() -> None:
    group = Group("exdyna", 0.1, 2)
    group.step(gradients("normal", 50, 2, 0))
    state = group.reducers[1].state_dict()
    group.step(gradients("normal", 50, 2, 1))
    group.reducers[1].load_state_dict(state)
    group.reducers[0].load_state_dict(group.reducers[0].state_dict())
    with pytest.raises(ValueError, match="workers disagree on step: rank 0 has 2, rank 1 has 1"):
        group.step(gradients("normal", 50, 2, 2))


def test_a_world_that_fails_leaves_no_trace(sparsifier: str) -> None:
    """A lost connection in the middle of a step: residuals are as before, and the step can be run again."""
    group, twin = Group(sparsifier, 0.05, 2), Group(sparsifier, 0.05, 2)
    for step in range(3):
        group.step(gradients("normal", 500, 2, step))
        twin.step(gradients("normal", 500, 2, step))
    before, grads = group.states(), gradients("normal", 500, 2, 3)
    programs = [r.reduce(g.clone()) for r, g in zip(group.reducers, grads, strict=True)]
    for program in programs:
        assert program.send(None).tag  # it waits for a reply that never comes
        program.close()
    assert_same(dict(enumerate(group.states())), dict(enumerate(before)))
    assert torch.equal(group.step(grads)[0], twin.step(grads)[0])


def test_report() -> None:
    group = Group("exdyna", 0.02, 4)
    for step in range(12):
        group.step(gradients("normal", 10_000, 4, step))
    for rank, report in enumerate(group.reports):
        assert report.step == 11
        assert report.n == 10_000
        assert report.k == report.selected == report.union == 200
        assert report.density == 0.02
        assert report.buildup == 1
        assert report.imbalance == max(report.counts) * 4 / 200
        assert report.threshold is not None
        assert report.residual_norm == pytest.approx(float(group.reducers[rank].residual.norm()))
        assert set(report.seconds) == {"accumulate", "select", "update", "write", "communicate", "measure"}
        assert all(value >= 0 for value in report.seconds.values())
        assert report.bytes_sent == group.reducers[rank].ledger.total.handed_bytes
        # 128 bins of a byte, this worker's packed positions, and 200 values with the pulse, as 4 rows of float32.
        packed = ops.packed_bytes(report.counts[rank], 2_500)
        assert report.bytes_sent == pytest.approx(2 + 128 + packed + 4 * 204, abs=8)  # uneven partitions


def test_norm_is_not_measured_when_told_so() -> None:
    reducer = make(measure=False)
    VirtualWorld(1).run([reducer.reduce(torch.ones(10))])
    assert reducer.report is not None
    assert reducer.report.residual_norm is None


def test_gradient_is_not_changed_unless_it_is_out() -> None:
    reducer, grad = make(world_size=1), torch.randn(1_000)
    kept = grad.clone()
    update = VirtualWorld(1).run([reducer.reduce(grad)])[0]
    assert torch.equal(grad, kept)
    assert update.data_ptr() != grad.data_ptr()


def test_gradient_that_requires_grad() -> None:
    update = VirtualWorld(1).run([make().reduce(torch.ones(10, requires_grad=True))])[0]
    assert not update.requires_grad


def test_pieces_make_the_same_step(sparsifier: str) -> None:
    whole, pieces = Group(sparsifier, 0.05, 3), Group(sparsifier, 0.05, 3)
    for step in range(15):
        grads = gradients("normal", 1_000, 3, step)
        expected = whole.step(grads)
        found = run_in_pieces(pieces, grads, [0, 1, 300, 301, 900, 1_000], {})
        assert torch.equal(found[0], expected[0]), f"step {step}"
    for one, other in zip(whole.residuals(1_000), pieces.residuals(1_000), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [False, True])
def test_pieces_that_are_held_back(sparsifier: str, bad: bool) -> None:
    """Their residual stays to the last bit, also in a step that the worker who holds back calls off itself."""
    group, edges = Group(sparsifier, 0.05, 2), [0, 400, 1_000]
    for step in range(12):
        run_in_pieces(group, gradients("normal", 1_000, 2, step), edges, {})
    before = group.residuals(1_000)
    grads = gradients("normal", 1_000, 2, 99)
    grads[0][400:] = 0
    if bad:
        grads[0][7] = math.nan
    run_in_pieces(group, grads, edges, {0: {1}})
    after = group.residuals(1_000)
    assert torch.equal(after[0][400:], before[0][400:])
    assert group.reports[0].finite != bad
    assert torch.equal(after[1], before[1]) == bad or sparsifier == "dense"
    run_in_pieces(group, gradients("normal", 1_000, 2, 100), edges, {})
    assert group.reports[0].finite


def threshold_of(reducer: SparseReducer) -> float:
    state = reducer.states.sparsifier
    assert isinstance(state, SAGEState | ReleasedState)
    return state.threshold


@pytest.mark.parametrize(
    "density", [0.01, dgc_warm_up(0.01, steps_per_epoch=2), lambda step: 1.0 if step < 3 else 0.01]
)
@pytest.mark.parametrize("dense_steps", [0, 10])
@pytest.mark.parametrize("name", ["sage", "released_exdyna", "released_micro"])
def test_thresholds_start_from_the_target_density(
    name: str, density: float | Schedule | Density, dense_steps: int
) -> None:
    """Not from the density of the first step, at which everything may be sent."""
    n, target = 40_000, authors_rule(400)
    group = Group(name, density, 2, dense_steps=dense_steps)
    for reducer in group.reducers:
        reducer.open(n, torch.device("cpu"))
        assert threshold_of(reducer) == target
    for step in range(dense_steps):
        group.step(gradients("normal", n, 2, step))
        assert group.reports[0].density == 1
    assert threshold_of(group.reducers[0]) == target
    if dense_steps:
        group.step(gradients("normal", n, 2, dense_steps))
        assert group.reports[0].threshold == target


def test_density_is_the_constructors() -> None:
    """A saved state brings its residual, not its density."""
    first, other = Group("topk", 0.01, 1), Group("topk", 0.02, 1)
    first.step(gradients("normal", 1_000, 1, 0))
    other.reducers[0].load_state_dict(first.reducers[0].state_dict())
    assert other.reducers[0].density == 0.02
    other.reducers[0].set_density(lambda step: 0.5 if step < 5 else 0.1)
    assert other.reducers[0].density == 0.5
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 2"):
        other.reducers[0].set_density(2)
    assert other.reducers[0].density == 0.5


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_an_update_that_cannot_be_written_loses_nothing(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange is complete: what was sent is gone, what was kept is there, and the run goes on as any other."""
    group, twin = Group("exdyna", density, 2), Group("exdyna", density, 2)
    for each in (group, twin):
        each.step(gradients("normal", 1_000, 2, 0))
    seen: list[Sent] = []

    def fails_on_the_last(out: Tensor, sent: Sent) -> None:
        seen.append(sent)
        if len(seen) == 2:
            raise OSError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("gradsieve.reducer.write_", fails_on_the_last)
        with pytest.raises(OSError, match="no room"):
            group.step(gradients("normal", 1_000, 2, 1))
    twin.step(gradients("normal", 1_000, 2, 1))
    for reducer, state, sent in zip(group.reducers, twin.states(), seen, strict=True):
        assert_same(reducer.state_dict(), state)
        assert reducer.residual.any() == (density < 1)
        reducer.abandon()  # changes nothing, as no step is under way
        sent.values.fill_(math.nan)  # nor is the mean in the residual's memory
        assert_same(reducer.state_dict(), state)
    for step in range(2, 5):
        grads = gradients("normal", 1_000, 2, step)
        assert torch.equal(group.step(grads)[0], twin.step(grads)[0])


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_nothing_of_an_update_is_needed_for_what_is_held_back(density: float) -> None:
    """`finish` writes nothing: with its update thrown away, residuals are as if it had been used."""
    group, twin, edges, held = Group("exdyna", density, 2), Group("exdyna", density, 2), [0, 600, 1_000], {0: {1}}
    for each in (group, twin):
        each.step(gradients("normal", 1_000, 2, 0))
        for residual in (reducer.residual for reducer in each.reducers):
            residual[600:] = 0.5
    grads = gradients("normal", 1_000, 2, 1)
    grads[0][600:] = 0
    run_in_pieces(twin, grads, edges, held)
    programs = []
    for rank, (reducer, grad) in enumerate(zip(group.reducers, grads, strict=True)):
        reducer.begin()
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            reducer.add(
                grad[start:stop], start, torch.empty(stop - start), hold_back=number in held.get(rank, set())
            )
        programs.append(reducer.finish())
    group.world.run(programs)
    assert bool((group.reducers[0].residual[600:] == 0.5).all())
    for one, other in zip(group.states(), twin.states(), strict=True):
        assert_same(one, other)


@dataclass(frozen=True)
class Unsettled(Feedback):
    """Plain, but it fails when it is told to."""

    fails: ClassVar[bool] = False

    def settle_(self, residual: Tensor, before: Tensor) -> None:
        if self.fails:
            raise OSError("no room")


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_a_step_that_fails_while_it_is_booked_is_taken_back(density: float) -> None:
    """After the exchange, before the step is complete: the residual is the old one, not the mean."""
    group = Group("exdyna", density, 2, feedback=Unsettled())
    group.step(gradients("normal", 1_000, 2, 0))
    before = group.states()
    Unsettled.fails = True
    try:
        with pytest.raises(OSError, match="no room"):
            group.step(gradients("normal", 1_000, 2, 1))
    finally:
        Unsettled.fails = False
    for reducer, state in zip(group.reducers, before, strict=True):
        assert_same(reducer.state_dict(), state)
    twin = Group("exdyna", density, 2)
    for step in range(3):
        grads = gradients("normal", 1_000, 2, step)
        expected = twin.step(grads)
        assert not step or torch.equal(group.step(grads)[0], expected[0])


@pytest.mark.parametrize("name", ["exdyna", "topk", "dgc"])
def test_a_step_that_is_abandoned_leaves_no_trace(name: str) -> None:
    group, twin = Group(name, 0.05, 2), Group(name, 0.05, 2)
    for step in range(4):
        grads = gradients("normal", 1_000, 2, step)
        if step == 2:
            for reducer, grad in zip(group.reducers, grads, strict=True):
                reducer.begin()
                reducer.add(grad[300:], 300, torch.empty(700))
                reducer.abandon()
            for one, other in zip(group.states(), twin.states(), strict=True):
                assert_same(one, other)
        assert torch.equal(group.step(grads)[0], twin.step(grads)[0])


def test_budget_needs_magnitudes() -> None:
    words = r"a Budget needs a sparsifier with one threshold for all .*, got topk"
    with pytest.raises(ValueError, match=words):
        make(density=Budget(0.01, total_steps=100))
    reducer = make()
    with pytest.raises(ValueError, match=words):
        reducer.set_density(Budget(0.01, total_steps=100))
    assert reducer.density == 0.01
