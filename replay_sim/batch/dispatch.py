"""How a step runs, at which padded sizes and why, and the table of such steps (D1-D4, G3, S5)."""

import bisect
import enum
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import attrs

from replay_sim.batch.request import Batch
from replay_sim.batch.rows import kept_lengths
from replay_sim.plan.capture_plan import CapturePlan

HEADERS = ("Unpadded Tokens", "Padded Tokens", "Num Paddings", "Runtime Mode", "Count")
JSON_KEYS = ("unpadded_tokens", "padded_tokens", "num_paddings", "runtime_mode", "count")


class CudagraphMode(enum.Enum):
    """How a stretch of layers runs: eagerly, in segments with eager breaks, or in one unbroken graph."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"


class ModelReason(enum.StrEnum):
    """Why the model ran in the mode of its record (D1)."""

    EMPTY = "empty batch"
    FULL = "uniform decode fits a full graph"
    PIECEWISE = "piecewise graph holds the tokens"
    NO_SIZES = "no piecewise sizes are planned"
    TOO_MANY_TOKENS = "more tokens than the largest piecewise size"
    NOT_CAPTURED = "the piecewise size was not captured"


class ReplayReason(enum.StrEnum):
    """Why the replay layers ran on the rows, and in the mode, of their record (S5, D2, D3, G3)."""

    EMPTY = "empty batch"
    FULL_GRAPH = "a full graph keeps all rows"
    THRESHOLD_OFF = "piecewise graph, no trim threshold"
    BELOW_THRESHOLD = "piecewise graph below the trim threshold"
    NOTHING_TRIMS = "eager step, no prefill trims"
    OFF = "decoder replay is off"
    GRAPH = "replay graph holds the rows"
    NO_SIZES = "no replay sizes are planned"
    TOO_MANY_ROWS = "more rows than the largest replay size"
    NOT_CAPTURED = "the replay size was not captured"


@attrs.frozen
class StepRecord:
    """What one step asked for, what ran and why (D4); only the padded counts include pads.

    Without a replay batch replay_rows and padded_rows are 0 and replay_mode is None. With one, replay_mode is
    PIECEWISE for a replay graph, which breaks at attention as a model graph does, and NONE for an eager run.
    `reason` is the replay layers', `model_reason` the model's.
    """

    num_tokens: int
    padded_tokens: int
    mode: CudagraphMode
    replay_rows: int
    padded_rows: int
    replay_mode: CudagraphMode | None
    reason: ReplayReason
    num_reqs: int
    model_reason: ModelReason

    @property
    def has_replay_batch(self) -> bool:
        """Whether the replay layers ran on a replay batch and not on the whole one (L5)."""
        return self.replay_mode is not None


def smallest_size(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of the ascending sizes that is at least `count`, or None."""
    index = bisect.bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


@attrs.frozen
class StepNeeds:
    """What one step asks of dispatch, of one rank or of several together.

    is_uniform_decode: all requests decode the plan's query_len_decode tokens (D1). kept_rows: the rows that the replay
    layers keep (S1). trims: a prefill keeps fewer rows than it has (S5).
    """

    num_tokens: int
    num_reqs: int
    is_uniform_decode: bool
    kept_rows: int
    trims: bool


def step_needs(batch: Batch, plan: CapturePlan) -> StepNeeds:
    """What a step with this batch asks for (D1, S1, S5)."""
    tokens = kept = batch.num_tokens
    uniform = batch.uniform_decode_len == plan.query_len_decode
    if not uniform and batch.query_lens.max(initial=0) > plan.window:
        kept = int(kept_lengths(batch, plan.window).sum())
    return StepNeeds(tokens, batch.num_reqs, uniform, kept, kept < tokens)


