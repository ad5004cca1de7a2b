"""Figures of measured speedup: bars against replay off, the published table beside ours, and where the time goes."""

from __future__ import annotations

import textwrap

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from replay_sim.explore.arms import ARM_LOOKS
from replay_sim.explore.published import CALLS_SOURCE, TTFT_SOURCE, ttft_table
from replay_sim.explore.step_tables import relative
from replay_sim.explore.theme import FAINT, INK, Meaning, finish, line, marker

PAGE_TOKENS = "tokens of the prompt"
PARALLEL = {"TP4": ("solid", "triangle-up"), "DEP2": ("dash", "triangle-down")}


def relative_figure(
    table: pd.DataFrame, time: str, by: str, subject: str, source: str, base: str = "eager_off"
) -> go.Figure:
    """Bars of every arm's median `time` in % of the base arm's at each `by`, with p10 to p90.

    `table` has arm, `by`, `time`, p10, p90, host_us, launch_us and n of one run; the title opens with the `subject`.
    """
    compared = relative(table, time, by, base)
    figure = go.Figure()
    for arm, look in ARM_LOOKS.items():
        bars = compared[compared["arm"] == arm].sort_values(by)
        if bars.empty:
            continue
        figure.add_bar(
            x=[f"{value:,}" for value in bars[by]],
            y=bars.percent.round(2).tolist(),
            error_y={
                "type": "data",
                "symmetric": False,
                "array": (bars.high - bars.percent).clip(lower=0).round(2).tolist(),
                "arrayminus": (bars.percent - bars.low).clip(lower=0).round(2).tolist(),
                "color": INK,
                "thickness": 1.2,
                "width": 2,
            },
            name=look.label,
            marker=marker(look.meaning),
            customdata=bars[[time, "p10", "p90", "n", "host_us", "launch_us"]]
            .div([1e3] * 3 + [1] + [1e3] + [1])
            .values,
            hovertemplate=f"{look.label}, %{{x}} tokens<br><b>%{{y:.1f}} %</b>: %{{customdata[0]:,.1f}} ms, p10 to "
            "p90 %{customdata[1]:,.1f} to %{customdata[2]:,.1f} ms of %{customdata[3]} runs<br>host "
            "%{customdata[4]:,.1f} ms, where one small launch cost %{customdata[5]:.1f} µs just before<extra></extra>",
        )
    figure.add_hline(y=100, line={"color": FAINT, "width": 1.2, "dash": "dot"})
    figure.update_layout(barmode="group", bargap=0.2, bargroupgap=0.05)
    figure.update_xaxes(title_text=PAGE_TOKENS, type="category", showgrid=False)
    figure.update_yaxes(title_text=f"% of “{ARM_LOOKS[base].label}”", rangemode="tozero")
    finding = _bars_finding(compared, by, subject)
    return finish(figure, finding=finding, source=source, height=480)


def _bars_finding(compared: pd.DataFrame, by: str, subject: str) -> str:
    """Where eager replay is worst and best, and replay graphs, or FULL graphs of decodes, in % of the base arm."""
    parts = []
    named = {
        "eager_replay": "eager replay",
        "piecewise_replay_graphs": "graphs and replay graphs",
        "full": "FULL graphs",
    }
    for arm, name in named.items():
        of_arm = compared[compared["arm"] == arm].set_index(by).percent
        if of_arm.empty:
            continue
        worst, best = of_arm.idxmax(), of_arm.idxmin()
        parts.append(f"{name} {of_arm[worst]:.0f}% at {worst:,} tokens and {of_arm[best]:.0f}% at {best:,}")
    return f"{subject}, of replay off's time: {'; '.join(parts)}"


