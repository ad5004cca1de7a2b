"""Random systems for the long run: a decoder shape, a plan, forms and memory of its graphs, sizes not captured."""

import random
from collections.abc import Iterable
from itertools import combinations

import attrs
import torch

from replay_sim.capture import CaptureBackend
from replay_sim.config import ServingConfig
from replay_sim.config.shapes import DecoderShape
from replay_sim.decoder.step import StepRunner
from replay_sim.decoder.weights import make_weights
from replay_sim.plan.capture_plan import CapturePlan, make_plan
from replay_sim.plan.dummy_batch import check_cache_slots
from replay_sim.replay.graphs import ReplayForm
from replay_sim.replay.sharing import PoolSharing

POISONED_IDS = 4
"""The ids 0 to 3 are of no request: pads take id 0, and poisoned pads any of them."""
EMBEDDED = (torch.nan, torch.inf, -torch.inf, 1e30)
VOCAB = 40


@attrs.frozen(kw_only=True)
class World:
    """All that is fixed while histories of steps run.

    `missing` are sizes that are planned and not captured, by the kind that a capture's progress names: "PIECEWISE",
    "FULL", "replay". With `against_float64` steps are also compared with the plain decoder; its shape then chooses all
    experts, as a near tie of two scores may fall either way in another precision, and is of float32.
    """

    seed: int
    shape: DecoderShape
    plan: CapturePlan
    forms: tuple[ReplayForm, ...]
    sharing: PoolSharing | None
    largest_first: bool
    hold_outputs: bool
    missing: frozenset[tuple[str, int]]
    num_blocks: int
    max_blocks: int
    block_size: int
    against_float64: bool

    @property
    def longest(self) -> int:
        """Most tokens of one request."""
        return min(self.max_blocks * self.block_size, self.shape.max_position)


def draw_world(seed: int) -> World:
    """The world of this seed: tiny in every size, so that a step takes milliseconds.

    Successive seeds take the sharings in turn, and every eighth is held against float64.
    """
    rng = random.Random(seed)
    against_float64 = seed % 8 == 0
    sharing = list(PoolSharing)[seed % 3]
    shape = _draw_shape(rng, all_experts=against_float64, shares_pool=sharing is PoolSharing.SHARED)
    block_size = rng.choice((1, 2, 3, 4, 8))
    max_blocks = rng.randint(40, 90) // block_size
    plan = None
    while plan is None:
        plan = _draw_plan(rng, shape.window, max_blocks * block_size)
    sizes = (("PIECEWISE", plan.model_sizes), ("FULL", plan.full_sizes), ("replay", plan.replay_sizes))
    every_size = [(kind, size) for kind, of_kind in sizes for size in of_kind]
    missing = rng.sample(every_size, rng.randint(0, min(2, len(every_size)))) if rng.random() < 0.7 else ()
    return World(
        seed=seed,
        shape=shape,
        plan=plan,
        forms=rng.choice((tuple(ReplayForm), tuple(ReplayForm), *((form,) for form in ReplayForm))),
        sharing=rng.choice((None, sharing)) if sharing is _chosen_for(shape) else sharing,
        largest_first=rng.random() < 0.8,
        hold_outputs=rng.random() < 0.2,
        missing=frozenset(missing),
        num_blocks=max_blocks * rng.randint(2, 4),
        max_blocks=max_blocks,
        block_size=block_size,
        against_float64=against_float64,
    )


def _some(rng: random.Random, layers: Iterable[int]) -> tuple[int, ...]:
    every = list(layers)
    return rng.choice([chosen for count in range(min(2, len(every)) + 1) for chosen in combinations(every, count)])


def _chosen_for(shape: DecoderShape) -> PoolSharing:
    """O3."""
    return PoolSharing.OWN_STREAM if shape.early_aux_layers else PoolSharing.SHARED


