"""The table of published configs on traces: which configs, one row of it, its file, and the one that is bundled."""

import json
from pathlib import Path

import attrs
import pytest

from replay_sim.config import load_config
from replay_sim.explore.tuning_costs import fitted_costs
from replay_sim.explore.tuning_table import (
    PLANS,
    TuningTable,
    bundled_table,
    published_configs,
    read_table,
    table_frame,
    table_row,
    table_text,
)
from replay_sim.workload.detect import read_trace
from replay_sim.workload.generator import generate_requests
from replay_sim.workload.profiles import load_profile

SHARED = Path(__file__).parents[3] / "shared" / "data"
FEW = [
    {"engine": "vllm", "id": "a", "max_num_seqs": 8, "gpu": "x", "cudagraph_capture_sizes": [8, 64, 512]},
    {"engine": "other", "id": "b", "max_num_seqs": 8},
    {"engine": "vllm", "id": "c", "max_num_seqs": 8, "cudagraph_capture_sizes": [8, 64, 512], "model": None},
    {"engine": "vllm", "id": "d", "max_num_seqs": 9, "decoder_replay_trim_threshold": None},
    {"engine": "vllm", "id": "e", "max_num_seqs": 8, "cudagraph_mode": "FULL_DECODE_ONLY"},
]


@pytest.fixture(scope="module")
def row():
    requests = list(generate_requests(load_profile("conversation"), 60, seed=3))
    return table_row(load_config("b200-tp4-c32"), ["one", "two"], "drawn", requests)


def test_configs_of_the_engine_are_taken_once_where_they_are_alike(tmp_path: Path) -> None:
    """A null is a setting that the source does not set, the threshold's among them; e has nothing to tune."""
    path = tmp_path / "configs.json"
    path.write_text(json.dumps({"configs": FEW}))
    found = published_configs(path)
    assert list(found.values()) == [["a", "c"], ["d"]]
    first, second = found
    assert first.max_num_seqs == 8 and first.cudagraph_capture_sizes == (8, 64, 512)
    assert second.decoder_replay_trim_threshold == 768


def test_a_row_holds_all_plans_on_both_halves_and_tuned_is_never_worse_where_it_was_tuned(row) -> None:
    """Issue 6, point 4."""
    assert (row.config, row.alike, row.has_own_list, row.trace) == ("one", 2, True, "drawn")
    assert row.steps > row.mixed_steps > 0
    assert row.tuned.seen_step_ms <= min(row.own.seen_step_ms, row.default.seen_step_ms)
    assert row.gain("own", "seen") == 1 - row.tuned.seen_step_ms / row.own.seen_step_ms >= 0
    assert row.gain("default", "unseen") == 1 - row.tuned.unseen_step_ms / row.default.unseen_step_ms
    for plan in (row.default, row.own, row.tuned):
        assert plan.unseen_mixed_step_ms > 0 and plan.seen_padded_rows and plan.unseen_padded_rows


def test_a_table_survives_its_file_and_has_a_frame(row) -> None:
    table = TuningTable(source="modelled", configs="configs.json", traces=("drawn",), rows=(row, row))
    assert read_table(table_text(table)) == table
    frame = table_frame(table)
    assert len(frame) == 2 and frame["ms own"][0] == round(row.own.unseen_step_ms, 3)
    assert frame["gain unseen"][0] == f"{row.gain('own', 'unseen'):.2%}" and frame["rows tuned"][1]


def test_the_bundled_table_is_of_the_bundled_model_and_keeps_the_guarantee() -> None:
    """Issue 6, point 4: made anew by `python -m replay_sim.explore.tuning_table` when the model changes."""
    table = bundled_table()
    assert table.source == fitted_costs(load_config("default")).source
    assert len(table.rows) >= 80 and len(table.traces) == 3
    for row in table.rows:
        for other in (row.default, row.own):
            assert row.tuned.seen_step_ms <= other.seen_step_ms
        assert row.tuned.num_replay_graphs <= max(row.default.num_replay_graphs, row.own.num_replay_graphs)
        assert row.tuned.num_model_graphs <= row.own.num_model_graphs


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published configs and traces are not here")
def test_a_row_of_the_bundled_table_is_made_again() -> None:
    """One config without and with a list of its own; every config of the file is in the table, on every trace."""
    published, table = published_configs(SHARED / "configs.json"), bundled_table()
    assert {(row.config, row.trace) for row in table.rows} == {
        (ids[0], trace) for ids in published.values() for trace in table.traces
    }
    kept = next(row for row in table.rows if row.has_own_list and row.trace.startswith("mooncake"))
    (config,) = (config for config, ids in published.items() if ids[0] == kept.config)
    made = table_row(config, published[config], kept.trace, read_trace(SHARED / "traces" / kept.trace))
    assert attrs.asdict(made, recurse=False).keys() == attrs.asdict(kept, recurse=False).keys()
    for plan in PLANS:
        assert attrs.astuple(getattr(made, plan)) == pytest.approx(attrs.astuple(getattr(kept, plan)), rel=1e-4)
