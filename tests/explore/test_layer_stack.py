"""The stack of small layers: every launch is counted once, and a replay is right exactly where attention breaks."""

import gc

import pytest
import torch

from replay_sim.explore.layer_stack import BREAKS, WIDTH, LayerStack, OperationCount, capture_stack

NUM_LAYERS, SIZE, STEP = 2, 8, 5
OPERATIONS_OF_A_LAYER = {"norm": 5, "kv_write": 1, "attention": 3, "experts": 3}
PROJECTIONS = 3
ADDS = 2


def of_layer() -> int:
    """Operations of one layer, counted by hand: two norms, KV write, attention, experts, three products, two adds."""
    return OPERATIONS_OF_A_LAYER["norm"] + sum(OPERATIONS_OF_A_LAYER.values()) + PROJECTIONS + ADDS


@pytest.mark.parametrize("breaks", BREAKS)
def test_a_piecewise_capture_holds_what_its_breaks_do_not(breaks: str) -> None:
    """C1."""
    made = capture_stack(NUM_LAYERS, breaks, "PIECEWISE", SIZE, STEP)
    in_breaks = NUM_LAYERS * sum(OPERATIONS_OF_A_LAYER[name] for name in BREAKS[breaks])
    assert made.eager_operations == NUM_LAYERS * of_layer()
    assert made.break_operations == in_breaks
    assert made.operations == made.eager_operations - in_breaks
    assert made.num_breaks == NUM_LAYERS * len(BREAKS[breaks])
    assert made.num_segments == made.num_breaks + 1
    assert made.launches == made.num_segments + in_breaks


def test_a_full_capture_is_one_launch() -> None:
    """C1."""
    made = capture_stack(NUM_LAYERS, "attention", "FULL", SIZE, SIZE)
    assert (made.num_segments, made.num_breaks, made.launches) == (1, 0, 1)
    assert made.operations == made.eager_operations == NUM_LAYERS * of_layer()


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("step", [SIZE, STEP, 1])
def test_a_replay_equals_eager_unless_attention_was_captured_with_other_rows(breaks: str, mode: str, step: int) -> None:
    """C2, C5."""
    made = capture_stack(NUM_LAYERS, breaks, mode, SIZE, step)
    breaks_attention = mode == "PIECEWISE" and "attention" in BREAKS[breaks]
    assert made.compared == step * WIDTH
    assert (made.differing == 0) == (breaks_attention or step == SIZE)


def test_the_stack_is_the_layers_that_it_says() -> None:
    stack = LayerStack(1, (), SIZE)
    stack.live_rows = STEP
    x, (wq, wkv, wo, w1, w2) = stack.x[:STEP].double(), [weight.double() for weight in stack.weights[0]]

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()

    kv = norm(x) @ wkv
    x = x + ((norm(x) @ wq @ kv.T).softmax(1) @ kv) @ wo
    x = x + (norm(x) @ w1).clamp(min=0) @ w2
    assert torch.allclose(stack()[:STEP].double(), x, atol=1e-5)


def test_views_and_allocations_do_not_count_as_launches() -> None:
    x = torch.ones(4, 4)
    with OperationCount() as counted:
        torch.add(x[1:].t(), 1, out=torch.empty_like(x[1:].t()))
    assert counted.operations == 1


def test_the_collector_is_left_as_it_was() -> None:
    """C9."""
    frozen = gc.get_freeze_count()
    capture_stack.__wrapped__(1, "none", "FULL", SIZE, SIZE)
    assert gc.isenabled() and gc.get_freeze_count() == frozen
