"""The tape's truth: whatever a captured function is made of, its replay on changed inputs equals an eager call."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from replay_sim.capture import CaptureError, capture, eager_break
from replay_sim.capture.host import HostBackend
from replay_sim.capture.host_tape import Call

X = torch.zeros(4, 6)


@pytest.fixture
def host_place() -> dict:
    backend = HostBackend(1 << 30)
    return {"backend": backend, "pool": backend.make_pool(), "stream": backend.make_stream()}


def seeded(seed: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def lstm() -> Callable[[], torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = torch.nn.LSTM(6, 3)
    return lambda: layer(X)[0]


def turned_in_place() -> torch.Tensor:
    doubled = X * 2
    doubled.t_()
    return doubled.unsqueeze_(0) + 1


def set_to_another() -> torch.Tensor:
    target = torch.empty(4, 6)
    target.set_(X * 2)
    return target + 1


def conjugated_in_place() -> torch.Tensor:
    turned = torch.complex(X, X + 1).conj()
    turned.mul_(2)
    return turned


FUNCTIONS = {
    "a reshape that copies": lambda: (X * 2).t().reshape(-1),
    "contiguous memory of a transpose": lambda: (X * 2).t().contiguous() + 0,
    "a cast": lambda: (X * 2).to(torch.float64) + 0,
    "a linear layer": lambda: F.linear(X, X),
    "two results": lambda: X.topk(2)[0],
    "in place on a view": lambda: (X * 1).t()[1].add_(1),
    "turned in place": turned_in_place,
    "set to another tensor": set_to_another,
    "a conjugate": lambda: torch.complex(X, X + 1).conj(),
    "in place on a conjugate": conjugated_in_place,
    "the negative part of a conjugate": lambda: torch.complex(X, X + 1).conj().imag,
    "some bytes seen as another type": lambda: (X * 2).view(torch.uint8).flatten()[:95].clone()[8:88].view(torch.int64),
    "a quantile, which squeezes in place": lambda: X.quantile(0.3),
    "an LSTM, which leaves a result undefined": lstm(),
}


@pytest.mark.parametrize("inference", [False, True], ids=["no grad", "inference mode"])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_a_replay_on_changed_inputs_equals_an_eager_call(what: str, inference: bool, host_place: dict) -> None:
    """C2, C12: in inference mode, too, where composed operations are dispatched as they are."""
    function = torch.inference_mode()(FUNCTIONS[what]) if inference else FUNCTIONS[what]
    X.copy_(seeded(0))
    graph = capture(function, **host_place)
    X.copy_(seeded(1))
    replayed = graph.replay()
    with torch.no_grad():
        assert torch.equal(replayed, function())


def test_an_output_that_would_be_resized_is_refused(host_place: dict) -> None:
    """C10: what follows would see the old shape."""
    with pytest.raises(CaptureError, match=r"mul.out resizes .* shape \(0,\) that it writes to \(4, 6\)"):
        capture(lambda: torch.mul(X, 2, out=torch.empty(0)) + 1, **host_place)


@eager_break
def doubled(tensor: torch.Tensor) -> None:
    tensor.mul_(2)


def test_a_break_inside_inference_mode_replays_outside_of_it(host_place: dict) -> None:
    """C1, C3."""

    @torch.inference_mode()
    def function() -> torch.Tensor:
        made = X + 1
        doubled(made)
        return made + 1

    graph = capture(function, **host_place)
    X.copy_(seeded(2))
    assert torch.equal(graph.replay(), (X + 1) * 2 + 1)


def test_an_inverse_is_refused_for_its_check_on_the_host(host_place: dict) -> None:
    """C10: a GPU's inverse reads on the host whether it worked; `inv_ex` does not."""
    square = torch.eye(4)
    with pytest.raises(CaptureError, match="_linalg_check_errors.* on the host"):
        capture(lambda: torch.linalg.inv(square), **host_place)
    assert torch.equal(capture(lambda: torch.linalg.inv_ex(square)[0] + 0, **host_place).replay(), square)


def test_an_operation_whose_shape_rule_is_wrong_names_itself(host_place: dict) -> None:
    """C10: some rules on meta tensors leave out what a CPU returns."""
    bag = torch.zeros(2, 2, dtype=torch.int64)
    graph = capture(lambda: F.embedding_bag(bag, X), **host_place)
    with pytest.raises(CaptureError, match="embedding_bag.* on a CPU, where its shape rule .* eager break"):
        graph.replay()


@pytest.mark.parametrize("more", [-1, 1])
def test_a_shape_rule_that_says_fewer_or_more_rows_is_found_at_the_replay(host_place: dict, more: int) -> None:
    """C10."""
    name = f"replay_sim_wrong_rule_{'less' if more < 0 else 'more'}"
    library = torch.library.Library(name, "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("twice", lambda x: x.new_empty(x.shape[0] + more, x.shape[1]), "Meta")
    graph = capture(lambda: getattr(torch.ops, name).twice(X), **host_place)
    with pytest.raises(CaptureError, match=rf"gives \(4, 6\) on a CPU, .* says \({4 + more}, 6\): run it in an eager"):
        graph.replay()


def test_lines_are_kept_where_a_ledger_names_them_and_nowhere_else() -> None:
    """Looking for the caller costs time at every operation of a capture."""
    sources = []
    for with_ledger in (False, True):
        backend = HostBackend(1 << 30)
        if with_ledger:
            backend.keep_ledger()
        graph = capture(lambda: X + 1, backend=backend, pool=backend.make_pool(), stream=backend.make_stream())
        (segment,) = graph.segments
        sources.append([entry.source for entry in segment.tape.entries if isinstance(entry, Call)])
    assert sources[0] == [None]
    assert len(sources[1]) == 1 and "test_host_tape.py" in str(sources[1][0])


def test_an_operation_without_a_rule_on_meta_tensors_is_refused_with_the_remedy(host_place: dict) -> None:
    """C10: its result's shape cannot be known before it runs."""
    library = torch.library.Library("replay_sim_without_rule", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    with pytest.raises(CaptureError, match="twice.* has no shape rule on meta tensors: run it in an eager break"):
        capture(lambda: torch.ops.replay_sim_without_rule.twice(X), **host_place)


def test_a_segment_that_was_not_begun_cannot_be_ended() -> None:
    """C1."""
    with pytest.raises(CaptureError, match="end_segment needs a begin_segment before it"):
        HostBackend(1 << 30).end_segment()


def test_by_shapes_alone_a_list_of_new_tensors_is_refused_by_its_operation() -> None:
    """C10, C12."""
    backend = HostBackend(1 << 30, shapes_only=True)
    backend.begin_segment(backend.make_pool(), backend.make_stream())
    with pytest.raises(CaptureError, match="_foreach_add.* a list of new tensors"):
        torch._foreach_add([X], [X])
    backend.abort_segment()
