"""The robust solver for positive coefficients, on problems whose answer is known."""

import numpy as np
import pytest

from replay_sim.measure.least_squares import fit_positive

TRUE = np.array([3.0, 0.2])


def test_a_linear_law_is_recovered_exactly() -> None:
    inputs = np.random.default_rng(0).uniform(1, 10, (40, 2))
    measured = inputs @ TRUE
    found = fit_positive(lambda values: np.log(inputs @ values / measured), np.ones(2), outlier=0.05, prior_weight=1e-6)
    assert found == pytest.approx(TRUE, rel=1e-3)


def test_an_outlier_moves_it_little() -> None:
    inputs = np.random.default_rng(0).uniform(1, 10, (40, 2))
    measured = inputs @ TRUE
    measured[3] *= 3
    found = fit_positive(lambda values: np.log(inputs @ values / measured), np.ones(2), outlier=0.01, prior_weight=1e-6)
    assert found == pytest.approx(TRUE, rel=0.02)


def test_what_the_residuals_leave_open_stays_at_the_prior() -> None:
    found = fit_positive(
        lambda values: np.log(values[:1] / 5.0).repeat(9), np.array([1.0, 7.0]), outlier=1.0, prior_weight=1e-3
    )
    assert found == pytest.approx([5.0, 7.0], rel=1e-3)


def test_a_law_with_a_kink_is_recovered() -> None:
    inputs = np.geomspace(1, 1000, 60)
    measured = np.maximum(40.0, 0.5 * inputs)
    found = fit_positive(
        lambda values: np.log(np.maximum(values[0], values[1] * inputs) / measured),
        np.array([10.0, 1.0]),
        outlier=0.05,
        prior_weight=1e-6,
    )
    assert found == pytest.approx([40.0, 0.5], rel=1e-3)
