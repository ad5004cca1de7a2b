"""The README's numbers are those of the bundled records."""

import re
from pathlib import Path

import attrs

from replay_sim.config import load_config
from replay_sim.config.shapes import FLASH_RANK
from replay_sim.explore.step_tables import PREFILL_SWEEPS
from replay_sim.measure.records import bundled_records
from replay_sim.measure.step_model import HOST_BOUND, HOST_SHARE, bundled_model
from replay_sim.measure.step_report import roofline_shares
from replay_sim.measure.step_sweeps import STEP_SWEEPS
from replay_sim.measure.trim_model import modelled_crossings
from replay_sim.plan import make_plan

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
RECORDS = dict(bundled_records())
MIB = 1 << 20


def row(*starts: str) -> list[str]:
    """The cells of the README's only table row that begins with these cells."""
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in README.splitlines() if "|" in line]
    (found,) = (cells for cells in rows if cells[: len(starts)] == list(starts))
    return found


def pool(arrangement: str, order: str, group: str) -> dict:
    (point,) = (
        point
        for point in RECORDS["pool-default-nvidia-h200.json"].points
        if (point["arrangement"], point["order"], point["outputs"], point["group"])
        == (arrangement, order, "dropped", group)
    )
    return point


def test_the_table_is_that_of_the_records() -> None:
    """A segment before each break and one after the last: attention, or KV write and replay behind the cut."""
    plan, layers, cut = make_plan(load_config("default")), FLASH_RANK.num_layers, FLASH_RANK.cut
    breaking = len(plan.breaking_sizes)
    whole = len(plan.model_sizes) - breaking
    segments = {
        "model": len(plan.full_sizes) + whole * (layers + 1) + breaking * (cut + 2),
        "replay": len(plan.replay_sizes) * (layers - cut + 1),
    }
    for cells, point in (
        (row("model", "largest first"), pool("shared", "largest_first", "model")),
        (row("model", "smallest first"), pool("shared", "smallest_first", "model")),
        (row("replay", "in the model graphs' pool and stream"), pool("shared", "largest_first", "replay")),
        (row("replay", "in their pool, on a stream of their own"), pool("own_stream", "largest_first", "replay")),
    ):
        assert cells[2:] == [
            str(point["num_graphs"]),
            str(segments[point["group"]]),
            f"{point['seconds']:.1f}",
            f"{point['reserved_bytes'] / MIB:,.0f}",
            f"{point['predicted_bytes'] / MIB:,.0f}",
        ]


def test_the_drivers_share_is_what_no_reserved_byte_explains() -> None:
    """O5: reserved and driver memory."""
    points = RECORDS["pool-default-nvidia-h200.json"].points
    shares = {
        (model["driver_bytes"] - sum(p["reserved_bytes"] + p["plain_bytes"] for p in (model, replay))) / MIB
        for model, replay in zip(points[::2], points[1::2], strict=True)
    }
    assert {f"{share:,.0f}" for share in shares} == set(re.findall(r"(\d+) MiB that the driver takes", README))


def test_the_regions_host_times_are_those_of_its_record() -> None:
    points = RECORDS["region-flash-rank-nvidia-h200.json"].points
    one, breakable = ([p for p in points if p["form"] == form] for form in ("one_launch", "breakable"))
    spans = [
        f"{min(values):,.0f} to {max(values):,.0f}"
        for values in ([p["host_us"] for p in one], [p["host_p10"] for p in one], [p["host_us"] for p in breakable])
    ]
    rows = f"{min(p['rows'] for p in one)} to {max(p['rows'] for p in one):,} rows"
    assert {p["n"] for p in points} == {int(count) for count in re.findall(r"medians of (\d+) steps: for", README)}
    (found,) = re.findall(
        r"for (\d+) layers and ([\d, to]+ rows) the region then takes the host ([\d, to]+) µs "
        r"\(([\d, to]+) at the 10th percentile\) where the breakable form takes ([\d, to]+), and",
        " ".join(README.split()),
    )
    assert found == (str(one[0]["num_replay_layers"]), rows, *spans)