def dispatch_step(
    batch: Batch,
    plan: CapturePlan,
    *,
    model_sizes: Collection[int],
    full_sizes: Collection[int],
    replay_sizes: Collection[int],
    replay: bool = True,
) -> StepRecord:
    """How a step with this batch runs, given which of the planned sizes were really captured (D1-D3, G3, S5).

    One policy for all graphs: the plan's smallest size that holds what is asked, if that one was captured;
    else PIECEWISE after FULL, and eager after that. No graph is dispatched to that was not captured.
    The same prompt may be trimmed in one step and not in another: an eager step trims whenever a prefill is
    longer than the window, a PIECEWISE graph only from the threshold on. The record says which. Without `replay`
    the layers run on the whole batch in every mode: what measurements compare with; a graph that breaks needs replay.
    """
    needs = step_needs(batch, plan)
    return dispatch_needs(
        needs, plan, model_sizes=model_sizes, full_sizes=full_sizes, replay_sizes=replay_sizes, replay=replay
    )


def dispatch_needs(
    needs: StepNeeds,
    plan: CapturePlan,
    *,
    model_sizes: Collection[int],
    full_sizes: Collection[int],
    replay_sizes: Collection[int],
    replay: bool = True,
) -> StepRecord:
    """How a step that asks for this runs: the policy of `dispatch_step`, whose batch may be that of several ranks."""
    tokens, reqs = needs.num_tokens, needs.num_reqs
    mode, padded, model_reason = _model_mode(needs, plan, model_sizes, full_sizes)
    refusal = _replay_refusal(needs, plan, mode, padded) if replay else ReplayReason.OFF
    if refusal is not None:
        return StepRecord(tokens, padded, mode, 0, 0, None, refusal, reqs, model_reason)
    replay_mode, padded_rows, reason = _replay_mode(needs.kept_rows, plan, replay_sizes)
    return StepRecord(tokens, padded, mode, needs.kept_rows, padded_rows, replay_mode, reason, reqs, model_reason)


def _model_mode(
    needs: StepNeeds, plan: CapturePlan, model_sizes: Collection[int], full_sizes: Collection[int]
) -> tuple[CudagraphMode, int, ModelReason]:
    """D1: the model's mode, padded tokens, and why. A batch without tokens runs nothing."""
    tokens = needs.num_tokens
    if not tokens:
        return CudagraphMode.NONE, 0, ModelReason.EMPTY
    if needs.is_uniform_decode:
        full = smallest_size(plan.full_sizes, tokens)
        if full is not None and full in full_sizes:
            return CudagraphMode.FULL, full, ModelReason.FULL
    size = smallest_size(plan.model_sizes, tokens)
    if size is None:
        reason = ModelReason.TOO_MANY_TOKENS if plan.model_sizes else ModelReason.NO_SIZES
        return CudagraphMode.NONE, tokens, reason
    if size not in model_sizes:
        return CudagraphMode.NONE, tokens, ModelReason.NOT_CAPTURED
    return CudagraphMode.PIECEWISE, size, ModelReason.PIECEWISE


def _replay_refusal(
    needs: StepNeeds, plan: CapturePlan, mode: CudagraphMode, padded_tokens: int
) -> ReplayReason | None:
    """S5, D2: why the step has no replay batch, or None if it has one."""
    if not needs.num_tokens:
        return ReplayReason.EMPTY
    if mode is CudagraphMode.FULL:
        return ReplayReason.FULL_GRAPH
    if mode is CudagraphMode.NONE:
        return None if needs.trims else ReplayReason.NOTHING_TRIMS
    if plan.trim_threshold is None:
        return ReplayReason.THRESHOLD_OFF
    return ReplayReason.BELOW_THRESHOLD if padded_tokens < plan.trim_threshold else None


def _replay_mode(
    rows: int, plan: CapturePlan, replay_sizes: Collection[int]
) -> tuple[CudagraphMode, int, ReplayReason]:
    """D3, G3: how a replay batch of these rows runs, its padded rows, and why."""
    size = smallest_size(plan.replay_sizes, rows)
    if size is None:
        reason = ReplayReason.TOO_MANY_ROWS if plan.replay_sizes else ReplayReason.NO_SIZES
        return CudagraphMode.NONE, rows, reason
    if size not in replay_sizes:
        return CudagraphMode.NONE, rows, ReplayReason.NOT_CAPTURED
    return CudagraphMode.PIECEWISE, size, ReplayReason.GRAPH


