"""Random steps of several ranks, and the decision that they must come to, worked out by looking at all of them."""

import random

import attrs
from batch.oracles import select_row_by_row

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.plan.capture_plan import CapturePlan

PLAN = CapturePlan(
    window=8,
    model_sizes=(8, 16, 64, 256),
    full_sizes=(2, 4, 8),
    replay_sizes=(8, 32, 128),
    trim_threshold=32,
    max_num_seqs=16,
    max_num_batched_tokens=320,
    query_len_decode=2,
)
ALL_SIZES = {"model_sizes": PLAN.model_sizes, "full_sizes": PLAN.full_sizes, "replay_sizes": PLAN.replay_sizes}
# How a step's ranks are alike: what most of them do, so that all kinds of agreement come up.
MOODS = ("decode", "decode", "short", "long", "mixed", "idle", "all idle")
Decision = tuple[str, int, str | None, int, int]


@attrs.frozen
class RankStep:
    """One rank's part: its batch, None if it says that it is idle, and the captured sizes that it holds."""

    batch: Batch | None
    held: dict[str, tuple[int, ...]]


def random_steps(seed: int, world_size: int, num_steps: int) -> list[list[RankStep]]:
    """Per step a part for each rank."""
    draw = random.Random(seed)
    return [_random_step(draw, world_size) for _ in range(num_steps)]


def _random_step(draw: random.Random, world_size: int) -> list[RankStep]:
    mood = draw.choice(MOODS)
    lacking = draw.choice(("nothing", "nothing", "a few sizes", "all graphs"))
    unlucky = draw.randrange(world_size)
    return [
        RankStep(_random_batch(draw, mood), _held(draw, lacking if rank == unlucky else "nothing"))
        for rank in range(world_size)
    ]


def _held(draw: random.Random, lacking: str) -> dict[str, tuple[int, ...]]:
    if lacking == "nothing":
        return ALL_SIZES
    chance = 0.5 if lacking == "a few sizes" else 0.0
    return {name: tuple(size for size in sizes if draw.random() < chance) for name, sizes in ALL_SIZES.items()}


def _random_batch(draw: random.Random, mood: str) -> Batch | None:
    if mood == "all idle" or draw.random() < (0.6 if mood == "idle" else 0.15):
        return None
    if draw.random() < 0.05:
        return Batch()
    if mood == "decode":
        return Batch([Request(2, 50, Phase.DECODE)] * draw.randint(1, 5))
    requests = [_random_request(draw, mood) for _ in range(draw.randint(1, 5))]
    return Batch(requests)


def _random_request(draw: random.Random, mood: str) -> Request:
    if mood == "mixed" and draw.random() < 0.5:
        return Request(draw.choice((1, 2, 2)), draw.randint(0, 60), Phase.DECODE)
    longest = {"short": 9, "idle": 12, "mixed": 30, "long": 64}[mood]
    return Request(draw.randint(0, longest), 0, Phase.PREFILL, all_rows_read=draw.random() < 0.15)


def decide_plainly(ranks: list[RankStep], plan: CapturePlan = PLAN) -> list[Decision]:
    """X1, X2: per rank the mode, padded tokens, replay mode (None without a replay batch), replay and padded rows."""
    batches = [Batch() if rank.batch is None else rank.batch for rank in ranks]
    tokens = [sum(request.query_len for request in batch.requests) for batch in batches]
    kept = [len(select_row_by_row(batch, plan.window)[0]) for batch in batches]
    if not any(tokens):
        return [("NONE", 0, None, 0, 0)] * len(ranks)
    full = graph_of_all(ranks, "full_sizes", tokens) if all(is_idle_or_decodes(rank, plan) for rank in ranks) else None
    piecewise = graph_of_all(ranks, "model_sizes", tokens)
    mode = "FULL" if full else "PIECEWISE" if piecewise else "NONE"
    own_tokens = [full or piecewise or count or 1 for count in tokens]
    if mode == "PIECEWISE":
        replays = piecewise >= plan.trim_threshold
    else:
        replays = mode == "NONE" and kept != tokens
    if not replays:
        return [(mode, padded, None, 0, 0) for padded in own_tokens]
    replay = graph_of_all(ranks, "replay_sizes", kept)
    replay_mode = "PIECEWISE" if replay else "NONE"
    return [
        (mode, padded, replay_mode, rows, replay or rows or 1) for padded, rows in zip(own_tokens, kept, strict=True)
    ]


def is_idle_or_decodes(rank: RankStep, plan: CapturePlan) -> bool:
    if rank.batch is None:
        return True
    asked = [(request.phase, request.query_len) for request in rank.batch.requests]
    return bool(asked) and set(asked) == {(Phase.DECODE, plan.query_len_decode)}


def graph_of_all(ranks: list[RankStep], kind: str, rows: list[int]) -> int | None:
    """The planned size that fits the largest rank, if there is one and every rank holds it."""
    fitting = [size for size in ALL_SIZES[kind] if all(size >= count for count in rows)]
    if fitting and all(fitting[0] in rank.held[kind] for rank in ranks):
        return fitting[0]
    return None
