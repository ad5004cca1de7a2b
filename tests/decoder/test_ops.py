"""Each op on a CPU against a float64 loop of its own."""

import math
from typing import Any

import pytest
import torch
from decoder import op_cases as cases
from decoder.op_cases import make_case
from torch import Tensor

from replay_sim.decoder import ops

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def normalised(values: list[float], eps: float) -> list[float]:
    root = math.sqrt(sum(v * v for v in values) / len(values) + eps)
    return [v / root for v in values]


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


def merged_row(x: Tensor, residual: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """One row in float64: x (h), residual (hc, h), post (hc, 1), res (hc, hc)."""
    out = torch.zeros(residual.shape, dtype=torch.float64)
    for i in range(residual.shape[0]):
        out[i] = float(post[i, 0]) * x.double()
        for j in range(residual.shape[0]):
            out[i] += float(res[i, j]) * residual[j].double()
    return out


def collapsed_row(streams: Tensor, pre: Tensor, weight: Tensor) -> Tensor:
    total = sum(float(pre[j]) * streams[j].double() for j in range(streams.shape[0]))
    return torch.tensor(normalised(total.tolist(), cases.RMS_EPS), dtype=torch.float64) * weight.double()


def rotated(vector: Tensor, position: int) -> Tensor:
    out, half = vector.double().clone(), cases.ROPE // 2
    base = len(out) - cases.ROPE
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / cases.ROPE)
        a, b = float(vector[base + i]), float(vector[base + half + i])
        out[base + i] = a * math.cos(angle) - b * math.sin(angle)
        out[base + half + i] = b * math.cos(angle) + a * math.sin(angle)
    return out


def test_merge_mixes_the_streams_and_adds_the_sublayer_output(dtype: torch.dtype) -> None:
    x, residual, post, res = make_case("merge", dtype)
    out = ops.merge(x, residual, post, res)
    for row in range(cases.ROWS):
        assert_near(out[row], merged_row(x[row], residual[row], post[row], res[row]))


def test_collapse_normalises_the_weighted_sum_of_the_streams(dtype: torch.dtype) -> None:
    residual, pre, weight, eps = make_case("collapse", dtype)
    out = ops.collapse(residual, pre, weight, eps)
    for row in range(cases.ROWS):
        assert_near(out[row], collapsed_row(residual[row], pre[row], weight))


def expected_mixes(stored: Tensor, mix_weight: Tensor, scale: Tensor, bias: Tensor) -> tuple[Any, Any, Any]:
    hc = cases.HC
    flat = normalised(stored.double().flatten().tolist(), cases.RMS_EPS)
    m = (torch.tensor(flat, dtype=torch.float64) @ mix_weight.double()).tolist()
    for k in range(len(m)):
        m[k] = m[k] * float(scale[0 if k < hc else 1 if k < 2 * hc else 2]) + float(bias[k])
    pre = [sigmoid(v) + cases.HC_EPS for v in m[:hc]]
    post = [[cases.ALPHA * sigmoid(v)] for v in m[hc : 2 * hc]]
    res = [[math.exp(m[2 * hc + i * hc + j]) for j in range(hc)] for i in range(hc)]
    for _ in range(cases.SINKHORN_ITERS):
        res = [[v / sum(line) for v in line] for line in res]
        columns = [sum(line[j] for line in res) for j in range(hc)]
        res = [[line[j] / columns[j] for j in range(hc)] for line in res]
    return pre, post, res


def test_boundary_merges_collapses_with_the_old_mix_and_mixes_anew(dtype: torch.dtype) -> None:
    args = make_case("boundary", dtype)
    x, residual, pre, post, res, norm_weight, mix_weight, scale, bias = args[:9]
    stored, u, pre_out, post_out, res_out = ops.boundary(*args)
    for row in range(cases.ROWS):
        assert_near(stored[row], merged_row(x[row], residual[row], post[row], res[row]))
        assert_near(u[row], collapsed_row(stored[row], pre[row], norm_weight))
        expected = expected_mixes(stored[row], mix_weight, scale, bias)
        for actual, wanted in zip((pre_out, post_out, res_out), expected, strict=True):
            assert actual.dtype == torch.float32
            assert_near(actual[row], torch.tensor(wanted, dtype=torch.float64))


def test_boundary_makes_the_residual_mix_doubly_stochastic(dtype: torch.dtype) -> None:
    res = ops.boundary(*make_case("boundary", dtype))[4].double()
    ones = torch.ones(cases.ROWS, cases.HC, dtype=torch.float64)
    torch.testing.assert_close(res.sum(1), ones, rtol=0, atol=1e-5)
    torch.testing.assert_close(res.sum(2), ones, rtol=0, atol=1e-3)


