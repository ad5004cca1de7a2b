"""The report's speedup: measured arms against replay off, the published table beside, and the config's own prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from replay_sim.explore.arms import ARM_LOOKS
from replay_sim.explore.evidence import BASE, DRAWN_KEYS, Evidence, PromptTimes
from replay_sim.explore.figures_speedup import published_figure, relative_figure
from replay_sim.explore.published import TTFT_SOURCE, ttft_table
from replay_sim.explore.report_parts import Drawing, Heading, Part, Section, Table, Words, frame_table, sentence
from replay_sim.explore.speedup_cells import Cell, CellKind
from replay_sim.explore.step_tables import experts_sweep, measured_table, model_error_table, percent_table, source_of
from replay_sim.explore.tuning_score import Dispatched

COMPARED = (BASE, "eager_replay", "piecewise_replay_graphs")
"""The arms without which a run is not compared."""
PUBLISHED_GPU = "NVIDIA H200"
"""The GPU whose name the figure of published times gives to ours."""


def speedup_section(found: Evidence) -> Section:
    """What was measured, what it means for prompts of this config, and what others published."""
    experts = found.job.shape.num_local_experts
    return Section(
        "speedup",
        "Speedup",
        [
            Words(
                "One prompt in one step, the same arms side by side in one run. Replay off, eager, is 100 %. Ratios "
                "within a run travel to other machines; milliseconds stand for the GPU that is named."
            ),
            *(Words(limit) for limit in found.limits),
            *(Words(sentence(left_out), is_source=True) for left_out in found.left_out),
            *_measured(found, experts),
            *_own_prompts(found, experts),
            *_errors(found),
        ],
    )


def _measured(found: Evidence, experts: int) -> Iterator[Part]:
    """Bars and table of the measured steps, and the published times beside them."""
    steps = _table(found, "steps")
    compared = {count: run for count in sorted(set(steps.num_local_experts)) if (run := _run(steps, count)) is not None}
    if not compared:
        yield Words("No record has one prompt at several lengths in all arms, so no measured arm is drawn.")
        return
    count = experts if experts in compared else min(compared)
    run = compared[count]
    window = ", ".join(f"{value:,}" for value in sorted(set(run.window)))
    about = f"With {count} experts a rank"
    yield Drawing("speedup", relative_figure(run, "step_us", "num_tokens", about, source_of(run)))
    title = f"Step time in % of replay off, eager: window {window}, {count} experts a rank"
    yield frame_table(title, _named(percent_table(run, "step_us", "num_tokens", BASE)))
    yield Words(sentence(source_of(run)), is_source=True)
    if found.gpu == PUBLISHED_GPU:
        yield from _published(found, {number: compared[number] for number in sorted({min(compared), count})})


def _published(found: Evidence, runs: Mapping[int, pd.DataFrame]) -> Iterator[Part]:
    """Our runs, by experts, and whole prefills beside the published times."""
    prefills = _longest_run(_table(found, "prefill"))
    sweep = pd.concat(runs.values())
    names = {*sweep.record, *prefills.record}
    where = "; ".join(sorted({one.provenance for name, one in found.drawn if name in names}))
    source = f"{where}; {', '.join(sorted(names))}"
    yield Heading("What others published")
    yield Drawing("published", published_figure(sweep, prefills, tuple(runs), source))
    table = ttft_table().rename(columns=lambda name: name.replace("_", " "))
    yield frame_table("Published: milliseconds to the first token, and % of replay off", table)
    yield Words(sentence(f"published: {TTFT_SOURCE}"), is_source=True)


def _own_prompts(found: Evidence, experts: int) -> Iterator[Part]:
    """The config's own replay arm for prompts that one of its steps holds."""
    config = found.job.config
    yield Heading("Prompts of this config")
    if not found.prompts:
        yield Words(
            f"No prompt that is shown exceeds the window, {config.window:,}, within the token budget, "
            f"{config.max_num_batched_tokens:,}: there is nothing to trim in a step of one."
        )
        return
    header = ["Prompt tokens", "Replay ms", "Replay off, eager, ms", "Replay in % of it"]
    if found.prompts[0].graphs is not None:
        header += ["Replay off, graphs, ms", "Replay in % of it"]
    label = ARM_LOOKS[found.arm].label
    title = f"“{label}” at window {config.window:,}, {experts} experts a rank, one prompt a step"
    yield Table(title, [*header, "This config runs it", "Source"], [_prompt_row(one) for one in found.prompts])
    yield Words(sentence(_where(found)), is_source=True)