Row = tuple[int, int, int, str, int]
Counts = Counter[tuple[int, int, CudagraphMode]]


@attrs.define(eq=False)
class DispatchTable:
    """Counts of dispatches by what was asked and what ran, and by reason.

    The replay graphs' counts are of the steps that have a replay batch.
    """

    model: Counts = attrs.field(factory=Counter)
    replay: Counts = attrs.field(factory=Counter)
    model_reasons: Counter[ModelReason] = attrs.field(factory=Counter)
    replay_reasons: Counter[ReplayReason] = attrs.field(factory=Counter)

    def add(self, record: StepRecord, count: int = 1) -> None:
        """Count a step, or as many with the same record."""
        self.model[record.num_tokens, record.padded_tokens, record.mode] += count
        self.model_reasons[record.model_reason] += count
        self.replay_reasons[record.reason] += count
        if record.replay_mode is not None:
            self.replay[record.replay_rows, record.padded_rows, record.replay_mode] += count

    def extend(self, records: Iterable[StepRecord]) -> None:
        """Count several steps."""
        for record in records:
            self.add(record)

    @property
    def num_steps(self) -> int:
        """Steps counted."""
        return self.model.total()

    def model_rows(self) -> list[Row]:
        """The model graphs' table: unpadded, padded, paddings, mode, count; the most frequent first."""
        return _rows(self.model)

    def replay_rows(self) -> list[Row]:
        """The replay graphs' table, in the same columns."""
        return _rows(self.replay)

    def markdown(self, limit: int | None = None) -> str:
        """Both tables and the counts by reason as markdown; after `limit` rows a line counts the rest."""
        model = _markdown("Model graphs", self.model_rows(), limit)
        replay = _markdown("Replay graphs", self.replay_rows(), limit)
        reasons = _reasons_markdown([*self.model_reasons.most_common(), *self.replay_reasons.most_common()])
        return "\n\n".join((model, replay, reasons))

    def as_dict(self) -> dict[str, object]:
        """The same counts, all of them, as a dict that JSON can hold."""
        return {
            "model_graphs": [dict(zip(JSON_KEYS, row, strict=True)) for row in self.model_rows()],
            "replay_graphs": [dict(zip(JSON_KEYS, row, strict=True)) for row in self.replay_rows()],
            "model_reasons": {reason.value: count for reason, count in self.model_reasons.most_common()},
            "replay_reasons": {reason.value: count for reason, count in self.replay_reasons.most_common()},
        }


def _rows(counts: Counts) -> list[Row]:
    """The counts as table rows, the most frequent first, then by size and mode."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0][0], item[0][1], item[0][2].value))
    return [(asked, padded, padded - asked, mode.value, count) for (asked, padded, mode), count in ordered]


def _markdown(title: str, rows: list[Row], limit: int | None) -> str:
    """One titled table, cut after `limit` rows with a line that says how much was cut."""
    from tabulate import tabulate  # only printing needs it

    shown = rows if limit is None else rows[:limit]
    lines = [f"**{title}**", "", tabulate(shown, HEADERS, tablefmt="pipe")]
    if len(shown) < len(rows):
        hidden = rows[len(shown) :]
        lines += ["", f"{len(hidden)} more rows, {sum(row[-1] for row in hidden)} dispatches, not shown."]
    return "\n".join(lines)


def _reasons_markdown(counts: list[tuple[ModelReason, int] | tuple[ReplayReason, int]]) -> str:
    """The counts by reason, the model's first."""
    from tabulate import tabulate

    layers = {ModelReason: "model", ReplayReason: "replay"}
    rows = [(layers[type(reason)], reason.value, count) for reason, count in counts]
    return "\n".join(("**Reasons**", "", tabulate(rows, ("Layers", "Reason", "Count"), tablefmt="pipe")))
