"""The reducer's own rules: what it accepts, what it says otherwise, what it reports."""

import math

import pytest
import torch

from gradsieve import SparseReducer, VirtualWorld, dgc_warm_up, make_sparsifier, ops
from gradsieve.density import Schedule
from gradsieve.sparsifiers.hard_threshold import authors_rule
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
        ({"density": "0.1"}, TypeError, "density must be a number, got '0.1'"),
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


def test_sparsifier_must_be_one_and_unused() -> None:
    with pytest.raises(TypeError, match="sparsifier must be a Sparsifier"):
        SparseReducer("exdyna", 0.1, rank=0, world_size=1)  # type: ignore[arg-type]
    shared = make_sparsifier("exdyna")
    SparseReducer(shared, 0.1, rank=0, world_size=2)
    with pytest.raises(ValueError, match="belong to one reducer only"):
        SparseReducer(shared, 0.1, rank=1, world_size=2)


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
    with pytest.raises(RuntimeError, match=r"end_step\(\) needs a finished reduce\(\)"):
        reducer.end_step()
    VirtualWorld(1).run([reducer.reduce(torch.ones(10))])
    reducer.end_step()
    with pytest.raises(RuntimeError, match=r"end_step\(\) needs a finished reduce\(\)"):
        reducer.end_step()


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
        assert set(report.seconds) == {"accumulate", "select", "write", "communicate", "measure"}
        assert all(value >= 0 for value in report.seconds.values())
        assert report.bytes_sent == group.reducers[rank].ledger.total.handed_bytes
        # 128 bins of a byte, this worker's packed positions, and 200 values with the pulse, as 4 rows of float32.
        packed = ops.packed_bytes(report.counts[rank], 2_500)
        assert report.bytes_sent == pytest.approx(2 + 128 + packed + 4 * 204, abs=8)  # uneven partitions


def test_norm_is_not_measured_when_told_so() -> None:
    reducer = make(measure=False)
    VirtualWorld(1).run([reducer.reduce(torch.ones(10))])
    assert reducer.end_step().residual_norm is None


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


@pytest.mark.parametrize(
    "density", [0.01, dgc_warm_up(0.01, steps_per_epoch=2), lambda step: 1.0 if step < 3 else 0.01]
)
@pytest.mark.parametrize("dense_steps", [0, 3])
def test_thresholds_start_from_the_target_density(density: float | Schedule, dense_steps: int) -> None:
    """Not from the density of the first step, at which everything may be sent."""
    group = Group("sage", density, 2, dense_steps=dense_steps)
    for reducer in group.reducers:
        reducer.open(10_000, torch.device("cpu"))
        assert reducer.sparsifier.current == authors_rule(100)  # type: ignore[attr-defined]
    for step in range(dense_steps):
        group.step(gradients("normal", 10_000, 2, step))
        assert group.reports[0].density == 1
    assert group.reducers[0].sparsifier.current == authors_rule(100)  # type: ignore[attr-defined]


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
def test_a_writer_that_fails_loses_nothing(density: float) -> None:
    """What was held back is there, what was sent is not, and the step is complete as on other workers."""
    group = Group("exdyna", density, 2)
    group.step(gradients("normal", 1_000, 2, 0))
    others = [reducer.residual.clone() for reducer in group.reducers]

    def fail(sent: object) -> None:
        raise OSError("no room")

    programs = []
    for reducer, grad in zip(group.reducers, gradients("normal", 1_000, 2, 1), strict=True):
        reducer.add(grad[:600], 0, torch.empty(600))
        reducer.add(torch.zeros(400), 600, torch.empty(400), hold_back=True)
        programs.append(reducer.finish(fail if reducer.rank == 0 else lambda sent: None))
    with pytest.raises(OSError, match="no room"):
        group.world.run(programs)
    failed, before = group.reducers[0], others[0]
    assert torch.equal(failed.residual[600:], before[600:])
    assert failed.step == 2
    assert not failed.residual[:600].any() if density == 1 else failed.residual[:600].any()
