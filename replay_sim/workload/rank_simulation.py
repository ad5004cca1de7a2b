"""What several ranks cost a workload: the padding that comes from taking the largest of them, without a device."""

import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import attrs

from replay_sim.batch.dispatch import StepNeeds, StepRecord, dispatch_needs, smallest_size, step_needs
from replay_sim.batch.rank_dispatch import IDLE, rank_record, together
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.plan.optimal import optimal_sizes
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.trace import TraceRequest

RANKS = (1, 2, 4, 8, 16, 32, 64)


class Dealing(enum.StrEnum):
    """How requests are dealt to ranks, in order of arrival and once and for all."""

    ROUND_ROBIN = "round robin"
    """To one rank after the other."""
    LEAST_LOAD = "least load"
    """To the rank whose requests so far have the fewest prompt and output tokens, the first if several do."""


@attrs.define
class RowCount:
    """Rows that ran, summed over steps and ranks, and the pads among them."""

    rows: int = 0
    padded_rows: int = 0

    @property
    def pad_share(self) -> float:
        """Pads as a share of 1 of the padded rows, 0 without any."""
        return 1 - self.rows / self.padded_rows if self.padded_rows else 0.0

    def add(self, rows: int, padded_rows: int) -> None:
        """Count one step of one rank."""
        self.rows += rows
        self.padded_rows += padded_rows


@attrs.define(eq=False)
class RankRun:
    """A workload on several ranks that step together until the last has finished; one that has is idle.

    `tokens` and `replay` are what ranks run as they agree, `tokens_alone` and `replay_alone` what each would run by
    itself in the same steps. `steps` counts those of all ranks together, `replay_steps` those with a replay batch.
    `idle_rank_steps`: a rank had nothing to run. `joined_rank_steps`: a rank had a replay batch only for others.
    `rows_alone` is the histogram of a rank's replay rows by itself, `rows_agreed` of the largest rank's, one a step;
    `own_rows_agreed` sums, by the largest rank's rows, those of all ranks.
    """

    num_ranks: int
    dealing: Dealing
    steps: int = 0
    replay_steps: int = 0
    idle_rank_steps: int = 0
    joined_rank_steps: int = 0
    tokens: RowCount = attrs.field(factory=RowCount)
    tokens_alone: RowCount = attrs.field(factory=RowCount)
    replay: RowCount = attrs.field(factory=RowCount)
    replay_alone: RowCount = attrs.field(factory=RowCount)
    rows_alone: Counter[int] = attrs.field(factory=Counter)
    rows_agreed: Counter[int] = attrs.field(factory=Counter)
    own_rows_agreed: Counter[int] = attrs.field(factory=Counter)

    def add(self, agreed: StepRecord, needs: Sequence[StepNeeds], alone: Sequence[StepRecord]) -> None:
        """Count one step: what the ranks agreed on, and each rank's needs and its record by itself."""
        self.steps += 1
        if agreed.has_replay_batch:
            self.replay_steps += 1
            self.rows_agreed[agreed.replay_rows] += 1
            self.own_rows_agreed[agreed.replay_rows] += sum(own.kept_rows for own in needs)
        for own, by_itself in zip(needs, alone, strict=True):
            record = rank_record(agreed, own)
            self.tokens.add(record.num_tokens, record.padded_tokens)
            self.tokens_alone.add(by_itself.num_tokens, by_itself.padded_tokens)
            self.replay.add(record.replay_rows, record.padded_rows)
            self.replay_alone.add(by_itself.replay_rows, by_itself.padded_rows)
            self.idle_rank_steps += not own.num_reqs
            self.joined_rank_steps += record.has_replay_batch and not by_itself.has_replay_batch
            if by_itself.has_replay_batch:
                self.rows_alone[by_itself.replay_rows] += 1


@attrs.frozen
class RankPadding:
    """One line of the table of `padding_by_ranks`; shares are of 1, of padded rows of all ranks.

    `steps` as all ranks step together. `idle_share` and `joined_share`: of the ranks' steps, those in which a rank
    has nothing to run, or has a replay batch only because another does. `replay_pad_share` and `token_pad_share`: pads
    of the replay layers and of the model as the ranks agree; `_alone`: as each rank would pad by itself.
    """

    num_ranks: int
    dealing: Dealing
    steps: int
    replay_steps: int
    idle_share: float
    joined_share: float
    replay_pad_share: float
    replay_pad_share_alone: float
    token_pad_share: float
    token_pad_share_alone: float


@attrs.frozen
class PlanTransfer:
    """How a list of replay sizes does on the steps of several ranks that agree.

    `sizes_of` says whose sizes they are. `rows_per_step`: padded rows of one rank in a step with a replay batch, on
    average; steps beyond the largest size run eagerly on each rank's own rows, without pads and without a graph's
    gain, their share is `eager_share`. `pad_share`: pads as a share of 1 of the padded rows.
    """

    sizes_of: str
    replay_sizes: tuple[int, ...]
    rows_per_step: float
    pad_share: float
    eager_share: float


