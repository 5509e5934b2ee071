"""ExDyna: parity of the studies' form with the released rules, and what the library's does better."""

import math

import pytest
import torch
from studies.sparsifiers.released import ReleasedState
from torch import Tensor

from gradsieve.sparsifiers.exdyna.sparsifier import ExDynaState
from helpers import EVENTFUL_STEPS, Group, eventful, gradients

N, WORLD, DENSITY = 40_000, 4, 0.005


class Transcription:
    """The released rules, written down again from their description, in the plainest form: no code is shared."""

    def __init__(self, n: int, world_size: int, density: float) -> None:
        self.n, self.p, self.k = n, world_size, max(1, round(density * n))
        self.block = (n // 1024) // 32 * 32
        self.sizes = [1024 // world_size + (1 if i < 1024 % world_size else 0) for i in range(world_size)]
        self.threshold = 1 / (2 * math.sqrt(self.k))
        self.residuals = [torch.zeros(n) for _ in range(world_size)]
        self.t = 0
        self.counts: list[int] = []

    def partition(self, i: int) -> tuple[int, int]:
        start = sum(self.sizes[:i]) * self.block
        return start, self.n if i == self.p - 1 else start + self.sizes[i] * self.block

    def allocate(self) -> None:
        counts = [0] * self.p
        for rank in range(self.p):
            counts[((self.t - 1) % self.p + rank) % self.p] = self.counts[rank]
        total = sum(counts)
        mean, moved = int(total / self.p), int(self.block * (total / self.n))
        smallest = 1024 / (4 * self.p)
        for i in range(self.p - 1):
            a, b = counts[i] / mean, counts[i + 1] / mean
            if a > 1.05 and b < 0.95238 and self.sizes[i] - 1 >= smallest:
                self.sizes[i] -= 1
                self.sizes[i + 1] += 1
                counts[i] -= moved
                counts[i + 1] += moved
            if a < 0.95238 and b > 1.05 and self.sizes[i + 1] - 1 >= smallest:
                self.sizes[i] += 1
                self.sizes[i + 1] -= 1
                counts[i] += moved
                counts[i + 1] -= moved

    def scale(self) -> None:
        ratio = sum(self.counts) / self.k
        self.threshold *= 1.005 if ratio > 1.1 else 1.00125 if ratio > 0.909 else 0.995

    def find(self, acc: Tensor, start: int, stop: int) -> list[int]:
        level = torch.tensor(self.threshold).item()  # as float32
        return [i for i in range(start, stop) if abs(acc[i].item()) >= level]

    def step(self, grads: list[Tensor]) -> Tensor:
        if self.t > 0:
            self.allocate()
            self.scale()
        accs = [e + g for e, g in zip(self.residuals, grads, strict=True)]
        chosen = []
        for rank, acc in enumerate(accs):
            start, stop = self.partition((self.t % self.p + rank) % self.p)
            picked = self.find(acc, start, stop)
            chosen.append(picked or [start + self.t % (stop - start)])
        self.counts = [len(picked) for picked in chosen]
        everyone = torch.tensor([i for picked in chosen for i in picked])
        update = torch.zeros(self.n)
        update[everyone] = sum(acc[everyone] for acc in accs) / self.p  # type: ignore[assignment]
        for acc in accs:
            acc[everyone] = 0
        self.residuals = accs
        self.t += 1
        return update


class Faster(Transcription):
    """The same with the search over elements as one torch expression, for many steps."""

    def find(self, acc: Tensor, start: int, stop: int) -> list[int]:
        return (torch.where(acc[start:stop].abs() >= self.threshold)[0] + start).tolist()


def uneven(step: int, n: int = N, world_size: int = WORLD) -> list[Tensor]:
    """Gradients in which one quarter is hot, and goes cold after a while."""
    scale = torch.ones(n) * 0.05
    scale[: n // 4] = 0.3 if step % 160 < 100 else 0.01
    return [grad * scale for grad in gradients("normal", n, world_size, step)]


@pytest.mark.parametrize("world_size", [2, 7, *(pytest.param(p, marks=pytest.mark.slow) for p in (3, 4))])
def test_released_exdyna_equals_the_released_rules_over_300_steps(world_size: int) -> None:
    group, literal = Group("released_exdyna", DENSITY, world_size), Faster(N, world_size, DENSITY)
    moved = False
    for step in range(300):
        grads = uneven(step, world_size=world_size)
        update, expected = group.step(grads)[0], literal.step(grads)
        state = group.reducers[0].states.sparsifier
        assert isinstance(state, ReleasedState)
        assert group.reports[0].counts == literal.counts, f"counts at step {step}"
        assert torch.equal(update, expected), f"update at step {step}"
        assert group.reports[0].threshold == literal.threshold, f"threshold at step {step}"
        sizes = torch.tensor(state.bounds).diff().tolist()
        literal_next = Faster.__new__(Faster)
        literal_next.__dict__.update({**vars(literal), "sizes": list(literal.sizes)})
        literal_next.allocate()
        literal_next.scale()
        assert sizes == literal_next.sizes, f"block table after step {step}"
        assert state.threshold == literal_next.threshold, f"threshold after step {step}"
        moved = moved or sizes != Faster(N, world_size, DENSITY).sizes
    assert moved, "the test must move blocks to mean something"


def test_faster_transcription_equals_the_plain_one() -> None:
    plain, faster = Transcription(33_000, 2, 0.001), Faster(33_000, 2, 0.001)
    for step in range(3):
        grads = uneven(step, 33_000, 2)
        assert torch.equal(plain.step(grads), faster.step(grads))
        assert plain.counts == faster.counts


@pytest.mark.parametrize(
    ("n", "world_size", "words"),
    [(32_767, 4, "needs n >= 32768"), (40_000, 1, "2 <= world_size <= 256, got 1"), (40_000, 300, "got 300")],
)
def test_released_exdyna_says_where_the_released_code_fails(n: int, world_size: int, words: str) -> None:
    group = Group("released_exdyna", DENSITY, world_size)
    with pytest.raises(ValueError, match=words):
        group.step([torch.zeros(n)] * world_size)


@pytest.mark.parametrize("world_size", [1, 2, 5, 16])
@pytest.mark.parametrize("name", ["exdyna", "micro"])
def test_density_is_exact_in_every_step(name: str, world_size: int) -> None:
    """From the first step, through jumps of scale, outliers, a dead half and back."""
    n, group = 20_000, Group(name, 0.01, world_size)
    for step in range(EVENTFUL_STEPS):
        group.step(eventful(n, world_size, step))
        assert group.reports[0].union == 200, f"step {step}"
        assert group.reports[0].collectives == 3
        assert (group.reports[0].handshake_bytes > 0) == (step == 0 and world_size > 1)


def test_three_collectives_when_nothing_jumps() -> None:
    group = Group("exdyna", 0.01, 4)
    for step in range(40):
        group.step(gradients("normal", 20_000, 4, step))
        assert group.reports[0].collectives == 3


def test_loss_scale_of_65536() -> None:
    """The released start is absolute and would take thousands of steps; ours does not know scales."""
    small, large = Group("exdyna", 0.01, 3), Group("exdyna", 0.01, 3)
    for step in range(15):
        grads = gradients("normal", 10_000, 3, step)
        one, other = small.step(grads)[0], large.step([grad * 65_536 for grad in grads])[0]
        assert torch.equal(one * 65_536, other)


@pytest.mark.parametrize("world_size", [4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_balance_follows_a_hot_layer(world_size: int) -> None:
    """Gradients of one worker, seen by all: then counts depend on the partitions alone."""
    n, group = 200_000, Group("exdyna", 0.01, world_size)
    static = Group("micro", 0.01, world_size)
    ours, theirs = [], []
    for step in range(60):
        grad = gradients("normal", n, 1, step)[0]
        grad[n // 8 : n // 4] *= 10
        group.step([grad.clone() for _ in range(world_size)])
        static.step([grad.clone() for _ in range(world_size)])
        ours.append(group.reports[0].imbalance)
        theirs.append(static.reports[0].imbalance)
    assert max(ours[40:]) < 1.35
    assert sum(ours[40:]) / 20 < 1.2
    assert sum(theirs[40:]) > 1.5 * sum(ours[40:])


@pytest.mark.parametrize("world_size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (8, 16))])
def test_balance_follows_a_hot_layer_that_moves(world_size: int) -> None:
    """One layer of ten is 100 times hotter, every 60 steps another: within 20 steps loads are alike again."""
    n, group, found, changes = 400_000, Group("exdyna", 0.1, world_size), [], 0
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(n + 50_000, generator=generator)
    bounds: tuple[int, ...] = ()
    for step in range(180):
        first = (step // 60 * 3 + 2) % 10 * n // 10
        grads = []
        for start in torch.randint(50_000, (world_size,), generator=generator).tolist():
            grads.append(noise[start : start + n].clone())
            grads[-1][first : first + n // 10] *= 100
        group.step(grads)
        if step % 60 >= 20:
            found.append(group.reports[0].imbalance)
        state = group.reducers[0].states.sparsifier
        assert isinstance(state, ExDynaState)
        changes += bounds != (bounds := state.bounds)
    assert max(found) < (1.10 if world_size < 16 else 1.15)
    assert changes < 60
