"""Histories of steps as Hypothesis draws them: explicit, legal for their world, and shrunk to a few when one fails."""

import enum

import attrs
from hypothesis import strategies as st
from long_run.plain_step import Needs
from long_run.worlds import World

from replay_sim.replay.graphs import ReplayForm

NAMES = "abcdefgh"
MOST_STEPS = 40


class Poison(enum.Enum):
    """What buffers and pads hold: floats, and integers of positions, window starts and rows."""

    NAN = (float("nan"), 2**31 - 1)
    INF = (float("inf"), -(2**31))
    MINUS_INF = (float("-inf"), -1)
    LARGE = (1e30, 7)


class Refused(enum.Enum):
    """A step that must be refused with a ValueError before it writes anything."""

    TOKEN_ID = "input_ids"
    BLOCK_ID = "block_tables"
    NO_BLOCKS = "blocks"
    TOO_FEW_IDS = "input_ids for"


@attrs.frozen
class Ask:
    """One request's part in a step, as the oracle session has it.

    `rejected` tokens computed so far are dropped first, as after speculation; `held`, if given, is how many of the
    positions before still have window KV.
    """

    name: str
    length: int
    decodes: bool = False
    all_rows_read: bool = False
    rejected: int = 0
    held: int | None = None


@attrs.frozen
class Step:
    """One step: `finished` requests give their blocks back before it, and a name that asks anew starts at 0.

    `other` is what another rank asks of the same step. `interrupted` is after how many KV writes an interrupt comes in
    a first attempt, and `refused` a step that is tried before.
    """

    asks: tuple[Ask, ...] = ()
    finished: str = ""
    form: ReplayForm = ReplayForm.BREAKABLE
    poison: Poison | None = None
    other: Needs | None = None
    interrupted: int | None = None
    refused: Refused | None = None


@attrs.define
class _Held:
    """What a request holds while a history is drawn."""

    computed: int = 0
    last_decode: int = 0
    blocks: int = 0


class _Drawer:
    """Draws the steps of one history; keeps every request within its block table and the cache."""

    def __init__(self, world: World, draw: st.DrawFn) -> None:
        self.world, self.draw = world, draw
        self.held: dict[str, _Held] = {}
        window = world.shape.window
        self.prefill_lengths = st.sampled_from((window - 1, window, window + 1, 2 * window + 1, 1)) | st.integers(
            0, world.plan.max_num_batched_tokens
        )

    def step(self) -> Step:
        draw, plan = self.draw, self.world.plan
        kind = draw(st.sampled_from(("mix", "mix", "mix", "uniform", "prompt", "empty", "idle")))
        finished = "".join(name for name in self._finished() if self.held.pop(name))
        if kind in ("empty", "idle") and draw(st.integers(0, 3)):
            kind = "mix"
        if kind in ("empty", "idle"):
            asks: list[Ask] = []
        elif kind == "uniform":
            asks = self._asks(decode_length=plan.query_len_decode)
        else:
            asks = self._asks(decode_length=None, most=1 if kind == "prompt" else plan.max_num_seqs)
        return Step(
            tuple(asks),
            finished,
            draw(st.sampled_from(self.world.forms)),
            draw(st.sampled_from((None, *Poison))),
            draw(self._others()) if kind == "idle" or draw(st.integers(0, 7)) == 7 else None,
            draw(st.integers(0, 5)) if draw(st.integers(0, 15)) == 15 else None,
            draw(st.sampled_from(Refused)) if draw(st.integers(0, 15)) == 15 else None,
        )

    def _finished(self) -> list[str]:
        if not self.held or self.draw(st.integers(0, 4)) < 4:
            return []
        return self.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=3))

    def _asks(self, *, decode_length: int | None, most: int | None = None) -> list[Ask]:
        """Parts of some requests; with a `decode_length` all decode as many tokens."""
        names = sorted(self.held) if decode_length else list(NAMES)
        most = min(most or self.world.plan.max_num_seqs, self.world.plan.max_num_seqs, len(names))
        if not most:
            return []
        chosen = self.draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=most))
        asks, left = [], self.world.plan.max_num_batched_tokens
        for name in chosen:
            ask = self._ask(name, decode_length, left)
            if ask is not None:
                asks.append(ask)
                left -= ask.length
        return asks

    def _ask(self, name: str, decode_length: int | None, left: int) -> Ask | None:
        draw, held = self.draw, self.held.get(name, _Held())
        decodes = bool(decode_length) or (held.computed > 0 and draw(st.booleans()))
        length = decode_length or draw(st.integers(1, 4) if decodes else self.prefill_lengths)
        rejected = 0
        if decodes and held.last_decode > 1:
            rejected = draw(st.integers(0, held.last_decode - 1))
        computed = held.computed - rejected
        free = self.world.num_blocks - sum(other.blocks for other in self.held.values()) + held.blocks
        room = min(left, self.world.longest - computed, free * self.world.block_size - computed)
        if decode_length and length > room:
            return None
        length = min(length, room)
        end = computed + length
        blocks = max(held.blocks, -(-end // self.world.block_size))
        self.held[name] = _Held(end, length if decodes else 0, blocks)
        all_rows_read = not decodes and draw(st.integers(0, 4)) == 4
        window_kv = draw(st.integers(0, self.world.shape.window + 1)) if draw(st.integers(0, 5)) == 5 else None
        return Ask(name, length, decodes, all_rows_read, rejected, window_kv)

    def _others(self) -> st.SearchStrategy[Needs]:
        plan = self.world.plan
        idle = Needs(0, 0, True, 0, False)

        def needs(tokens: int, share: int, uniform: bool) -> Needs:
            kept = max(1, tokens * share // 4)
            if uniform and tokens % plan.query_len_decode == 0:
                return Needs(tokens, 1, True, tokens, False)
            return Needs(tokens, 1, False, kept, kept < tokens)

        most = st.integers(1, plan.max_num_batched_tokens)
        return st.just(idle) | st.builds(needs, most, st.integers(1, 4), st.booleans())


@st.composite
def histories(draw: st.DrawFn, world: World) -> list[Step]:
    """Steps over one KV cache that holds nothing at first."""
    drawer = _Drawer(world, draw)
    return [drawer.step() for _ in range(draw(st.integers(1, MOST_STEPS)))]
