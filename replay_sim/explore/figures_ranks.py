"""The figure of several ranks: pads of the replay layers and of the model against the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from replay_sim.explore.theme import LOOKS, Meaning, finish
from replay_sim.workload.rank_simulation import Dealing, RankPadding

LAYERS = (("replay layers", "replay_pad_share"), ("model", "token_pad_share"))
DEALT = {Dealing.ROUND_ROBIN: ("solid", "circle"), Dealing.LEAST_LOAD: ("dash", "square")}


def ranks_figure(rows: Sequence[RankPadding], source: str) -> go.Figure:
    """Pads as a share of padded rows against ranks: as they agree, and as each would pad alone; both ways to deal."""
    figure = make_subplots(
        rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.06, subplot_titles=[name for name, _ in LAYERS]
    )
    for col, (_, share) in enumerate(LAYERS, 1):
        for dealing, (dash, symbol) in DEALT.items():
            dealt = [row for row in rows if row.dealing is dealing]
            for name, key, meaning in (("agreed", share, Meaning.EAGER), ("alone", f"{share}_alone", Meaning.KEPT)):
                figure.add_scatter(
                    x=[row.num_ranks for row in dealt],
                    y=[getattr(row, key) for row in dealt],
                    mode="lines+markers",
                    name=f"{name}, {dealing}",
                    line={"color": LOOKS[meaning].colour, "dash": dash, "width": 2},
                    marker={"symbol": symbol, "size": 7},
                    customdata=[(row.steps, row.replay_steps, row.idle_share, row.joined_share) for row in dealt],
                    hovertemplate="%{x} ranks: %{y:.1%} pads<br>%{customdata[0]:,} steps, %{customdata[1]:,} with a "
                    "replay batch<br>idle %{customdata[2]:.1%}, joined for others %{customdata[3]:.1%}<extra></extra>",
                    showlegend=col == 1,
                    row=1,
                    col=col,
                )
    ticks = sorted({row.num_ranks for row in rows})
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=list(map(str, ticks)), title_text="ranks")
    figure.update_annotations(font={"size": 13})
    figure.update_yaxes(title_text="pads among padded rows", tickformat=".0%", rangemode="tozero", row=1, col=1)
    figure.update_layout(legend={"y": 1.1})
    return finish(figure, finding=_finding(rows), source=source, height=450)


def _finding(rows: Sequence[RankPadding]) -> str:
    shares: dict[int, list[float]] = {}
    for row in rows:
        shares.setdefault(row.num_ranks, []).append(row.replay_pad_share)
    few, many = min(shares), max(shares)
    apart = max(max(of) - min(of) for of in shares.values())
    return (
        f"Taking the largest rank's size, pads of the replay layers grow from {shares[few][0]:.0%} on {few} to "
        f"{shares[many][0]:.0%} on {many} ranks; the ways of dealing differ by at most {100 * apart:.0f} points"
    )