def published_figure(steps: pd.DataFrame, prefills: pd.DataFrame, experts: tuple[int, ...], source: str) -> go.Figure:
    """Replay eager and replay in graphs in % of replay off by prompt tokens: the published table, and ours.

    Left replay eager, right replay in graphs. Ours are steps of the experts sweep for each of `experts`, and prefills.
    """
    panels = (
        ("eager_replay", "replay_eager, %", "replay eager"),
        ("piecewise_replay_graphs", "replay_graphs, %", "graphs"),
    )
    figure = make_subplots(
        rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=[p[2] for p in panels]
    )
    published = ttft_table()
    for column, (arm, key, _) in enumerate(panels, 1):
        for parallelism, (dash, symbol) in PARALLEL.items():
            rows = published[published.parallelism == parallelism]
            figure.add_scatter(
                x=rows.prompt_tokens.tolist(),
                y=rows[key].tolist(),
                name=f"published, GB200 {parallelism}",
                legendgroup=parallelism,
                showlegend=column == 1,
                mode="lines+markers",
                line={"color": FAINT, "width": 2, "dash": dash},
                marker={"symbol": symbol, "size": 8},
                hovertemplate=f"GB200 {parallelism}, %{{x:,}} tokens: %{{y:.1f}} % of replay off<extra></extra>",
                row=1,
                col=column,
            )
        for number, count in enumerate(experts):
            _add_ours(figure, steps, prefills, arm, count, number, column)
        figure.add_hline(y=100, line={"color": FAINT, "width": 1.2, "dash": "dot"}, row=1, col=column)
    ticks = [256, 1024, 4096, 16384, 65536]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{t:,}" for t in ticks], title_text="prompt tokens")
    figure.update_yaxes(title_text="% of replay off", rangemode="tozero", row=1, col=1)
    for note in figure.layout.annotations:
        note.update(y=1.0, yanchor="bottom", font={"size": 13})
    figure.update_layout(legend={"y": 1.08})
    return finish(figure, finding=_published_finding(figure), source=f"{source}. Published: {TTFT_SOURCE}", height=480)


def _published_finding(figure: go.Figure) -> str:
    """The range of both panels, published and ours, in % of replay off."""

    def span(axis: str, *, ours: bool) -> str:
        values = [y for trace in figure.data if trace.xaxis == axis and ours is _is_ours(trace) for y in trace.y]
        return f"{min(values):.0f} to {max(values):.0f}%"

    return (
        f"Eager replay takes {span('x', ours=False)} of replay off's time as published, {span('x', ours=True)} here; "
        f"replay in graphs {span('x2', ours=False)} as published, {span('x2', ours=True)} here"
    )


def _is_ours(trace: go.Scatter) -> bool:
    return str(trace.name).startswith("ours")


def _add_ours(
    figure: go.Figure, steps: pd.DataFrame, prefills: pd.DataFrame, arm: str, experts: int, number: int, column: int
) -> None:
    """One curve of ours: steps up to the token budget, then prefills of the same experts beyond it."""
    mine = steps[steps["num_local_experts"] == experts]
    points = relative(mine, "step_us", "num_tokens", "eager_off")
    points = points[points["arm"] == arm].rename(columns={"num_tokens": "prompt_tokens"})
    longer = prefills[(prefills["num_local_experts"] == experts) & (prefills["num_steps"] > 1)]
    if not longer.empty:
        more = relative(longer, "prefill_us", "prompt_tokens", "eager_off")
        points = pd.concat([points, more[more["arm"] == arm]])
    points = points.sort_values("prompt_tokens")
    look = ARM_LOOKS[arm]
    figure.add_scatter(
        x=points.prompt_tokens.tolist(),
        y=points.percent.round(2).tolist(),
        name=f"ours, H200, {experts} experts: {look.label}",
        mode="lines+markers",
        line=line(look.meaning, dash=("solid", "dash", "dot")[number]),
        marker={"symbol": ("square", "square-open", "x")[number], "size": 8},
        hovertemplate=f"{experts} experts, %{{x:,}} tokens: %{{y:.1f}} % of replay off<extra>{look.label}</extra>",
        row=1,
        col=column,
    )


