"""Counts of many steps as arrays: what the step-time form multiplies with its coefficients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import attrs
import numpy as np
import numpy.typing as npt

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.config.shapes import DecoderShape
from replay_sim.measure.roofline import PARTS, Rates, step_parts
from replay_sim.measure.step_case import StepCase
from replay_sim.measure.step_launches import step_launches
from replay_sim.measure.step_ops import KINDS, Op, active_experts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUM_SMS = 132
"""Multiprocessors of the GPUs that are modelled: the tiles of a product run in waves of as many."""
TILE = 128
"""Rows and columns of a dense product's tile."""
EXPERT_TILES = {"experts": (64, 128), "wide_experts": (128, 256)}
"""Rows and columns of the tiles of a grouped product."""
ATTENTION_ROWS = 2
"""Rows of attention that a multiprocessor works on at once: their stages of keys fill its shared memory."""
APART = len(PARTS)
"""The part of an operation that was called by itself."""
PAIRS_PER_US = 1000.0
"""Routing's nominal pace: each expert's program walks over all pairs."""
HOST_LAUNCH_US = 6.0
"""What a small launch costs the host whose microseconds the host's coefficients are; others are taken in proportion."""


@attrs.frozen(eq=False)
class OpArrays:
    """Operations, of P steps or called apart, one entry each: whose, launches, and microseconds at nominal rates.

    `step`, `part` and `kind` are indices into the steps, PARTS, APART beyond them, and KINDS; `bytes_us`, `flops_us`
    and `serial_us` are of one launch: bytes over bandwidth, arithmetic of whole tiles over the matmul rate, and the
    waves of tiles or of rows that follow each other on one multiprocessor. Of an expert product `bytes_us` leaves the
    weights out: `weights_us` are those of all experts, `tiles` what they are read in, `load` the rows of an expert, and
    `even` is 1 where rows pick their experts independently of each other.
    """

    step: Ints
    part: Ints
    kind: Ints
    count: Floats
    kernels: Floats
    bytes_us: Floats
    flops_us: Floats
    serial_us: Floats
    weights_us: Floats
    load: Floats
    tiles: Floats
    even: Floats


@attrs.frozen(eq=False)
class StepArrays:
    """P steps: their operations, their launches (P, parts) and what the host stages.

    `graphs`, `breaks`, `eager_kernels`, `graph_kernels` float64 (P, parts); `tokens`, `reqs`, `has_replay`,
    `region_eager` float64 (P), and `host_pace`, how many times longer than the nominal host's.
    """

    ops: OpArrays
    graphs: Floats
    breaks: Floats
    eager_kernels: Floats
    graph_kernels: Floats
    tokens: Floats
    reqs: Floats
    has_replay: Floats
    region_eager: Floats
    host_pace: Floats

    @property
    def num_steps(self) -> int:
        """P."""
        return len(self.tokens)


@attrs.frozen
class ModelStep:
    """A step to be modelled: on which decoder shape, how dispatched, at which rates of its run, on which host.

    `launch_us` is what one small launch costs the host.
    """

    shape: DecoderShape
    case: StepCase
    rates: Rates
    launch_us: float = HOST_LAUNCH_US


def step_arrays(steps: Sequence[ModelStep]) -> StepArrays:
    """The counts of `steps`."""
    entries: list[tuple[float, ...]] = []
    launches = np.zeros((4, len(steps), len(PARTS)))
    for index, step in enumerate(steps):
        shape, case = step.shape, step.case
        parts = step_parts(shape, case)
        for part, (name, ops) in enumerate(parts.items()):
            even = case.num_reqs == case.num_tokens
            entries += [(index, part, *op_entry(op, shape, step.rates, even=even)) for op in ops]
            of_part = step_launches(shape, case, parts)[name]
            launches[:, index, part] = attrs.astuple(of_part)
    cases = [step.case for step in steps]
    return StepArrays(
        ops=op_arrays(entries),
        graphs=launches[0],
        breaks=launches[1],
        eager_kernels=launches[2],
        graph_kernels=launches[3],
        tokens=np.array([case.padded_tokens for case in cases], np.float64),
        reqs=np.array([case.num_reqs for case in cases], np.float64),
        has_replay=np.array([case.has_replay_batch for case in cases], np.float64),
        region_eager=np.array([case.replay_mode is CudagraphMode.NONE for case in cases], np.float64),
        host_pace=np.array([step.launch_us / HOST_LAUNCH_US for step in steps]),
    )


def op_arrays(entries: Sequence[tuple[float, ...]]) -> OpArrays:
    """The arrays of operations given as step, part and op_entry each."""
    columns = np.array(entries).T
    return OpArrays(*columns[:3].astype(np.int64), *columns[3:])


def op_entry(op: Op, shape: DecoderShape, rates: Rates, *, even: bool) -> tuple[float, ...]:
    """kind, count and kernels of one operation, its nominal times, an expert's load, tiles, and `even`."""
    flops, serial = _tiled(op, shape, rates)
    nbytes, load, tiles = op.nbytes, 0.0, 0
    if op.kind in EXPERT_TILES:
        nbytes -= op.weight_bytes * active_experts(shape, int(op.rows)) / shape.num_local_experts
        load = op.rows * shape.num_experts_per_tok / shape.num_experts
        tiles = shape.num_local_experts * math.ceil(op.width / EXPERT_TILES[op.kind][1])
    bytes_us, weights_us = (value / rates.bandwidth * 1e6 for value in (nbytes, op.weight_bytes))
    return KINDS.index(op.kind), op.count, op.kernels, bytes_us, flops, serial, weights_us, load, tiles, even


def _tiled(op: Op, shape: DecoderShape, rates: Rates) -> tuple[float, float]:
    """Microseconds of an operation's arithmetic in whole tiles, and of its waves."""
    plain = op.flops / rates.matmul * 1e6
    rows, columns = EXPERT_TILES.get(op.kind, (TILE, TILE))
    tile_us = 2.0 * rows * columns * op.inner / (rates.matmul / NUM_SMS) * 1e6
    across = math.ceil(op.width / columns)
    if op.kind == "dense":
        whole = math.ceil(op.rows / rows) * across * op.groups
        return whole * tile_us / NUM_SMS, math.ceil(whole / NUM_SMS) * tile_us
    if op.kind in EXPERT_TILES:
        share = shape.num_experts_per_tok / shape.num_experts
        tiles = op.groups * expected_tiles(int(op.rows), share, rows) * across
        return tiles * tile_us / NUM_SMS, max(1.0, tiles / NUM_SMS) * tile_us
    if op.kind == "attention":
        key_bytes = op.inner / op.rows * shape.head_dim * shape.dtype_bytes
        waves = math.ceil(op.rows / (NUM_SMS * ATTENTION_ROWS))
        return plain, waves * key_bytes / (rates.bandwidth / NUM_SMS) * 1e6
    if op.kind == "routing":
        return plain, op.rows * shape.num_experts_per_tok / PAIRS_PER_US
    return plain, 0.0


@lru_cache(maxsize=4096)
def expected_tiles(rows: int, share: float, tile: int) -> float:
    """Expected tiles of `tile` rows of one expert, which each of `rows` rows picks with probability `share`."""
    if share >= 1:
        return float(math.ceil(rows / tile))
    count = np.arange(rows + 1)
    log_factorial = np.concatenate([[0.0], np.log(np.arange(1, rows + 1)).cumsum()])
    log_choices = log_factorial[rows] - log_factorial - log_factorial[::-1]
    chance = np.exp(log_choices + count * math.log(share) + (rows - count) * math.log1p(-share))
    return float((chance * -(-count // tile)).sum())