def test_the_query_is_normalised_and_the_latent_rotated_at_its_end(dtype: torch.dtype) -> None:
    qkv_a, weight, positions, *_ = args = make_case("q_norm_kv_rope", dtype)
    qn, kv = ops.q_norm_kv_rope(*args)
    for row in range(cases.ROWS):
        query = normalised(qkv_a[row, : cases.Q_LORA].double().tolist(), cases.RMS_EPS)
        assert_near(qn[row], torch.tensor(query, dtype=torch.float64) * weight.double())
        assert_near(kv[row], rotated(qkv_a[row, cases.Q_LORA :], int(positions[row])))


def test_rope_rotates_each_head_in_place_and_leaves_its_front(dtype: torch.dtype) -> None:
    x, positions, table = make_case("rope_", dtype)
    before = x.clone()
    ops.rope_(x, positions, table)
    assert torch.equal(x[..., : -cases.ROPE], before[..., : -cases.ROPE])
    for row in range(cases.ROWS):
        for head in range(cases.HEADS):
            assert_near(x[row, head], rotated(before[row, head], int(positions[row])))


def test_positions_outside_the_table_are_clamped(dtype: torch.dtype) -> None:
    x, positions, table = make_case("rope_", dtype)
    positions[0], positions[1] = 2**40, -5
    expected = x.clone()
    ops.rope_(x, positions, table)
    ops.rope_(expected, positions.clamp(0, cases.MAX_POSITION - 1), table)
    assert torch.equal(x, expected)


def test_a_negative_slot_writes_nothing(dtype: torch.dtype) -> None:
    """S8."""
    cache, kv, slots = make_case("write_kv_", dtype)
    expected = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot] = kv[row]
    ops.write_kv_(cache, kv, slots)
    assert torch.equal(cache, expected)


