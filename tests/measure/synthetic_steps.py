"""Measured steps as a known law with noise would give them: what fitting must recover."""

import attrs
import numpy as np

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.config.shapes import FLASH_RANK, DecoderShape
from replay_sim.measure.measured_steps import StepPoint
from replay_sim.measure.roofline import Rates
from replay_sim.measure.step_case import StepCase
from replay_sim.measure.step_features import ModelStep, step_arrays
from replay_sim.measure.step_form import PRIORS, step_times

NONE, PIECEWISE, FULL = CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL
RATES = Rates(4.2e12, 7.5e14)
SIZES = (256, 512, 768, 1024, 1536, 2048, 4096, 8192)
ARMS = {
    "eager_off": (NONE, None),
    "eager_replay": (NONE, NONE),
    "piecewise_off": (PIECEWISE, None),
    "piecewise_replay_eager": (PIECEWISE, NONE),
    "piecewise_replay_graphs": (PIECEWISE, PIECEWISE),
}


def make_law(seed: int) -> dict[str, float]:
    """Coefficients some way off the prior, and a host as slow as those that launches bound."""
    random = np.random.default_rng(seed)
    law = {name: prior * float(np.exp(random.normal(0, 0.4))) for name, prior in PRIORS.items()}
    return law | {"host.kernel": 35.0}


def prefill_steps(tokens: int, num_reqs: int = 1, shape: DecoderShape = FLASH_RANK) -> list[tuple[str, ModelStep]]:
    """A batch of equal prompts as every arm that applies to it."""
    steps = []
    for arm, (mode, replay_mode) in ARMS.items():
        padded = tokens if mode is NONE else min(size for size in SIZES if size >= tokens)
        rows = 0 if replay_mode is None else num_reqs * min(tokens // num_reqs, shape.window)
        padded_rows = -(-rows // 128) * 128 if replay_mode is PIECEWISE else rows
        case = StepCase(
            num_tokens=tokens,
            padded_tokens=padded,
            mode=mode,
            replay_rows=rows,
            padded_rows=padded_rows,
            replay_mode=replay_mode,
            num_reqs=num_reqs,
            computed=0,
        )
        steps.append((arm, ModelStep(shape, case, RATES)))
    return steps


def decode_steps(num_reqs: int, computed: int) -> list[tuple[str, ModelStep]]:
    """Uniform decodes in every mode."""
    case = StepCase(
        num_tokens=num_reqs,
        padded_tokens=num_reqs,
        mode=NONE,
        replay_rows=0,
        padded_rows=0,
        replay_mode=None,
        num_reqs=num_reqs,
        computed=computed,
    )
    modes = {"eager_off": NONE, "piecewise_off": PIECEWISE, "full": FULL}
    return [(arm, ModelStep(FLASH_RANK, attrs.evolve(case, mode=mode), RATES)) for arm, mode in modes.items()]


def all_steps() -> list[tuple[str, ModelStep]]:
    """Tokens across the sizes, more requests, other windows and experts, decodes."""
    steps = [step for size in SIZES for tokens in (size - 37, size) for step in prefill_steps(tokens)]
    steps += [step for tokens in (1024, 4096) for reqs in (2, 4) for step in prefill_steps(tokens, reqs)]
    for window, experts in ((512, 48), (128, 8), (128, 96)):
        shape = attrs.evolve(FLASH_RANK, window=window, num_local_experts=experts)
        steps += [step for tokens in (1024, 2048, 8192) for step in prefill_steps(tokens, shape=shape)]
    return steps + [step for reqs in (1, 4, 16, 64) for context in (128, 4096) for step in decode_steps(reqs, context)]


def measured(law: dict[str, float], seed: int, noise: float) -> list[StepPoint]:
    """What `law` gives for all_steps, each time times a factor of spread `noise`; every fifth is held out."""
    random = np.random.default_rng(seed)
    steps = all_steps()
    times = step_times(step_arrays([step for _, step in steps]), law)
    factors = np.exp(random.normal(0, noise, (3, len(steps))))
    step_us, host_us, device_us = factors * (times.step, times.host, times.device)
    held = random.permutation(len(steps)) % 5 == 0
    return [
        StepPoint(
            arm=arm,
            sweep="synthetic",
            step=step,
            held_out=bool(held[index]),
            step_us=float(step_us[index]),
            host_us=float(host_us[index]),
            device_us=None if index % 7 == 0 else float(device_us[index]),
        )
        for index, (arm, step) in enumerate(steps)
    ]
