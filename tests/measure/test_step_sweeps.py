"""The sweeps: what the issue asks for is in them, and every batch fits the runners that it is measured on."""

import attrs
import numpy as np
import pytest

from replay_sim.config import FLASH_RANK, TINY
from replay_sim.measure.step_sweeps import CPU_GRID, GPU_GRID, STEP_SWEEPS, Prompt, rig_spec, unequal_lengths
from replay_sim.workload.kv_blocks import BLOCK_SIZE, blocks_for

SIZES = (256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192)
CASES = [(name, grid, shape) for name in STEP_SWEEPS for grid, shape in ((GPU_GRID, FLASH_RANK), (CPU_GRID, TINY))]


def parts(name: str):
    return STEP_SWEEPS[name](GPU_GRID, FLASH_RANK, 0)


def batches(name: str):
    return [timed.batch for part in parts(name) for timed in part.batches]


@pytest.mark.parametrize(("name", "grid", "shape"), CASES)
def test_every_batch_fits_its_runners(name, grid, shape) -> None:
    for part in STEP_SWEEPS[name](grid, shape, 0):
        spec = part.spec
        chunks = [chunk for prompt in part.prompts for chunk in prompt.chunks()]
        for batch in [*(timed.batch for timed in part.batches), *chunks]:
            assert 0 < batch.num_tokens <= spec.max_num_batched_tokens and batch.num_reqs <= spec.max_num_seqs
            assert batch.query_lens.min() > 0
            blocks = [blocks_for(int(length), BLOCK_SIZE) for length in batch.seq_lens]
            assert sum(blocks) <= spec.num_blocks and max(blocks) <= spec.max_blocks


def test_the_threshold_sweep_has_every_size_one_more_and_between() -> None:
    single = {batch.num_tokens for batch in batches("threshold") if batch.num_reqs == 1}
    assert {*SIZES} <= single and {size + 1 for size in SIZES[:-1]} <= single
    for size, larger in zip(SIZES, SIZES[1:], strict=False):
        assert any(size + 1 < tokens < larger for tokens in single)
    several = [batch for batch in batches("threshold") if batch.num_reqs > 1]
    assert {batch.num_reqs for batch in several} == {4, 16}
    assert any(len(set(batch.query_lens.tolist())) > 2 for batch in several)


def test_decodes_go_from_1_to_64_requests_and_from_128_to_16k_of_context() -> None:
    found = {(batch.num_reqs, int(batch.computed[0])) for batch in batches("decode")}
    assert {reqs for reqs, _ in found} == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}
    assert {context for _, context in found} >= {128, 16384}
    assert all(batch.uniform_decode_len == 1 for batch in batches("decode"))


def test_requests_and_mixed_steps() -> None:
    found = batches("requests")
    for tokens in (2048, 8192):
        assert {b.num_reqs for b in found if b.num_tokens == tokens and not b.is_decode.any()} == {
            1, 2, 4, 8, 16, 32, 64,
        }  # fmt: skip
    assert any(batch.is_decode.any() and not batch.is_decode.all() for batch in found)


def test_prompts_are_powers_of_two_up_to_128k_in_chunks_of_the_budget() -> None:
    (part,) = parts("prompt")
    assert [prompt.prompt_tokens for prompt in part.prompts] == [1 << power for power in range(7, 18)]
    longest = part.prompts[-1].chunks()
    assert [(int(chunk.computed[0]), chunk.num_tokens) for chunk in longest] == [
        (start, 8192) for start in range(0, 131072, 8192)
    ]
    steps = [(int(timed.batch.computed[0]), timed.batch.num_tokens) for timed in part.batches]
    last = [prompt.chunks()[-1] for prompt in part.prompts]
    assert steps == [(int(chunk.computed[0]), chunk.num_tokens) for chunk in last]


def test_a_last_chunk_is_what_is_left() -> None:
    chunks = Prompt(prompt_tokens=20, max_num_batched_tokens=8).chunks()
    assert [(int(chunk.computed[0]), chunk.num_tokens) for chunk in chunks] == [(0, 8), (8, 8), (16, 4)]


def test_windows_budgets_and_expert_shares() -> None:
    assert [part.spec.window for part in parts("window")] == [64, 128, 256, 512, 1024]
    assert [part.spec.num_local_experts for part in parts("experts")] == [48, 8, 96]
    (budget,) = parts("budget")
    assert [(one.prompt_tokens, one.max_num_batched_tokens) for one in budget.prompts] == [
        (32768, tokens) for tokens in (2048, 4096, 8192, 16384)
    ]
    assert {timed.max_num_batched_tokens for timed in budget.batches} == {2048, 4096, 8192, 16384}


def test_runners_are_shared_where_they_hold_what_is_asked() -> None:
    """Four sweeps and the first share of experts need no capture of their own."""
    common = rig_spec(GPU_GRID, FLASH_RANK)
    for name in ("threshold", "decode", "requests", "prompt"):
        assert [common.covers(part.spec) for part in parts(name)] == [True]
    assert [common.covers(part.spec) for part in parts("experts")] == [True, False, False]
    assert [common.covers(part.spec) for part in parts("window")] == [False, True, False, False, False]
    assert [common.covers(part.spec) for part in parts("budget")] == [False]
    assert not common.covers(attrs.evolve(common, replay_sizes=(*common.replay_sizes, 9000)))


def test_the_graphs_of_every_size_above_the_window_break() -> None:
    plan = rig_spec(GPU_GRID, FLASH_RANK).plan()
    assert plan.breaking_sizes == SIZES and plan.trim_threshold == 256


@pytest.mark.parametrize(("tokens", "requests"), [(2, 2), (17, 16), (512, 16), (8192, 4)])
def test_unequal_lengths_deal_all_tokens_with_one_each(tokens: int, requests: int) -> None:
    lengths = unequal_lengths(tokens, requests, np.random.default_rng(1))
    assert len(lengths) == requests and sum(lengths) == tokens and min(lengths) >= 1
