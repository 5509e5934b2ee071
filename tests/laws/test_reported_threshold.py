"""The threshold of a report is the one that decided that step, whoever found it."""

import torch

from helpers import Group, gradients

BIN = 1.035  # how far the edges of a histogram's bins are apart, and a little more
WITH_THRESHOLD = {"dgc", "exdyna", "gaussiank", "hard_threshold", "micro", "oktopk", "sage", "shared_threshold"}


def test_the_threshold_of_this_step(sparsifier: str) -> None:
    """Gradients grow from step to step, so that the threshold of another step would be told apart."""
    group, found = Group(sparsifier, 0.01, 1), False
    for step in range(12):
        update = group.step([2.0**step * grad for grad in gradients("normal", 5_000, 1, step)])[0]
        threshold, sent = group.reports[0].threshold, update != 0
        if threshold is None:
            continue
        found = True
        acc = (group.residuals(5_000)[0] + update).abs()
        assert float(acc[sent].min()) >= threshold * (1 - 1e-6)
        if sparsifier != "oktopk":  # which sends fewer where the threshold lets too many pass
            assert not (acc[~sent] > threshold * BIN).any()
    assert found == (sparsifier in WITH_THRESHOLD), sparsifier


def test_a_skipped_step_has_none() -> None:
    group = Group("exdyna", 0.01, 2)
    group.step(gradients("normal", 5_000, 2, 0))
    assert group.reports[0].threshold
    group.step([torch.full((5_000,), torch.nan), torch.ones(5_000)])
    assert group.reports[0].threshold is None
