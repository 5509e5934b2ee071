"""The minimum of regularised logistic regression, to machine precision."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

HISTORY = 30  # pairs that L-BFGS remembers
L_BFGS_ACCURACY = 1e-7  # of the largest gradient element, relative to that at zero
NEWTON_STEPS = 10
CG_STEPS = 500  # at most, for one Newton step
CG_ACCURACY = 1e-6


def minimise(rows: Tensor, signs: Tensor, l2: float) -> tuple[Tensor, float]:
    """The best weights and the value there: L-BFGS from zero, then Newton steps while they halve the gradient."""
    import scipy.optimize  # takes seconds

    a, y, count = rows.double(), signs.double(), len(rows)

    def objective(x: Tensor) -> tuple[float, Tensor]:
        margins = y * (a @ x)
        value = -logsigmoid(margins).mean() + l2 / 2 * x @ x
        return float(value), a.T @ (-y * torch.sigmoid(-margins)) / count + l2 * x

    def for_scipy(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(torch.from_numpy(x))
        return value, gradient.numpy()

    zero = np.zeros(a.shape[1])
    near = L_BFGS_ACCURACY * float(np.abs(for_scipy(zero)[1]).max())
    options = {"maxcor": HISTORY, "maxiter": 10_000, "maxfun": 20_000, "ftol": 0.0, "gtol": near}
    found = scipy.optimize.minimize(for_scipy, zero, jac=True, method="L-BFGS-B", options=options)
    x = torch.from_numpy(found.x)
    value, gradient = objective(x)
    for _ in range(NEWTON_STEPS):
        p = torch.sigmoid(a @ x)
        nearer = x - _solve(a, p * (1 - p) / count, l2, gradient)
        new_value, new_gradient = objective(nearer)
        if not new_gradient.norm() < gradient.norm() / 2:
            break
        x, value, gradient = nearer, new_value, new_gradient
    return x, value


def _solve(a: Tensor, factor: Tensor, l2: float, right: Tensor) -> Tensor:
    """Solve `(a^T diag(factor) a + l2) x = right` by conjugate gradients."""
    x, residual = torch.zeros_like(right), right.clone()
    direction, square = residual.clone(), residual @ residual
    target = square * CG_ACCURACY**2
    for _ in range(CG_STEPS):
        if square <= target:
            break
        image = a.T @ (factor * (a @ direction)) + l2 * direction
        step = square / (direction @ image)
        x, residual, before = x + step * direction, residual - step * image, square
        square = residual @ residual
        direction = residual + square / before * direction
    return x