def _draw_shape(rng: random.Random, *, all_experts: bool, shares_pool: bool) -> DecoderShape:
    """Early aux states keep replay graphs from sharing the model graphs' memory (O3)."""
    layers = rng.choice((2, 2, 2, 3))
    cut = rng.randrange(layers)
    experts = rng.randint(1, 4)
    local = rng.randint(1, experts)
    rope = rng.choice((2, 4))
    return DecoderShape(
        name="long run",
        hidden_size=rng.choice((8, 12, 16, 24, 34)),
        hc_mult=rng.choice((1, 2, 3, 4)),
        num_layers=layers,
        cut=cut,
        window=rng.randint(1, 9),
        index_topk=rng.choice((1, 3, 8)),
        num_heads=2,
        head_dim=rng.choice((4, 6, 8)),
        rope_dim=rope,
        q_lora_rank=rng.choice((6, 8)),
        o_lora_rank=6,
        o_groups=rng.choice((1, 2)),
        num_experts=experts,
        num_local_experts=local,
        first_local_expert=rng.randint(0, experts - local),
        num_experts_per_tok=experts if all_experts else rng.randint(1, experts),
        moe_intermediate_size=8,
        shared_intermediate_size=4,
        swiglu_limit=rng.choice((0.5, 10.0)),
        sinkhorn_iters=rng.choice((1, 2)),
        vocab_size=VOCAB,
        num_weight_sets=rng.randint(1, layers),
        max_position=rng.choice((70, 400)),
        dtype="float32" if all_experts else rng.choice(("float32", "float32", "bfloat16")),
        early_aux_layers=() if shares_pool else _some(rng, range(cut)),
        late_aux_layers=_some(rng, range(cut, layers)),
    )


def _draw_plan(rng: random.Random, window: int, request_slots: int) -> CapturePlan | None:
    """A plan of chosen sizes, or that of a serving config; None if the draw is not allowed."""
    try:
        plan = _plan_of_config(rng, window) if rng.random() < 0.4 else _plan_of_sizes(rng, window)
        check_cache_slots(plan, 2 * request_slots, request_slots)
    except ValueError:
        return None
    graphs = len(plan.model_sizes) + len(plan.full_sizes) + len(plan.replay_sizes)
    return plan if graphs <= 10 else None


def _plan_of_sizes(rng: random.Random, window: int) -> CapturePlan:
    seqs, budget, query_len = rng.randint(1, 6), rng.randint(max(6, window + 3), 48), rng.choice((1, 1, 2, 3))
    most = min(seqs, budget // query_len)
    full = sorted(rng.sample(range(1, most + 1), rng.randint(0, min(2, most)))) if most else []
    return CapturePlan(
        window=window,
        model_sizes=tuple(sorted(rng.sample(range(1, budget + 1), rng.choice((0, 1, 2, 3, 3, 4))))),
        full_sizes=tuple(count * query_len for count in full),
        replay_sizes=tuple(sorted(rng.sample(range(1, budget + 1), rng.choice((0, 1, 2, 3, 3))))),
        trim_threshold=rng.choice((None, *(window + 1,) * 3, window + rng.randint(2, 12))),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        query_len_decode=query_len,
    )


def _plan_of_config(rng: random.Random, window: int) -> CapturePlan:
    budget = rng.randint(max(8, window + 3), 48)
    sizes = tuple(rng.sample(range(1, budget + 1), rng.choice((0, 1, 2, 3))))
    return make_plan(
        ServingConfig(
            window=window,
            max_num_batched_tokens=budget,
            max_num_seqs=rng.randint(1, 6),
            num_speculative_tokens=rng.choice((0, 0, 1, 2)),
            cudagraph_mode=rng.choice((*("FULL_AND_PIECEWISE",) * 7, "PIECEWISE", "FULL", "NONE")),
            cudagraph_capture_sizes=sizes or None,
            max_cudagraph_capture_size=None if sizes else rng.randint(1, budget),
            cudagraph_decoder_replay=rng.random() < 0.9,
            decoder_replay_cudagraph_capture_sizes=tuple(rng.sample(range(1, budget + 1), rng.choice((0, 2, 3)))),
            decoder_replay_trim_threshold=rng.choice((None, window + 1, window + rng.randint(1, 12))),
        )
    )


def build(world: World, backend: CaptureBackend) -> StepRunner:
    """The system of this world with its graphs captured, all but those missing, in every form; the first is in use."""
    weights = make_weights(world.shape, backend.device, world.seed)
    embed = weights.embed.clone()
    embed[:POISONED_IDS] = torch.tensor(EMBEDDED).unsqueeze(1)
    runner = StepRunner(
        world.shape,
        world.plan,
        backend,
        num_blocks=world.num_blocks,
        max_blocks=world.max_blocks,
        block_size=world.block_size,
        weights=attrs.evolve(weights, embed=embed),
        replay_form=world.forms[0],
        sharing=world.sharing,
        largest_first=world.largest_first,
        hold_outputs=world.hold_outputs,
    )

    def there(sizes: Iterable[int], kind: str) -> list[int]:
        return [size for size in sizes if (kind, size) not in world.missing]

    runner.capture_model_graphs(there)
    for form in reversed(world.forms):
        runner.use_replay_form(form)
        runner.capture_replay_graphs(there)
    return runner