def time_figure(steps: pd.DataFrame, tokens: int, experts: tuple[int, int], source: str) -> go.Figure:
    """Of one step length, by arm: how long the device was busy and idle, and how long the host took; for two ranks."""
    figure = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.07,
        subplot_titles=[f"{count} experts a rank" for count in experts],
    )
    for column, count in enumerate(experts, 1):
        at = steps[(steps["num_local_experts"] == count) & (steps["num_tokens"] == tokens)].dropna(subset="device_us")
        names = ["<br>".join(textwrap.wrap(ARM_LOOKS[arm].label, 8)) for arm in at["arm"]]
        busy = (at.device_us.clip(upper=at.step_us) / 1e3).round(3)
        idle = ((at.step_us - at.device_us).clip(lower=0) / 1e3).round(3)
        shown = {"showlegend": column == 1, "row": 1, "col": column}
        hover = "%{x}<br>%{y:.2f} ms<extra></extra>"
        figure.add_bar(
            x=names, y=busy, name="device busy", marker=marker(Meaning.MODEL_GRAPH), hovertemplate=hover, **shown
        )
        figure.add_bar(x=names, y=idle, name="device idle", marker=marker(Meaning.PAD), hovertemplate=hover, **shown)
        figure.add_scatter(
            x=names,
            y=(at.host_us / 1e3).round(3),
            name="the call returned (host)",
            mode="markers",
            marker={"symbol": "diamond", "size": 11, "color": "#E58A2B", "line": {"color": INK, "width": 1}},
            customdata=at[["graph_launches", "kernel_launches", "launch_us"]].values,
            hovertemplate="%{x}<br>host %{y:.2f} ms: %{customdata[0]} graph and %{customdata[1]} kernel "
            "launches<br>one small launch cost %{customdata[2]:.1f} µs just before<extra></extra>",
            **shown,
        )
    figure.update_layout(barmode="stack", bargap=0.3, legend={"y": 1.09, "traceorder": "normal"})
    figure.update_xaxes(showgrid=False, tickangle=0, tickfont={"size": 10})
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="milliseconds of a step", row=1, col=1)
    for note in figure.layout.annotations:
        note.update(y=1.0, yanchor="bottom", font={"size": 13})
    return finish(figure, finding=_time_finding(steps, tokens, experts), source=source, height=520, below=80)


def _time_finding(steps: pd.DataFrame, tokens: int, experts: tuple[int, int]) -> str:
    def idle(count: int, arm: str) -> float:
        at = steps[(steps["num_local_experts"] == count) & (steps["num_tokens"] == tokens) & (steps["arm"] == arm)]
        return float(at.idle_share.iloc[0])

    few, many = experts
    return (
        f"At {tokens:,} tokens eager replay leaves the device idle for {idle(few, 'eager_replay'):.0%} of a step with "
        f"{few} experts and {idle(many, 'eager_replay'):.0%} with {many}; replay graphs bring it to "
        f"{idle(few, 'piecewise_replay_graphs'):.0%} and {idle(many, 'piecewise_replay_graphs'):.0%}"
    )


def calls_figure(table: pd.DataFrame, source: str) -> go.Figure:
    """How many times longer a call on 8,192 rows takes than one on 128: ours beside the published."""
    figure = go.Figure()
    columns = (("ratio", "ours, H200", Meaning.KEPT), ("published H100 ratio", "published, H100", Meaning.TRIMMED))
    for column, name, meaning in columns:
        figure.add_bar(
            x=["<br>".join(textwrap.wrap(call, 12)) for call in table.index],
            y=table[column].tolist(),
            name=name,
            marker=marker(meaning),
            text=[f"{value:.1f}" for value in table[column]],
            textposition="outside",
            hovertemplate=f"{name}, %{{x}}<br>8,192 rows take %{{y:.1f}} times as long as 128<extra></extra>",
        )
    figure.update_layout(barmode="group", bargap=0.3)
    figure.update_xaxes(showgrid=False, tickangle=0, tickfont={"size": 11})
    figure.update_yaxes(
        title_text="times longer on 8,192 rows", type="log", range=[0, 1.9], tickvals=[1, 2, 5, 10, 20, 50]
    )
    attention, experts = table.loc["attention"], table.loc["expert gate and up"]
    finding = (
        f"Trimming 8,192 rows to 128 makes attention {attention['ratio']:.0f}× and dense products up to "
        f"{table['ratio'].drop('attention').max():.0f}× shorter, expert products {experts['ratio']:.1f}×: they "
        "read the same weights"
    )
    return finish(figure, finding=finding, source=f"{source}. Published: {CALLS_SOURCE}", height=430, below=64)