def attended_row(q: Tensor, latents: list[Tensor], scale: float) -> Tensor:
    """q (H, d) over a list of latents (d), in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for head in range(q.shape[0]):
        scores = [scale * float(q[head].double() @ latent.double()) for latent in latents]
        parts = [math.exp(score - max(scores)) for score in scores]
        for part, latent in zip(parts, latents, strict=True):
            out[head] += part / sum(parts) * latent.double()
    return out


@pytest.mark.parametrize("shared", [True, False], ids=["with_shared", "window_only"])
def test_attention_reads_the_window_and_the_shared_entries_under_one_softmax(dtype: torch.dtype, shared: bool) -> None:
    args = cases.attend_(cases.Draw(dtype, 0), shared)
    out, q, window_cache, shared_cache = args[:4]
    table, before = args[7].tolist(), out.clone()

    def slot(request: int, position: int) -> int:
        return table[request][position // cases.BLOCK_SIZE] * cases.BLOCK_SIZE + position % cases.BLOCK_SIZE

    ops.attend_(*args)
    for row, ((request, p), start) in enumerate(zip(cases.ROW_PLACES, cases.WINDOW_STARTS, strict=True)):
        latents = [window_cache[slot(request, at)] for at in range(start, p + 1)]
        n = min(cases.TOPK, p + 1)
        latents += [shared_cache[slot(request, i * (p + 1) // n)] for i in range(n)] if shared else []
        assert_near(out[row], attended_row(q[row], latents, cases.HEAD_DIM**-0.5))
    assert torch.equal(out[cases.REAL :], before[cases.REAL :])


def test_attention_in_chunks_equals_attention_row_by_row(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, single = make_case("attend_", dtype), make_case("attend_", dtype)
    ops.attend_(*whole)
    monkeypatch.setattr("replay_sim.decoder.ops.cpu.ATTEND_CHUNK_ROWS", 1)
    ops.attend_(*single)
    assert torch.equal(whole[0], single[0])


def expected_route(logits: Tensor) -> tuple[list[int], list[list[int]], list[int], list[list[float]]]:
    """Walks experts, then rows, as the definition says."""
    chosen, weights = [], []
    for row in range(cases.ROWS):
        score = [math.sqrt(math.log1p(math.exp(v))) for v in logits[row].double().tolist()]
        best = sorted(range(cases.EXPERTS), key=lambda e: (-score[e], e))[: cases.TOP_K]
        total = sum(score[e] for e in best)
        chosen.append(best)
        weights.append([score[e] / total * cases.SCALING for e in best])
    tokens: list[int] = []
    offs, pair_pos = [], [[-1] * cases.TOP_K for _ in range(cases.ROWS)]
    for expert in range(cases.FIRST_EXPERT, cases.FIRST_EXPERT + cases.LOCAL_EXPERTS):
        for row in range(cases.REAL):
            if expert in chosen[row]:
                pair_pos[row][chosen[row].index(expert)] = len(tokens)
                tokens.append(row)
        offs.append(len(tokens))
    return tokens, pair_pos, offs, weights


def test_routing_sorts_pairs_by_local_expert_and_row_and_leaves_pads_out(dtype: torch.dtype) -> None:
    args = make_case("route", dtype)
    pair_token, pair_pos, offs, weights = ops.route(*args)
    tokens, places, ends, expected_weights = expected_route(args[0])
    assert offs.tolist() == ends
    assert pair_token[: ends[-1]].tolist() == tokens
    assert pair_pos.tolist() == places
    torch.testing.assert_close(weights.double(), torch.tensor(expected_weights, dtype=torch.float64), rtol=1e-5, atol=0)


def test_routing_ties_take_the_lower_expert(dtype: torch.dtype) -> None:
    args = make_case("route", dtype)
    args[0][:] = 0.25
    _, pair_pos, offs, weights = ops.route(*args)
    # Experts 0, 1, 2 are taken by every row; of these the rank holds expert 2 alone.
    assert offs.tolist() == [cases.REAL] * cases.LOCAL_EXPERTS
    assert pair_pos[: cases.REAL].tolist() == [[-1, -1, row] for row in range(cases.REAL)]
    torch.testing.assert_close(weights, torch.full_like(weights, cases.SCALING / cases.TOP_K))


@pytest.mark.parametrize("num_rows", [0, 1, cases.ROWS])
def test_routing_takes_any_number_of_real_rows(dtype: torch.dtype, num_rows: int) -> None:
    args = make_case("route", dtype)
    args[1].fill_(num_rows)
    _, pair_pos, offs, _ = ops.route(*args)
    assert int(offs[-1]) == int((pair_pos[:num_rows] >= 0).sum()) == int((pair_pos >= 0).sum())


def test_nan_logits_in_real_rows_index_nothing_out_of_range(dtype: torch.dtype) -> None:
    args = make_case("route", dtype)
    args[0][:] = torch.nan
    pair_token, pair_pos, offs, _ = ops.route(*args)
    pairs = int(offs[-1])
    assert 0 <= pairs <= cases.ROWS * cases.TOP_K
    assert bool(((pair_token[:pairs] >= 0) & (pair_token[:pairs] < cases.ROWS)).all())
    assert bool((pair_pos < pairs).all())


def test_gathered_pairs_are_their_rows(dtype: torch.dtype) -> None:
    u, pair_token, offs = make_case("moe_gather", dtype)
    xs = ops.moe_gather(u, pair_token, offs)
    for pair in range(int(offs[-1])):
        assert torch.equal(xs[pair], u[int(pair_token[pair])])


def test_grouped_product_multiplies_each_group_by_its_expert(dtype: torch.dtype) -> None:
    xs, w, offs = make_case("grouped_matmul", dtype)
    ys = ops.grouped_matmul(xs, w, offs)
    for pair in range(int(offs[-1])):
        expert = sum(pair >= end for end in offs.tolist())
        assert_near(ys[pair], xs[pair].double() @ w[expert].double())


@pytest.mark.parametrize("with_offs", [True, False])
def test_swiglu_clamps_gate_and_up(dtype: torch.dtype, with_offs: bool) -> None:
    x, limit, offs = make_case("swiglu", dtype)
    out = ops.swiglu(x, limit, offs if with_offs else None)
    for row in range(int(offs[-1]) if with_offs else x.shape[0]):
        for column in range(cases.INTER):
            gate = min(float(x[row, column]), limit)
            up = max(-limit, min(limit, float(x[row, cases.INTER + column])))
            assert_near(out[row, column], torch.tensor(gate * sigmoid(gate) * up))


def test_combine_adds_each_rows_weighted_pairs_to_the_shared_output(dtype: torch.dtype) -> None:
    ys, pair_pos, weights, shared = make_case("moe_combine", dtype)
    out = ops.moe_combine(ys, pair_pos, weights, shared)
    for row in range(cases.ROWS):
        expected = shared[row].double()
        for place in range(cases.TOP_K):
            if pair_pos[row, place] >= 0:
                expected = expected + float(weights[row, place]) * ys[int(pair_pos[row, place])].double()
        assert_near(out[row], expected)