def deal(requests: Iterable[TraceRequest], num_ranks: int, dealing: Dealing) -> list[list[TraceRequest]]:
    """The requests of each rank, in order of arrival. ValueError for fewer than one rank."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}: it must be at least 1")
    hands: list[list[TraceRequest]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for index, request in enumerate(requests):
        rank = index % num_ranks if dealing is Dealing.ROUND_ROBIN else load.index(min(load))
        hands[rank].append(request)
        load[rank] += request.prompt_tokens + request.output_tokens
    return hands


def simulate_ranks(
    requests: Iterable[TraceRequest],
    settings: SchedulerSettings,
    plan: CapturePlan,
    num_ranks: int,
    dealing: Dealing = Dealing.ROUND_ROBIN,
) -> RankRun:
    """Deal the requests and run them on ranks that hold all planned sizes, a scheduler each (X1, X2).

    Every request waits from the start; ranks draw from seeds of their own, the first from the settings'. Raises
    ValueError for fewer than one rank, and what a scheduler raises.
    """
    run = RankRun(num_ranks, dealing)
    decide = partial(
        dispatch_needs,
        plan=plan,
        model_sizes=frozenset(plan.model_sizes),
        full_sizes=frozenset(plan.full_sizes),
        replay_sizes=frozenset(plan.replay_sizes),
    )
    hands = deal(requests, num_ranks, dealing)
    ranks = [_needs(hand, attrs.evolve(settings, seed=settings.seed + rank), plan) for rank, hand in enumerate(hands)]
    for needs in itertools.zip_longest(*ranks, fillvalue=IDLE):
        run.add(decide(together(needs)), needs, [decide(own) for own in needs])
    return run


def padding_by_ranks(
    requests: Iterable[TraceRequest],
    settings: SchedulerSettings,
    plan: CapturePlan,
    ranks: Sequence[int] = RANKS,
) -> list[RankPadding]:
    """The padding of the workload on each number of ranks, dealt in both ways; for one rank both are the same."""
    requests = tuple(requests)
    runs = (simulate_ranks(requests, settings, plan, count, dealing) for count in ranks for dealing in Dealing)
    return [rank_padding(run) for run in runs]


def rank_padding(run: RankRun) -> RankPadding:
    """The table's line of a run."""
    rank_steps = run.steps * run.num_ranks
    return RankPadding(
        num_ranks=run.num_ranks,
        dealing=run.dealing,
        steps=run.steps,
        replay_steps=run.replay_steps,
        idle_share=run.idle_rank_steps / rank_steps if rank_steps else 0.0,
        joined_share=run.joined_rank_steps / rank_steps if rank_steps else 0.0,
        replay_pad_share=run.replay.pad_share,
        replay_pad_share_alone=run.replay_alone.pad_share,
        token_pad_share=run.tokens.pad_share,
        token_pad_share_alone=run.tokens_alone.pad_share,
    )


def plan_transfer(one: RankRun, many: RankRun, plan: CapturePlan) -> list[PlanTransfer]:
    """How the plan, sizes tuned for one rank and sizes tuned for many do on many ranks; as many graphs each (P8).

    Sizes are tuned for fewest padded rows, with a graph for every replay batch that was seen: a proxy of time that
    needs no measurement. Raises ValueError if a run has no replay batch, or the plan no replay size.
    """
    if not plan.replay_sizes:
        raise ValueError("decoder_replay_cudagraph_capture_sizes is empty: without replay graphs there are no pads")
    graphs = len(plan.replay_sizes)
    choices = {
        "the plan": plan.replay_sizes,
        f"tuned for {one.num_ranks}": fewest_padded_rows(one.rows_agreed, graphs),
        f"tuned for {many.num_ranks}": fewest_padded_rows(many.rows_agreed, graphs),
    }
    return [_transfer(name, sizes, many) for name, sizes in choices.items()]


def fewest_padded_rows(histogram: Counter[int], max_graphs: int) -> tuple[int, ...]:
    """The at most `max_graphs` sizes, one at least, that hold all of the histogram's rows on fewest padded rows (P8).

    Raises ValueError for an empty histogram.
    """
    if not histogram:
        raise ValueError("histogram is empty: no step has a replay batch, so that there is nothing to tune for")
    beyond_any = float(max(histogram) * histogram.total() + 1)  # more than all steps on the largest size
    costs = {rows: float(rows) for rows in histogram}
    return optimal_sizes(histogram, costs, lambda _: beyond_any, max_graphs)[-1].sizes


def _transfer(sizes_of: str, sizes: tuple[int, ...], many: RankRun) -> PlanTransfer:
    """How these sizes do on the agreed steps of `many` ranks."""
    count, eager = RowCount(), 0
    for most, steps in many.rows_agreed.items():
        size, own = smallest_size(sizes, most), many.own_rows_agreed[most]
        count.add(own, own if size is None else size * steps * many.num_ranks)
        eager += steps if size is None else 0
    rank_steps = many.replay_steps * many.num_ranks
    return PlanTransfer(sizes_of, sizes, count.padded_rows / rank_steps, count.pad_share, eager / many.replay_steps)


def _needs(requests: Iterable[TraceRequest], settings: SchedulerSettings, plan: CapturePlan) -> Iterator[StepNeeds]:
    """What each step of one rank asks for."""
    return (step_needs(step.batch, plan) for step in Scheduler(requests, settings).steps())
