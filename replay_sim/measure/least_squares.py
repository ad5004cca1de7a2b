"""A small robust least-squares solver for positive coefficients, by their logarithms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from replay_sim.measure.step_features import Floats

DIFFERENCE = 1e-4
ACCEPT_GAIN, DAMP_DOWN, DAMP_UP = 1e-9, 0.3, 4.0


def fit_positive(
    residuals: Callable[[Floats], Floats],
    start: Floats,
    *,
    outlier: float,
    prior_weight: float,
    steps: int = 60,
) -> Floats:
    """Coefficients (K) above zero that make residuals (N) small, from `start`, the prior (Levenberg and Marquardt).

    A residual r costs like r^2 while small against `outlier` and like |r| beyond it. Each coefficient's logarithm is
    drawn to the prior's with `prior_weight`, which decides only what the residuals leave open. Deterministic.
    """
    origin = np.log(start)
    at, damping = origin.copy(), 1e-2

    def all_residuals(logs: Floats) -> Floats:
        values = residuals(np.exp(logs))
        soft = np.sqrt(2 * outlier**2 * (np.sqrt(1 + (values / outlier) ** 2) - 1))
        return np.concatenate([soft * np.sign(values), prior_weight * (logs - origin)])

    values = all_residuals(at)
    for _ in range(steps):
        jacobian = np.empty((len(values), len(at)))
        for index in range(len(at)):
            moved = at.copy()
            moved[index] += DIFFERENCE
            jacobian[:, index] = (all_residuals(moved) - values) / DIFFERENCE
        normal, slope = jacobian.T @ jacobian, jacobian.T @ values
        cost = values @ values
        while damping < 1e8:
            step = np.linalg.solve(normal + damping * np.diag(normal.diagonal() + 1e-12), -slope)
            trial = at + np.clip(step, -1.0, 1.0)
            trial_values = all_residuals(trial)
            if trial_values @ trial_values < cost:
                break
            damping *= DAMP_UP
        else:
            return np.exp(at)
        gained = cost - trial_values @ trial_values
        at, values, damping = trial, trial_values, damping * DAMP_DOWN
        if gained < ACCEPT_GAIN * cost:
            break
    return np.exp(at)
