"""The checker: each corruption that reuse makes is caught, with tensor, writer and remedy; clean use is not."""

import attrs
import numpy as np
import pytest
import torch

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.capture import capture, eager_break
from replay_sim.capture.checker import Checker
from replay_sim.capture.host import HostBackend
from replay_sim.config import TINY
from replay_sim.decoder.step import StepRunner
from replay_sim.plan import CapturePlan
from replay_sim.replay.sharing import PoolSharing

ROWS, WIDTH = 64, 256


@pytest.fixture
def backend() -> HostBackend:
    return HostBackend(1 << 30)


@pytest.fixture
def checker(backend: HostBackend) -> Checker:
    return Checker(backend)


@pytest.fixture
def place(backend: HostBackend, checker: Checker) -> dict:
    return {"backend": backend, "pool": backend.make_pool(), "stream": backend.make_stream()}


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


# --- An output read after a later replay ---


def test_an_output_read_after_another_graph_of_its_pool_is_caught(place, checker) -> None:
    """D1: the first graph's output holds the second graph's data."""
    x = rows()
    first = capture(lambda: x * 2, name="first", **place)
    second = capture(lambda: x + 1, name="second", **place)
    output = checker.replay(first)
    checker.replay(second)
    with checker.watching():
        stale = output.sum()
    assert torch.equal(stale, (x + 1).sum())
    (finding,) = checker.findings
    assert (finding.tensor.graph, finding.writer.graph, finding.reader) == ("first", "second", "eager code")
    assert finding.tensor.shape == (ROWS, WIDTH)
    assert "copy the tensor before second runs" in str(finding)
    assert finding.source.path == __file__ and "output.sum()" in finding.source.text


def test_an_output_read_after_a_later_replay_of_its_own_graph_is_caught(place, checker) -> None:
    """D1: the output is the next batch's."""
    x = rows()
    graph = capture(lambda: x * 2, name="model", **place)
    earlier = checker.replay(graph)
    later = checker.replay(graph)
    with checker.watching():
        later.sum()
        assert checker.findings == []
        earlier[:3].sum()
    (finding,) = checker.findings
    assert finding.writer == finding.tensor
    assert "a later replay of model has written again" in str(finding)


def test_an_output_read_at_once_or_copied_out_is_clean(place, checker) -> None:
    """D1: both remedies."""
    x = rows()
    first = capture(lambda: x * 2, name="first", **place)
    second = capture(lambda: (x + 1).relu(), name="second", **place)
    with checker.watching():
        for _ in range(2):
            copied = first.replay().clone()
            assert torch.equal(second.replay(), (x + 1).relu())
            assert torch.equal(copied, x * 2)
    assert checker.findings == []


def test_an_output_read_before_any_replay_is_caught(place, checker) -> None:
    """C12: it holds poison."""
    x = rows()
    graph = capture(lambda: x * 2, name="model", **place)
    with checker.watching():
        graph.outputs.sum()
    assert "which no replay has written" in str(checker.findings[0])
    assert "replay model before" in checker.findings[0].remedy


