"""The roofline: bytes, arithmetic and kernels of a step, against what a real step does and against counts by hand."""

from collections import Counter

import attrs
import pytest
import torch
from decoder.serving import Serving, decode, make_runner, prefill
from torch.utils._python_dispatch import TorchDispatchMode

from replay_sim.batch.dispatch import CudagraphMode, dispatch_step
from replay_sim.capture.host import HostBackend
from replay_sim.config.shapes import FLASH_RANK, TINY
from replay_sim.measure.roofline import PARTS, Rates, batch_rows, rates_of, step_limit_us, step_parts
from replay_sim.measure.step_case import StepCase, case_of_point, case_of_record, long_context
from replay_sim.measure.step_ops import active_experts, keys_read, local_pairs

NONE, PIECEWISE = CudagraphMode.NONE, CudagraphMode.PIECEWISE
# Equal requests, as counts take them: the requests of a step, and whether the replay layers run on the kept rows.
STEPS = {
    "one prompt, whole": ([prefill("p", 100)], False),
    "one prompt, trimmed": ([prefill("p", 100)], True),
    "three prompts, trimmed": ([prefill("p", 40), prefill("q", 40), prefill("r", 40)], True),
    "decodes": ([decode("d"), decode("e")], False),
}
OPS = {
    "mm": {"wqkv_a", "wq_b", "wo_b", "wkv_shared", "router", "shared_w13", "shared_w2"},
    "bmm": {"wo_a"},
    "boundary": {"attention boundary", "expert boundary", "KV boundary"},
    "merge": {"merge"},
    "attend_": {"window attention", "shared attention"},
    "write_kv_": {"KV write"},
    "grouped_matmul": {"w13", "w2"},
    "swiglu": {"expert swiglu", "shared swiglu"},
    "moe_gather": {"expert gather"},
    "moe_combine": {"combine"},
    "route": {"route"},
    "q_norm_kv_rope": {"query norm and rope"},
    "rope_": {"query rope", "shared rope"},
}
"""Operations of the decoder and the names under which they are counted."""


class Watcher(TorchDispatchMode):
    """Sums over a step's operations: calls, bytes of tensors in and out, products' arithmetic, keys attended."""

    def __init__(self, window: int, topk: int) -> None:
        super().__init__()
        self.calls, self.nbytes, self.flops, self.keys = Counter(), Counter(), 0, 0
        self.window, self.topk = window, topk

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        name = operation.__name__.split(".")[0]
        self.calls[name] += 1
        results = result if isinstance(result, tuple) else (result,)
        tensors = [value for value in (*args, *results) if isinstance(value, torch.Tensor)]
        self.nbytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if name in ("mm", "bmm"):
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
        if name == "attend_":
            self._count_keys(*args)
        return result

    def _count_keys(self, out, q, window_cache, shared_cache, positions, requests, starts, *_):
        for position, request, start in zip(positions.tolist(), requests.tolist(), starts.tolist(), strict=True):
            if request >= 0:
                self.keys += min(position - start + 1, self.window)
                self.keys += 0 if shared_cache is None else min(position + 1, self.topk)


@pytest.fixture(scope="module")
def watched():
    """Each of STEPS run eagerly on the host under a Watcher, with its case."""
    found = {}
    for name, (asked, replays) in STEPS.items():
        backend = HostBackend(1 << 32)
        runner = make_runner(backend, captured=False)
        serving = Serving(runner)
        if name == "decodes":
            serving.step([prefill("d", 30), prefill("e", 30)])
        batch, tables, ids = serving.arguments(asked)
        none = {"model_sizes": (), "full_sizes": (), "replay_sizes": ()}
        record = dispatch_step(batch, runner.plan, **none, replay=replays)
        watcher = Watcher(TINY.window, TINY.index_topk)
        with watcher:
            runner.run(batch, tables, ids, record)
        found[name] = watcher, case_of_record(record, int(batch.computed[0]))
    return found


@pytest.mark.parametrize("name", STEPS)
def test_every_operation_of_a_step_is_counted_as_often_as_it_runs(watched, name: str) -> None:
    watcher, case = watched[name]
    ops = [op for part in step_parts(TINY, case).values() for op in part]
    counted = {call: sum(op.count for op in ops if op.name in names) for call, names in OPS.items()}
    assert counted == {call: watcher.calls[call] for call in OPS}
    assert counted["attend_"] == TINY.num_layers


@pytest.mark.parametrize("name", STEPS)
def test_bytes_and_arithmetic_of_products_and_streams_are_those_of_their_tensors(watched, name: str) -> None:
    watcher, case = watched[name]
    ops = [op for part in step_parts(TINY, case).values() for op in part]
    for call in ("mm", "bmm", "boundary", "merge"):
        counted = sum(op.count * op.nbytes for op in ops if op.name in OPS[call])
        assert counted == watcher.nbytes[call] > 0
    assert sum(op.count * op.flops for op in ops if op.kind == "dense") == watcher.flops


@pytest.mark.parametrize("name", STEPS)
def test_attention_is_counted_by_the_keys_that_rows_really_attend(watched, name: str) -> None:
    """S4: after the first replay layer a trimmed request's window starts with its kept rows."""
    watcher, case = watched[name]
    ops = [op for part in step_parts(TINY, case).values() for op in part if op.kind == "attention"]
    assert sum(op.count * op.inner for op in ops) == watcher.keys
    width = TINY.num_heads * TINY.head_dim
    assert sum(op.count * op.flops for op in ops) == 4 * width * watcher.keys


