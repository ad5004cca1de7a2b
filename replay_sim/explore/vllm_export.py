"""A tuned config in vLLM's own words: compilation config, serve line, and a parameter list for its sweep command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from replay_sim.config import ServingConfig
from replay_sim.plan import make_plan


def listed_sizes(config: ServingConfig) -> list[int]:
    """The model sizes to list, ascending: those that are planned, and that of the widest decode if none becomes it.

    The engine makes FULL graphs of listed sizes alone, each rounded up to a multiple of a decode's tokens, and its own
    list leaves out a maximum off the grid: a FULL graph of the widest decode is captured only if it is listed (A2, A3).
    """
    plan = make_plan(config)
    sizes, length = plan.model_sizes or plan.full_sizes, plan.query_len_decode
    rounded = {-(-size // length) * length for size in sizes}
    return sorted({*sizes, *(set(plan.full_sizes[-1:]) - rounded)})


def compilation_config(config: ServingConfig) -> dict[str, Any]:
    """The settings of `--compilation-config`.

    All sizes are explicit, ascending and unique, and the maximum is the largest model size, as the engine demands.
    Settings that are not set are left out. Raises ConfigError for a config that cannot be planned.
    """
    sizes = listed_sizes(config)
    settings: dict[str, Any] = {"cudagraph_mode": config.cudagraph_mode}
    if sizes:
        settings |= {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]}
    settings["cudagraph_decoder_replay"] = config.cudagraph_decoder_replay
    if config.decoder_replay_cudagraph_capture_sizes:
        replay_sizes = sorted(set(config.decoder_replay_cudagraph_capture_sizes))
        settings["decoder_replay_cudagraph_capture_sizes"] = replay_sizes
    if config.decoder_replay_trim_threshold is not None:
        settings["decoder_replay_trim_threshold"] = config.decoder_replay_trim_threshold
    return settings


def compilation_json(config: ServingConfig) -> str:
    """The value of `--compilation-config`, one line of JSON without spaces."""
    return json.dumps(compilation_config(config), separators=(",", ":"))


def serve_line(config: ServingConfig) -> str:
    """The whole command for a shell; settings that the config does not know, such as parallelism, are the user's.

    The model sizes are given as a flag too, where the engine takes them separated by spaces, and crashes on commas.
    """
    settings = compilation_config(config)
    sizes = settings.pop("cudagraph_capture_sizes", [])
    maximum = settings.pop("max_cudagraph_capture_size", None)
    words = ["vllm", "serve", config.model]
    words += ["--max-num-seqs", str(config.max_num_seqs)]
    words += ["--max-num-batched-tokens", str(config.max_num_batched_tokens)]
    if config.max_model_len is not None:
        words += ["--max-model-len", str(config.max_model_len)]
    if sizes:
        words += ["--cudagraph-capture-sizes", *map(str, sizes)]
    if maximum is not None:
        words += ["--max-cudagraph-capture-size", str(maximum)]
    words += ["--compilation-config", json.dumps(settings, separators=(",", ":"))]
    return shlex.join(words)


def sweep_parameters(configs: Iterable[tuple[str, ServingConfig]]) -> list[dict[str, Any]]:
    """The list for the file that `vllm bench sweep serve --serve-params` takes: a server for each named config.

    Keys are options of `vllm serve` with underscores; the compilation config is the text that its option takes.
    """
    return [
        {
            "_benchmark_name": name,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "compilation_config": compilation_json(config),
        }
        for name, config in configs
    ]


def emit_text(config: ServingConfig, configs: Iterable[tuple[str, ServingConfig]]) -> str:
    """All three under titles, to paste; `configs` are the servers of the sweep.

    Speculative decoding is not part of the line: the config knows how many tokens are drafted, not by what.
    """
    drafted = config.num_speculative_tokens
    plan = make_plan(config)
    added = [size for size in listed_sizes(config) if plan.model_sizes and size not in plan.model_sizes]
    lines = [
        "# --compilation-config"
        + "".join(f"; {size} is listed for the FULL graph of the widest decode" for size in added),
        compilation_json(config),
        "",
        "# serve line; add what is yours, such as --tensor-parallel-size"
        + (f" and the --speculative-config with num_speculative_tokens {drafted}" if drafted else ""),
        serve_line(config),
        "",
        "# parameters of: vllm bench sweep serve --serve-params FILE",
        json.dumps(sweep_parameters(configs), indent=1),
    ]
    return "\n".join(lines)
