"""The measurement of the region's kernels: what it counts, and what its notes say."""

from collections.abc import Callable

import pytest

from replay_sim.capture.host import HostBackend
from replay_sim.config import TINY
from replay_sim.measure import region_kernels
from replay_sim.measure.records import REQUIRED_POINT_KEYS
from replay_sim.measure.region_kernels import KEPT_FROM_THE_LIMIT, kernel_notes, measure_kernels, rows_of
from replay_sim.measure.replay_region import Region, region_plan, region_runner
from replay_sim.measure.roofline import Rates
from replay_sim.measure.timing import Timing

SIZES, TOKENS = [8, 24], 64
RATES = Rates(bandwidth=2e9, matmul=1e12)


@pytest.fixture
def measured(monkeypatch) -> tuple[list[dict], dict, str]:
    """Each arm is called once and takes 60 µs."""

    def time_arms(arms: dict[str, Callable], device) -> dict[str, Timing]:
        for arm in arms.values():
            arm(0)
        return {name: Timing(60.0, 30.0, 40.0, 80.0, 20.0, 3) for name in arms}

    monkeypatch.setattr(region_kernels, "time_arms", time_arms)
    monkeypatch.setattr(region_kernels, "region_sizes", lambda *_: (TOKENS, SIZES))
    monkeypatch.setattr(region_kernels, "measure_rates", lambda *_: RATES)
    return measure_kernels(TINY, HostBackend(), 3)


def test_each_kernel_has_a_point_of_each_size_that_is_one_layers_share(measured) -> None:
    """Issue 5, point 6."""
    points, settings, table = measured
    assert [(p["rows"], p["op"]) for p in points] == [(size, op) for size in SIZES for op in KEPT_FROM_THE_LIMIT]
    for point in points:
        assert point.keys() >= REQUIRED_POINT_KEYS["kernels"]
        assert (point["device_us"], point["n"]) == (pytest.approx(60 / TINY.num_replay_layers, abs=0.01), 3)
    assert table.count("\n") == 1 + len(points)
    assert "notes" not in settings, "they say of a GPU's kernels what keeps them from its limit"
    written = next(p for p in points if p["op"] == "KV write")
    assert written["bytes"] == 8 * (2 * TINY.head_dim * TINY.dtype_bytes + 8)


def test_the_keys_of_the_kept_rows_are_counted_as_attention_reads_them() -> None:
    """S4: a layer after the first attends kept rows alone, its i-th row i + 1 keys; shared keys spread."""
    runner = region_runner(TINY, region_plan(TINY, SIZES, TOKENS), HostBackend(), 3)
    rows = rows_of(Region(runner, {}, 24, 3))
    window, topk, length = TINY.window, TINY.index_topk, TOKENS // 3
    assert (rows.padded, rows.real, rows.window_entries) == (24, 24, 3 * window)
    assert rows.window_keys == 3 * sum(range(1, window + 1))
    read = [{i * (p + 1) // min(topk, p + 1) for i in range(min(topk, p + 1))} for p in range(length - window, length)]
    assert rows.shared_keys == 3 * sum(len(keys) for keys in read)
    assert rows.shared_entries == 3 * len(set.union(*read))


def test_the_caches_that_the_kernels_read_hold_no_zeros() -> None:
    """Values of zero can be faster than real ones (H6)."""
    region = Region(region_runner(TINY, region_plan(TINY, SIZES, TOKENS), HostBackend(), 3), {}, 24, 3)
    region_kernels._calls(region)
    for layer in region.layers_of_graph:
        assert layer.shared_cache is not None
        assert bool(layer.window_cache.all()) and bool(layer.shared_cache.all())


def test_a_note_says_what_is_reached_and_by_what_the_limit_is() -> None:
    points = [
        {
            "op": op,
            "rows": rows,
            "device_us": 10.0,
            "limit_us": 5.0,
            "bytes": rows,
            "flops": flops,
            "loaded_bytes": 40000,
        }
        for op, flops in zip(KEPT_FROM_THE_LIMIT, (0, 0, 5_000_000, 10), strict=True)
        for rows in (1000, 10000)
    ]
    metadata, written, window, shared = kernel_notes(points, RATES)
    assert metadata.startswith("row metadata, 10000 rows: 10.0 µs, 2.00 × the limit by its bytes; 1.0 GB/s of 2.0. one")
    assert written.startswith("KV write, 10000 rows") and "loaded" not in written
    assert "by its bytes" in window and "0.5 TFLOP/s of 1.0, 4.0 GB/s loaded" in window and "by its bytes" in shared
