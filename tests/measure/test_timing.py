"""Timing: arms side by side, warm-up outside, each call counted once, device and host apart."""

import numpy as np
import pytest
import torch

from replay_sim.measure import timing
from replay_sim.measure.timing import time_arms

CPU = torch.device("cpu")


class Clock:
    """A clock that only calls move; each takes the next of its microseconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def spend(self, microseconds: float) -> None:
        self.seconds += microseconds * 1e-6


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def test_arms_are_interleaved_and_their_order_flips_each_round() -> None:
    calls: list[tuple[str, int]] = []
    arms = {name: (lambda turn, name=name: calls.append((name, turn))) for name in "abc"}
    time_arms(arms, CPU, rounds=4, warm_up=2)
    warm_up, timed = calls[:6], calls[6:]
    assert [turn for _, turn in warm_up] == [0, 0, 0, 1, 1, 1]
    rounds = [timed[start : start + 3] for start in range(0, 12, 3)]
    orders = ["".join(name for name, _ in one) for one in rounds]
    assert orders[0] != orders[1] and orders == [orders[0], orders[0][::-1]] * 2


def test_every_round_has_a_number_of_its_own_so_that_no_batch_is_repeated() -> None:
    """H6: those of the warm-up are not used again."""
    turns: list[int] = []
    time_arms({"only": turns.append}, CPU, rounds=7, warm_up=3)
    assert turns == list(range(10))


def test_a_call_is_counted_once_and_the_warm_up_is_outside(clock: Clock) -> None:
    """H1: no division is applied twice; the first calls, which are slow, are not among the n."""
    found = time_arms(
        {"slow first": lambda turn: clock.spend(90_000 if turn < 5 else 250), "steady": lambda _: clock.spend(40)},
        CPU,
        rounds=9,
        warm_up=5,
    )
    assert (found["slow first"].device_us, found["slow first"].host_us, found["slow first"].n) == (250, 250, 9)
    assert (found["steady"].device_us, found["steady"].p10, found["steady"].p90) == (40, 40, 40)


def test_the_median_and_the_spread_are_those_of_the_calls(clock: Clock) -> None:
    spent = [float(value) for value in np.random.default_rng(5).integers(50, 500, 31)]
    found = time_arms({"arm": lambda turn: clock.spend(spent[turn])}, CPU, rounds=31, warm_up=0)["arm"]
    ordered = sorted(spent)
    assert found.device_us == pytest.approx(ordered[15], abs=0.02)
    assert found.p10 == pytest.approx(ordered[3], abs=0.02)
    assert found.p90 == pytest.approx(ordered[27], abs=0.02)


def test_times_are_plain_numbers_that_a_record_can_hold() -> None:
    found = time_arms({"arm": lambda _: None}, CPU, rounds=3)["arm"]
    assert [type(value) for value in (found.device_us, found.host_us, found.p10, found.p90)] == [float] * 4


def test_an_arm_that_fails_stops_the_measurement() -> None:
    def fails(turn: int) -> None:
        raise RuntimeError("not in a graph")

    with pytest.raises(RuntimeError, match="not in a graph"):
        time_arms({"good": lambda _: None, "bad": fails}, CPU)
