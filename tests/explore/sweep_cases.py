"""A small sweep that runs in a second, and what the tests of sweeps share."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from replay_sim.config import ServingConfig
from replay_sim.explore.sweep import run_sweep
from replay_sim.explore.sweep_file import PointsFile
from replay_sim.explore.sweep_points import DesignPoint, SweptWorkload, design_points, fingerprint
from replay_sim.explore.sweep_rows import Row, is_row_of, run_group

CONFIG = ServingConfig(
    window=8,
    max_num_seqs=6,
    max_num_batched_tokens=128,
    num_speculative_tokens=2,
    cudagraph_capture_sizes=[3, 6, 12, 16, 32, 64, 96],
    decoder_replay_trim_threshold=32,
)
LENGTHS = ((11, 7), (130, 4), (5, 9), (40, 1), (77, 20), (300, 2), (16, 12), (9, 3), (64, 64), (200, 0))
WORKLOAD = SweptWorkload("ten requests spelled out", LENGTHS)
AXES = {"window": (4, 8, 40), "max_num_seqs": (2, 6), "max_num_batched_tokens": (48, 128)}
"""A window of 40 exceeds the threshold: those points fail."""
PLANS = ("default", "explicit", "optimal", "optimal-1", "eager")
POINTS = design_points({"small": CONFIG}, [WORKLOAD], AXES, PLANS)
FAILED = [
    point.index
    for point in POINTS
    if point.asked("window") == 40 or (point.plan == "explicit" and point.asked("max_num_batched_tokens") == 48)
]
"""A window above the threshold (P5), and the config's own sizes above a budget of 48."""
WORKLOADS = {WORKLOAD.source: WORKLOAD}


def points_file(folder: Path, *, resume: bool = False) -> PointsFile:
    mark, is_row = fingerprint(POINTS, [WORKLOAD]), partial(is_row_of, POINTS)
    return PointsFile(folder / "sweep.csv.points", mark, is_row, resume=resume)


def rows_in_threads(folder: Path, points: Sequence[DesignPoint] = POINTS) -> list[Row]:
    """The rows of the sweep, run in this process."""
    folder.mkdir(exist_ok=True)
    with points_file(folder) as file, ThreadPoolExecutor(1) as executor:
        return run_sweep(points, WORKLOADS, executor, file)


def run_one_by_one(points: Sequence[DesignPoint], workload: SweptWorkload) -> list[Row]:
    """Every point by itself, nothing shared between them."""
    return [row for point in points for row in run_group([point], workload)]
