"""A tuned config in vLLM's own words: compilation config, serve line, and a parameter list for its sweep command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from replay_sim.config import ServingConfig


def compilation_config(config: ServingConfig) -> dict[str, Any]:
    """The settings of `--compilation-config`.

    All sizes are explicit, ascending and unique, and the maximum is the largest model size, as the engine demands.
    Settings that are not set are left out.
    """
    sizes = sorted(set(config.cudagraph_capture_sizes or ()))
    settings: dict[str, Any] = {"cudagraph_mode": config.cudagraph_mode}
    if sizes:
        settings |= {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]}
    elif config.max_cudagraph_capture_size is not None:
        settings["max_cudagraph_capture_size"] = config.max_cudagraph_capture_size
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
    lines = [
        "# --compilation-config",
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