def test_only_the_bytes_that_were_overwritten_are_stale(place, checker) -> None:
    """C12: the second graph covers the first eighth of the first one's output."""
    x = rows()
    first = capture(lambda: x * 2, name="first", **place)
    second = capture(lambda: x[: ROWS // 8] + 1, name="second", **place)
    output = checker.replay(first)
    checker.replay(second)
    with checker.watching():
        output[ROWS // 8 :].sum()
        output[ROWS // 8 :, ::2].sum()
        assert checker.findings == []
        output[ROWS // 8 - 1 :, ::2].sum()
    assert len(checker.findings) == 1


def test_pools_and_streams_of_their_own_keep_outputs_apart(backend, checker) -> None:
    """O2."""
    x = rows()
    pool, stream = backend.make_pool(), backend.make_stream()
    places = [(pool, stream), (pool, backend.make_stream()), (backend.make_pool(), stream)]
    graphs = [
        capture(lambda n=n: x * n, backend=backend, pool=p, stream=s, name=f"graph {n}")
        for n, (p, s) in enumerate(places)
    ]
    with checker.watching():
        outputs = [graph.replay() for graph in graphs]
        assert all(torch.equal(output, x * n) for n, output in enumerate(outputs))
    assert checker.findings == []


# --- A memoised workspace ---


class Memo:
    """A buffer that is made when it is first asked for, and zeroed once."""

    def __init__(self) -> None:
        self.workspace: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self.workspace is None:
            self.workspace = torch.zeros(ROWS, WIDTH)
        return self.workspace


def memo_graphs(memo: Memo, x: torch.Tensor, place: dict) -> dict:
    """A graph with a temporary, the one that makes the workspace where the temporary was, and one that uses it."""
    functions = {
        "temporary": lambda: (x * 2).sum(),
        "maker": lambda: memo.get() + x,
        "user": lambda: memo.get() - x,
    }
    return {name: capture(function, name=name, **place) for name, function in functions.items()}


def test_a_workspace_first_made_inside_a_capture_is_caught(place, checker) -> None:
    """D2: another graph's temporary lies where the workspace is, and the zeros are not in the user's graph."""
    x, memo = rows(), Memo()
    graphs = memo_graphs(memo, x, place)
    assert [(kept.graph, kept.operation) for kept in checker.kept()] == [("maker", "aten.zeros.default")]
    checker.replay(graphs["maker"])
    checker.replay(graphs["user"])
    assert checker.findings == []
    checker.replay(graphs["temporary"])
    wrong = checker.replay(graphs["user"])
    assert torch.equal(wrong, x * 2 - x)
    (finding,) = checker.findings
    assert (finding.tensor.graph, finding.writer.graph, finding.reader) == ("maker", "temporary", "user")
    assert "make the tensor before the captures" in finding.remedy


def test_a_workspace_that_its_maker_has_not_run_for_is_caught(place, checker) -> None:
    """D2: the zeros are in the maker's graph alone."""
    memo = Memo()
    graphs = memo_graphs(memo, rows(), place)
    checker.replay(graphs["user"])
    (finding,) = checker.findings
    assert finding.never_run and finding.tensor.graph == "maker"


def test_a_workspace_made_before_the_captures_is_clean(place, checker) -> None:
    """D2: the remedy."""
    x, memo = rows(), Memo()
    memo.get()
    graphs = memo_graphs(memo, x, place)
    assert checker.kept() == ()
    for name in ("maker", "temporary", "user"):
        checker.replay(graphs[name])
    assert checker.findings == []


def test_a_workspace_written_whole_before_it_is_read_is_clean(place, checker) -> None:
    """D2: who writes it first owns it."""
    x, memo = rows(), Memo()
    capture(lambda: (x * 2).sum(), name="temporary", **place)
    capture(lambda: memo.get().copy_(x), name="maker", **place)
    user = capture(lambda: memo.get().copy_(x) * 3, name="user", **place)
    with checker.watching():
        user.replay()
    assert checker.findings == []


# --- State that lives across a break ---


class Inner:
    """The graph that the break runs."""

    graph = None


@eager_break
def run_inner(inner: Inner, out: torch.Tensor) -> None:
    if inner.graph is not None:
        out.copy_(inner.graph.replay())


@pytest.mark.parametrize("shares", [True, False])
def test_a_tensor_that_lives_across_a_break_is_caught_if_the_break_reuses_it(backend, checker, shares) -> None:
    """O1, O3: a graph that runs in the break of another, on its memory or not."""
    x, out = rows(), torch.zeros(ROWS, WIDTH)
    pool, stream = backend.make_pool(), backend.make_stream()
    inner = Inner()

    def outer() -> torch.Tensor:
        early = x * 2
        run_inner(inner, out)
        return early + out

    model = capture(outer, backend=backend, pool=pool, stream=stream, name="model")
    inner_stream = stream if shares else backend.make_stream()
    inner.graph = capture(lambda: x + 1, backend=backend, pool=pool, stream=inner_stream, name="inner")
    result = checker.replay(model)
    assert torch.equal(result, (x + 1) * 2 if shares else x * 2 + (x + 1))
    if not shares:
        assert checker.findings == []
        return
    (finding,) = checker.findings
    assert (finding.tensor.graph, finding.writer.graph, finding.reader) == ("model", "inner", "model")
    assert "on a stream or in a pool of its own" in finding.remedy


EARLY_AUX = attrs.evolve(TINY, early_aux_layers=(0, 2))
PLAN = CapturePlan(
    window=TINY.window,
    model_sizes=(16, 64),
    full_sizes=(4,),
    replay_sizes=(8, 16, 32),
    trim_threshold=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)
BATCHES = [
    Batch((Request(30, 0, Phase.PREFILL), Request(20, 0, Phase.PREFILL))),
    Batch((Request(12, 0, Phase.PREFILL), Request(1, 7, Phase.DECODE))),
    Batch((Request(1, 30, Phase.DECODE),)),
]


def stepped(shape, sharing: PoolSharing | None) -> tuple[StepRunner, Checker, list[torch.Tensor]]:
    """All batches run under watch, each step's outputs read at once; the early aux states as they were read."""
    backend = HostBackend(4 << 30)
    checker = Checker(backend)
    runner = StepRunner(shape, PLAN, backend, num_blocks=8, max_blocks=2, sharing=sharing)
    runner.capture_model_graphs()
    runner.capture_replay_graphs()
    read = []
    with checker.watching():
        for batch in BATCHES:
            tables = [np.array([2 * i, 2 * i + 1], np.int32) for i in range(batch.num_reqs)]
            ids = np.arange(batch.num_tokens, dtype=np.int32)
            output = runner.step(batch, tables, ids)
            outputs = (output.hidden_states, output.pre_mix, *output.late_aux, *output.early_aux)
            copies = [tensor.clone() for tensor in outputs]
            read += copies[-len(output.early_aux) :] if output.early_aux else []
    return runner, checker, read


def test_the_arrangement_that_the_system_picks_is_clean() -> None:
    """O3, O4, point 4: with early aux states and without."""
    for shape in (TINY, EARLY_AUX):
        _, checker, _ = stepped(shape, None)
        assert checker.findings == []


def test_early_aux_states_under_forced_sharing_are_caught_and_wrong() -> None:
    """O3, point 4: the replay graph of the break writes over them."""
    _, _, right = stepped(EARLY_AUX, None)
    _, checker, wrong = stepped(EARLY_AUX, PoolSharing.SHARED)
    assert any(not torch.equal(*pair) for pair in zip(right, wrong, strict=True))
    assert checker.findings
    for finding in checker.findings:
        assert finding.tensor.graph.startswith("PIECEWISE graph")
        assert finding.writer.graph.startswith("replay graph")
    first = checker.findings[0]
    assert first.tensor.shape[1] == TINY.hidden_size and first.tensor.operation == "aten.mean.dim"
    assert "on a stream or in a pool of its own" in first.remedy


def test_a_checker_that_comes_too_late_says_so(backend) -> None:
    """C12."""
    capture(lambda: rows() * 2, backend=backend, pool=backend.make_pool(), stream=backend.make_stream())
    with pytest.raises(ValueError, match="before its first capture"):
        Checker(backend)
    with pytest.raises(ValueError, match="with data"):
        Checker(HostBackend(1 << 28, shapes_only=True))
