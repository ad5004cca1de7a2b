"""A config whose graphs are captured on a CPU within a second or two, and a trace for it."""

import json
from pathlib import Path

CONFIG = {
    "window": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "cudagraph_capture_sizes": [16, 64],
    "decoder_replay_cudagraph_capture_sizes": [8, 16],
    "decoder_replay_trim_threshold": 16,
}
"""Two PIECEWISE graphs, a FULL graph for the decodes of up to four requests, two replay graphs."""
NUM_MODEL_GRAPHS, NUM_REPLAY_GRAPHS = 3, 2
LENGTHS = ((40, 3), (20, 2), (9, 1))


def write_config(folder: Path, **changes: object) -> str:
    path = folder / "small.json"
    path.write_text(json.dumps(CONFIG | changes))
    return str(path)


def write_trace(folder: Path, lengths: tuple[tuple[int, int], ...] = LENGTHS) -> Path:
    path = folder / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{prompt},{output}\n" for prompt, output in lengths))
    return path
