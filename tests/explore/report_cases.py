"""Jobs and hostile records that the tests of the report share."""

import functools
import json
import re
from pathlib import Path

import attrs
from explore.measured_cases import prefill_point, record, step_point

from replay_sim.explore.evidence import Evidence, gather
from replay_sim.explore.job import Job, run_job
from replay_sim.measure.records import Record

EVIL = "<img src=x onerror=alert(1)>"
HOSTILE = {"gpu": f"GPU {EVIL}", "driver": EVIL, "torch": f"2.11{EVIL}"}
ARM_TIMES = {"eager_off": 1000.0, "eager_replay": 900.0, "piecewise_off": 950.0, "piecewise_replay_graphs": 700.0}
LENGTHS = (256, 512, 1024, 2048, 4096)
SMALL = {
    "model": "m",
    "window": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "cudagraph_capture_sizes": [16, 32, 64],
    "decoder_replay_cudagraph_capture_sizes": [8, 16, 24],
    "decoder_replay_trim_threshold": 16,
}


@functools.cache
def default_job() -> Job:
    """The embedded default on fifty requests."""
    return run_job("default", num_requests=50)


@functools.cache
def default_evidence() -> Evidence:
    """The same beside the bundled records."""
    return gather(default_job())


def small_job(folder: Path, *, lengths="40,3\n20,2\n", execute=None, name="config.json", **settings) -> Job:
    config, trace = folder / name, folder / "lengths.csv"
    config.write_text(json.dumps(SMALL | settings))
    trace.write_text("prompt_tokens,output_tokens\n" + lengths)
    return run_job(str(config), trace=trace, execute=execute, num_steps=3)


def steps_record(**changes) -> Record:
    """One prompt at five lengths in four arms, with 48 experts."""
    points = [step_point(arm, tokens, us * tokens) for arm, us in ARM_TIMES.items() for tokens in LENGTHS]
    return record("steps", points, **changes)


def hostile_records() -> list[tuple[str, Record]]:
    """A steps and a prefill record whose every name is markup."""
    steps = steps_record(**HOSTILE)
    prefills = [prefill_point(arm, tokens, us * tokens) for arm, us in ARM_TIMES.items() for tokens in LENGTHS]
    named = [(f"steps{EVIL}.json", steps), (f"prefill{EVIL}.json", record("prefill", prefills, **HOSTILE))]
    return [(name, attrs.evolve(one, command=EVIL, settings=one.settings | {EVIL: EVIL})) for name, one in named]


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
