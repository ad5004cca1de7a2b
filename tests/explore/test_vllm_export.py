"""The export to vLLM: its rules said again, over many configs and workloads (issue 6, 5)."""

import json
import shlex
from pathlib import Path

import pytest
from explore.tuning_cases import PlainCosts, drawn_steps

from replay_sim.config import ServingConfig, load_config
from replay_sim.config.loading import config_from_mapping
from replay_sim.config.presets import preset_names
from replay_sim.explore.tuning import tune
from replay_sim.explore.vllm_export import compilation_json, emit_text, serve_line, sweep_parameters
from replay_sim.plan import make_plan

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "configs.json"
KEYS = (
    "window max_num_seqs max_num_batched_tokens max_cudagraph_capture_size cudagraph_capture_sizes cudagraph_mode "
    "num_speculative_tokens decoder_replay_cudagraph_capture_sizes max_model_len model"
).split()


def published_configs() -> list[ServingConfig]:
    """Every preset, and the published configs of that engine where they are at hand."""
    configs = [load_config(name) for name in preset_names()]
    if PUBLISHED.is_file():
        listed = json.loads(PUBLISHED.read_text())["configs"]
        for one in listed:
            if one["engine"] == "vllm":
                configs.append(config_from_mapping({key: one[key] for key in KEYS if one.get(key) is not None}))
    return list(dict.fromkeys(configs))


def check_rules(settings: dict, budget: int, window: int) -> None:
    """What the engine demands, in words of its own error messages."""
    for name in ("cudagraph_capture_sizes", "decoder_replay_cudagraph_capture_sizes"):
        sizes = settings.get(name)
        if sizes is not None:
            assert sizes, "an empty list means the default rule"
            assert all(isinstance(size, int) and size > 0 for size in sizes)
            assert sizes == sorted(set(sizes)) and sizes[-1] <= budget
    assert settings["max_cudagraph_capture_size"] == max(settings["cudagraph_capture_sizes"])
    assert settings["decoder_replay_trim_threshold"] > window


TUNABLE = [config for config in published_configs() if "PIECEWISE" in config.cudagraph_mode]


@pytest.mark.parametrize("config", TUNABLE, ids=lambda config: f"{config.max_num_seqs}")
def test_every_tuned_config_satisfies_the_engines_rules(config: ServingConfig) -> None:
    """Issue 6, 5: positive, sorted, unique, within the budget; the maximum the largest, threshold above the window."""
    tuning = tune(config, drawn_steps(config, 5, count=40), None, PlainCosts())
    tuned = tuning.tuned.config
    text = compilation_json(tuned)
    assert " " not in text
    settings = json.loads(text)
    check_rules(settings, config.max_num_batched_tokens, config.window)
    assert tuple(settings.get("decoder_replay_cudagraph_capture_sizes", ())) == (
        tuned.decoder_replay_cudagraph_capture_sizes or ()
    )
    words = shlex.split(serve_line(tuned))
    assert words[:3] == ["vllm", "serve", config.model]
    assert words[words.index("--max-num-batched-tokens") + 1] == str(config.max_num_batched_tokens)
    rest = json.loads(words[words.index("--compilation-config") + 1])
    assert "cudagraph_capture_sizes" not in rest, "given as a flag, and the engine takes it once"


def full_sizes_of(settings: dict, config: ServingConfig) -> list[int]:
    """The FULL graphs that the engine makes of listed sizes: rounded up, and no wider than all requests decode."""
    length = config.num_speculative_tokens + 1
    rounded = {(size + length - 1) // length * length for size in settings["cudagraph_capture_sizes"]}
    return sorted(size for size in rounded if size <= min(config.max_num_seqs * length, config.max_num_batched_tokens))


@pytest.mark.parametrize(
    "config",
    [
        *published_configs(),
        ServingConfig(max_num_seqs=12, cudagraph_capture_sizes=[1, 2, 4, 8, 16]),
        ServingConfig(max_num_seqs=6, num_speculative_tokens=6, max_cudagraph_capture_size=42),
        ServingConfig(max_num_seqs=9, cudagraph_mode="FULL_DECODE_ONLY"),
        ServingConfig(max_num_seqs=9, num_speculative_tokens=5, max_cudagraph_capture_size=7),
        ServingConfig(max_num_seqs=600, max_num_batched_tokens=1000, num_speculative_tokens=2),
    ],
    ids=lambda config: f"{config.max_num_seqs}-{config.cudagraph_mode}",
)
def test_the_listed_sizes_make_every_full_graph_that_is_planned(config: ServingConfig) -> None:
    """A2, A3, A6: the widest decode too, which no list leaves to the engine's own rule."""
    settings = json.loads(compilation_json(config))
    plan = make_plan(config)
    assert full_sizes_of(settings, config) == list(plan.full_sizes)
    added = set(settings["cudagraph_capture_sizes"]) - set(plan.model_sizes or plan.full_sizes)
    assert added <= set(plan.full_sizes[-1:])
    said = "".join(f"; {size} is listed for the FULL graph of the widest decode" for size in added)
    assert emit_text(config, [("own", config)]).splitlines()[0] == f"# --compilation-config{said}"


def test_without_graphs_no_size_is_listed() -> None:
    assert "sizes" not in compilation_json(ServingConfig(cudagraph_mode="NONE"))


def test_sizes_are_flags_separated_by_spaces() -> None:
    """Commas crash that engine at start-up."""
    config = ServingConfig(max_num_seqs=8, cudagraph_capture_sizes=[64, 8, 16], model="a b")
    line = serve_line(config)
    assert "--cudagraph-capture-sizes 8 16 64 --max-cudagraph-capture-size 64 " in line
    assert line.startswith("vllm serve 'a b' ")


def test_the_sweep_is_a_list_of_one_flat_object_a_server() -> None:
    """Keys are the options of `vllm serve` with underscores; the compilation config is the option's text."""
    config = ServingConfig(max_num_seqs=8, cudagraph_capture_sizes=[8, 16])
    servers = json.loads(json.dumps(sweep_parameters([("own", config), ("tuned", config)])))
    assert [server["_benchmark_name"] for server in servers] == ["own", "tuned"]
    for server in servers:
        assert all(isinstance(value, int | str) for value in server.values())
        assert json.loads(server["compilation_config"])["cudagraph_capture_sizes"] == [8, 16]


def test_the_text_holds_all_three() -> None:
    config = ServingConfig(max_num_seqs=8, num_speculative_tokens=5, cudagraph_capture_sizes=[8, 16])
    lines = emit_text(config, [("tuned", config)]).splitlines()
    assert json.loads(lines[1]) == json.loads(compilation_json(config))
    assert lines[4] == serve_line(config) and "num_speculative_tokens 5" in lines[3]
    assert json.loads("\n".join(lines[7:])) == sweep_parameters([("tuned", config)])