def _where(found: Evidence) -> str:
    """The caption of the table of prompts."""
    kinds = {cell.kind for one in found.prompts for cell in (one.eager, one.graphs) if cell}
    parts = []
    if CellKind.MEASURED in kinds:
        measured = "; ".join(sorted({one.provenance for _, one in found.drawn}))
        parts.append(f"the cells said to be measured were {measured}")
    if kinds - {CellKind.MEASURED}:
        parts.append(f"the others are {found.model_source}" if parts else found.model_source)
    return "; ".join(parts)


def _prompt_row(one: PromptTimes) -> list[str]:
    row = [f"{one.tokens:,}", _ms(one.eager.arm_us), *_against(one.eager)]
    return [*row, *(_against(one.graphs) if one.graphs else ()), _ran(one.ran), one.eager.source]


def _ran(ran: Dispatched) -> str:
    """The graphs in which the config runs a step."""
    model = "eagerly" if ran.mode == "NONE" else f"in a {ran.mode} graph of {ran.padded_tokens:,}"
    if not ran.padded_rows:
        return f"{model}, without replay"
    return f"{model}, replay {f'in a graph of {ran.padded_rows:,}' if ran.in_graph else 'eager'}"


def _against(cell: Cell) -> tuple[str, str]:
    return _ms(cell.base_us), "–" if cell.ratio is None else f"{cell.ratio:.1%}"


def _ms(us: float | None) -> str:
    return "–" if us is None else f"{us / 1e3:,.2f}"


def _errors(found: Evidence) -> Iterator[Part]:
    """How wrong the model is."""
    yield Heading("How wrong the step-time model is")
    if found.model is None:
        yield Words("No step-time model is bundled: what was not measured has no number.")
        return
    title = (
        "Absolute error of step time on held-out points by arm, and on all steps that the host bounds, fitted ones too"
    )
    yield frame_table(title, model_error_table(found.model))
    yield Words(sentence(found.model_source), is_source=True)


def _run(steps: pd.DataFrame, experts: int) -> pd.DataFrame | None:
    """The steps of one prompt at several lengths with so many experts, of one record; None without COMPARED in it."""
    sweep = experts_sweep(steps, experts)
    for name in sorted(set(sweep.record)):
        run = sweep[sweep.record == name].drop_duplicates(["arm", "num_tokens"])
        lengths = [set(run[run["arm"] == arm].num_tokens) for arm in COMPARED]
        if set.intersection(*lengths):
            kept = run[run.num_tokens.isin(lengths[0])]
            kept.attrs = steps.attrs
            return kept
    return None


def _longest_run(prefills: pd.DataFrame) -> pd.DataFrame:
    """The prefills of one record and token budget, those of most lengths; equal prompts once."""
    groups = prefills.groupby(["record", "max_num_batched_tokens"])
    if not len(groups):
        return prefills
    _, longest = max(groups, key=lambda group: group[1].prompt_tokens.nunique())
    return longest.drop_duplicates(["arm", "num_local_experts", "prompt_tokens"])


def _table(found: Evidence, kind: str) -> pd.DataFrame:
    """The drawn points of a kind; without any an empty table of the same columns."""
    if any(one.kind == kind for _, one in found.drawn):
        return measured_table(found.drawn, kind, found.gpu)
    keys = {key for kind_keys in DRAWN_KEYS.values() for key in kind_keys}
    return pd.DataFrame(columns=sorted({*keys, "record"}))


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """With the arms in words and the tokens named."""
    named = table.rename(columns={arm: look.label for arm, look in ARM_LOOKS.items()})
    return named.rename_axis("prompt tokens").rename_axis(None, axis="columns")