def test_what_one_launch_is_worth_in_a_step_is_that_of_the_records() -> None:
    """Steps of one batch in both forms of replay graphs, paired in the order in which they were measured."""
    ratios = []
    for name, record in RECORDS.items():
        if record.kind == "steps":
            breakable, one = (
                [point for point in record.points if point["arm"] == arm]
                for arm in ("piecewise_replay_graphs", "piecewise_replay_one_launch")
            )
            for p, q in zip(breakable, one, strict=True):
                assert all(p[key] == q[key] for key in ("num_tokens", "num_reqs", "window", "computed")), name
                ratios.append(p["step_us"] / q["step_us"])
    said = re.search(r"took ([\d.]+) to ([\d.]+) times as long as one in one launch \((\d+) pairs, ([\d.]+) in", README)
    assert said and said.groups() == (
        f"{min(ratios):.2f}", f"{max(ratios):.2f}", str(len(ratios)), f"{sorted(ratios)[len(ratios) // 2]:.3f}"
    )  # fmt: skip
    capture = RECORDS["capture-default-nvidia-h200.json"]
    buffers = [f"{int(str(capture.settings[f'{kind}_buffer_bytes'])) / MIB:.0f}" for kind in ("static", "break")]
    assert re.findall(r"(\d+) MiB of input and (\d+) MiB of break buffers", README) == [tuple(buffers)]
    _, replay = capture.points
    found = re.search(r"are (\d+) segments, ([\d.]+) s and (\d+) MiB\.", README)
    assert found and found.groups() == (
        str(replay["num_segments"]), f"{replay['seconds']:.1f}", str(replay["reserved_bytes"] // MIB)
    )  # fmt: skip


def test_the_error_of_the_prediction_is_said_as_it_is() -> None:
    pools = [record for record in RECORDS.values() if record.kind == "pool"]
    largest = max(
        abs(point["predicted_bytes"] / point["reserved_bytes"] - 1)
        for record in pools
        for point in record.points
        if point["reserved_bytes"]
    )
    (said,) = re.findall(r"within ([\d.]+) % of the (\d+) plans measured", README)
    assert said == (f"{largest * 100:.1f}", str(len({point["plan"] for record in pools for point in record.points})))


def test_the_environment_named_is_the_records() -> None:
    environment = RECORDS["pool-default-nvidia-h200.json"].environment
    for key in ("gpu", "driver", "torch", "date"):
        assert str(environment[key]) in README


ERROR_ROWS = {
    "eager, replay off": "eager_off",
    "eager, replay": "eager_replay",
    "graphs, replay off": "piecewise_off",
    "graphs, replay eager": "piecewise_replay_eager",
    "graphs, replay in graphs": "piecewise_replay_graphs",
    "graphs, replay in one launch": "piecewise_replay_one_launch",
    "FULL graphs, decodes": "full",
}
STEPS = [p for r in RECORDS.values() if r.kind == "steps" and r.environment["gpu"] for p in r.points]
ENDS = ((min, "ratio_min"), (max, "ratio_max"))
TEXT = " ".join(README.split())


def said(pattern: str) -> tuple[str, ...]:
    """The groups of the only place in the README that matches."""
    (found,) = re.findall(pattern, TEXT)
    return found if isinstance(found, tuple) else (found,)


def test_the_models_errors_are_those_of_its_file() -> None:
    """Which tests/measure/test_step_model_fitted.py recomputes from the records."""
    model = bundled_model()
    assert ERROR_ROWS.keys() == {cells[0] for cells in (row(name) for name in ERROR_ROWS)}
    for name, arm in ERROR_ROWS.items():
        error = model.errors[arm]
        assert row(name)[1:] == [str(error.n), f"{100 * error.median:.1f} %", f"{100 * error.p95:.1f} %"]
    held = sum(bool(point["held_out"]) for point in STEPS)
    assert said(r"fitted to (\d+) steps of one H200 and judged by (\d+) more") == (str(len(STEPS) - held), str(held))
    bound = [point for point in STEPS if point["host_us"] >= HOST_SHARE * point["step_us"]]
    error = model.errors[HOST_BOUND]
    assert said(r"Of the (\d+) steps that the host bounds (\d+) were held out; the model is off by ([\d.]+) %") == (
        str(error.n),
        str(sum(bool(point["held_out"]) for point in bound)),
        f"{100 * error.median:.1f}",
    )
    assert said(r"\(median; ([\d.]+) % at the 95th percentile\)") == (f"{100 * error.p95:.1f}",)


def test_how_far_runs_repeat_is_that_of_the_records() -> None:
    points = [point for record in RECORDS.values() if record.kind == "repeat" for point in record.points]
    assert {point["sweep"] for point in points} >= {*STEP_SWEEPS, "layers", "plans"}, "every sweep, as it says"
    points = [point for point in points if point["of"] == "steps" and point["sweep"] in PREFILL_SWEEPS]
    graphs = [p for p in points if p["arm"].startswith("piecewise") and p["arm"] != "piecewise_replay_eager"]
    eager = [p for p in points if p["arm"].startswith("eager")]
    ends = [f"{end(p[key] for p in of):.2f}" for of in (graphs, eager) for end, key in ENDS]
    assert said(r"took ([\d.]+) to ([\d.]+) times as long in graphs, and ([\d.]+) to ([\d.]+) times") == tuple(ends)


def test_the_threshold_and_the_roofline_are_those_of_the_model_and_the_records() -> None:
    shape = attrs.evolve(FLASH_RANK, num_local_experts=8)
    found = modelled_crossings(bundled_model(), shape, "eager_replay", range(160, 8193, 64), (5.5, 9.0))
    pattern = r"pays from ([\d,]+) tokens on where a launch costs 5.5 µs, and from ([\d,]+) where it costs 9"
    assert said(pattern) == tuple(f"{50 * round(count / 50):,}" for count in found)
    prefills = [point for point in STEPS if point["sweep"] != "decode"]
    times = [1 / share.median for (_, experts), share in roofline_shares(prefills).items() if experts == 48]
    full = roofline_shares(STEPS)["full", 48].median
    pattern = r"Prefills take ([\d.]+) to ([\d.]+) times their roofline .*, decodes in FULL graphs ([\d.]+) times"
    assert said(pattern) == (f"{min(times):.1f}", f"{max(times):.1f}", f"{1 / full:.1f}")


def test_what_it_names_to_add_a_model_or_an_arm_is_there() -> None:
    """Files, and names in them, of the section on additions."""
    section = README[README.index("## Add a model, or an arm") : README.index("## Inside")]
    root = Path(__file__).resolve().parents[1]
    files = set(re.findall(r"`(replay_sim/[\w/]+\.py)`", section))
    assert len(files) == 5 and all((root / name).is_file() for name in files)
    code = "".join((root / name).read_text() for name in files | {"replay_sim/measure/step_model.py"})
    for name in ("DecoderShape", "SHAPES", "ReplaySpec", "run_layers", "write_batch_kv", "ARMS", "def arm_of"):
        assert name in code and name.removeprefix("def ") in section
    assert code.count("eager_break"), "what the layers run through"


def test_every_notebook_is_in_the_table_and_every_command_too() -> None:
    root = Path(__file__).resolve().parents[1]
    linked = re.findall(r"\]\((notebooks/[\w.]+\.ipynb)\)", README)
    assert linked == sorted(f"notebooks/{path.name}" for path in (root / "notebooks").glob("*.ipynb"))
    commands = {path.stem for path in (root / "replay_sim" / "commands").glob("[a-z]*.py")}
    assert commands == set(re.findall(r"^  \| `(\w+)", README, re.MULTILINE))
