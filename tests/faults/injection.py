"""What the tests of injected faults share: a fuse that raises at one call, and a step held against an eager one."""

import torch
from decoder.serving import Serving, decode, make_plan, make_runner, prefill
from faults.helpers import SMOOTH, outputs_of

from replay_sim.capture.host import HostBackend
from replay_sim.decoder.step import StepRunner

PLAN = make_plan(model_sizes=(16, 64), full_sizes=(4,), replay_sizes=(8, 32))
ASKED = [prefill("p", 30), prefill("q", 9), decode("r")]


class Injected(Exception):
    """What is raised; nothing in the package knows it."""


KINDS = [Injected, KeyboardInterrupt, MemoryError]


class Fuse:
    """Raises at one call of `spend` and at no other; `spent` counts the calls."""

    def __init__(self, at: int, kind: type[BaseException]) -> None:
        self.at, self.kind, self.spent = at, kind, 0

    def spend(self) -> None:
        self.spent += 1
        if self.spent == self.at:
            raise self.kind(f"injected at call {self.at}")


def eager_equals(runner: StepRunner) -> None:
    """A step in whatever graphs there are equals the same step without any, with the weights of the same device."""
    actual = outputs_of(Serving(runner).step(ASKED))
    backend = HostBackend(1 << 30) if isinstance(runner.backend, HostBackend) else runner.backend
    expected = outputs_of(Serving(make_runner(backend, PLAN, SMOOTH, captured=False)).step(ASKED))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