def test_the_limit_is_the_slower_of_bytes_and_arithmetic_of_each_operation_by_hand() -> None:
    """One decode at position 3: all weights of a layer but the experts' are read, and one expert's is in eight."""
    case = StepCase(
        num_tokens=1, padded_tokens=1, mode=NONE, replay_rows=0, padded_rows=0, replay_mode=None, num_reqs=1, computed=3
    )
    by_name = {op.name: op for op in step_parts(TINY, case)["first_layers"]}
    assert by_name["wqkv_a"].nbytes == 4 * (64 + 64 * 80 + 80) and by_name["wqkv_a"].flops == 2 * 64 * 80
    assert by_name["wqkv_a"].count == TINY.cut == 3
    assert by_name["w13"].flops == 2 * 2 * 64 * 64, "two pairs, both on this rank"
    assert by_name["w13"].nbytes == pytest.approx(4 * (2 * (64 + 64) + 2 * 64 * 64))
    assert by_name["window attention"].inner == 4, "positions 0 to 3"
    wide, fast = Rates(1e9, 1e15), Rates(1e15, 1e9)
    ops = [op for part in step_parts(TINY, case).values() for op in part]
    assert step_limit_us(TINY, case, wide) == pytest.approx(sum(op.count * op.nbytes for op in ops) / 1e3)
    assert step_limit_us(TINY, case, fast) == pytest.approx(sum(op.count * op.flops for op in ops) / 1e3)


def test_experts_in_use_are_those_that_some_row_picks() -> None:
    """Against drawing: 128 rows pick 6 of 384 experts, of which 48 are here."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(128, 384, generator=generator).topk(6).indices for _ in range(200)]
    used = sum(picks[picks < 48].unique().numel() for picks in draws) / len(draws)
    pairs = sum(int((picks < 48).sum()) for picks in draws) / len(draws)
    assert active_experts(FLASH_RANK, 128) == pytest.approx(used, rel=0.01)
    assert local_pairs(FLASH_RANK, 128) == pytest.approx(pairs, rel=0.02)
    assert active_experts(FLASH_RANK, 8192) == pytest.approx(48)


def test_keys_read_is_a_sum_over_positions() -> None:
    for first, length, most in [(0, 5, 3), (2, 4, 100), (7, 3, 4), (0, 1, 1)]:
        assert keys_read(first, length, most) == sum(min(p + 1, most) for p in range(first, first + length))


def test_a_replay_batch_moves_its_rows_and_spares_the_late_layers_the_others() -> None:
    whole = StepCase(
        num_tokens=4096,
        padded_tokens=4096,
        mode=PIECEWISE,
        replay_rows=0,
        padded_rows=0,
        replay_mode=None,
        num_reqs=1,
        computed=0,
    )
    broken = attrs.evolve(whole, replay_rows=128, padded_rows=128, replay_mode=PIECEWISE)
    off, on = step_parts(FLASH_RANK, whole), step_parts(FLASH_RANK, broken)
    assert tuple(off) == tuple(on) == PARTS
    assert off["first_layers"] == on["first_layers"] and not off["movement"] and on["movement"]
    rows = {op.name: op.rows for op in on["replay_layers"]}
    assert rows["wq_b"] == 128
    gather, scatter = on["movement"]
    assert gather.nbytes == 2 * 128 * 51308, "the bytes of a row of the seven inputs (system.md)"
    assert scatter.nbytes == (128 + 2 * 128) * (7 * 5120 * 2 + 16), "those read, written, and cleared"


def test_a_context_longer_than_window_and_topk_changes_no_count_of_keys() -> None:
    base = StepCase(
        num_tokens=8,
        padded_tokens=8,
        mode=NONE,
        replay_rows=0,
        padded_rows=0,
        replay_mode=None,
        num_reqs=8,
        computed=long_context(FLASH_RANK),
    )
    far = attrs.evolve(base, computed=100_000)
    near = attrs.evolve(base, computed=100)
    keys = [batch_rows(FLASH_RANK, case).window_keys + batch_rows(FLASH_RANK, case).shared_keys for case in (base, far)]
    assert keys == [8 * (128 + 512)] * 2
    assert batch_rows(FLASH_RANK, near).shared_keys == 8 * 101


def test_a_point_and_a_record_of_the_same_step_are_one_case(watched) -> None:
    case = watched["one prompt, trimmed"][1]
    point = {key: value for key, value in attrs.asdict(case).items() if key != "one_launch"}
    point |= {"arm": "eager_replay", "mode": "NONE", "replay_mode": "NONE"}
    assert case_of_point(point) == case and case.has_replay_batch


def test_an_empty_step_has_no_case_and_rates_come_from_the_settings() -> None:
    runner = make_runner(HostBackend(1 << 30), captured=False)
    batch, *_ = Serving(runner).arguments([])
    with pytest.raises(ValueError, match="num_tokens 0"):
        case_of_record(runner.dispatch(batch), 0)
    assert rates_of({"copy_bandwidth_gbps": 4200, "matmul_tflops": 700.0}) == Rates(4.2e12, 7e14)
    with pytest.raises(KeyError, match="matmul_tflops"):
        rates_of({"copy_bandwidth_gbps": 4200})
