"""Records of steps and prefills whose times follow a law that a test can add up by hand, and a model of few words."""

from replay_sim.measure.records import Point, Record
from replay_sim.measure.roofline import Rates
from replay_sim.measure.step_form import PRIORS
from replay_sim.measure.step_model import ArmError, StepModel

GPU = "Test GPU"
ENVIRONMENT = {"gpu": GPU, "driver": "1.2", "torch": "9.9", "triton": "3", "date": "2026-01-02", "replay_sim": "0"}
MODES = {
    "eager_off": ("NONE", None),
    "eager_replay": ("NONE", "NONE"),
    "piecewise_off": ("PIECEWISE", None),
    "piecewise_replay_eager": ("PIECEWISE", "NONE"),
    "piecewise_replay_graphs": ("PIECEWISE", "PIECEWISE"),
}
GRAPHS = {"piecewise_off": 41, "piecewise_replay_eager": 22, "piecewise_replay_graphs": 43}


def step_point(arm: str, tokens: int, step_us: float, **changes) -> Point:
    """One prompt of `tokens` tokens as `arm`; p10 and p90 lie 10 % below and above."""
    mode, replay_mode = MODES[arm]
    rows = 0 if replay_mode is None else 128
    values = {
        "sweep": "experts",
        "arm": arm,
        "num_tokens": tokens,
        "padded_tokens": tokens,
        "mode": mode,
        "replay_rows": rows,
        "padded_rows": rows,
        "replay_mode": replay_mode,
        "num_reqs": 1,
        "window": 128,
        "num_local_experts": 48,
        "max_num_batched_tokens": 8192,
        "computed": 0,
        "num_decodes": 0,
        "longest_query": tokens,
        "step_us": step_us,
        "p10": 0.9 * step_us,
        "p90": 1.1 * step_us,
        "n": 5,
        "host_us": 0.5 * step_us,
        "launch_us": 6.0,
        "device_us": 0.75 * step_us,
        "idle_share": 0.25,
        "graph_launches": GRAPHS.get(arm, 0),
        "kernel_launches": 90 if arm in GRAPHS else 1000,
        "limit_us": 0.25 * step_us,
        "held_out": False,
        "predicted_us": None,
    }
    return values | changes


def prefill_point(arm: str, tokens: int, prefill_us: float, **changes) -> Point:
    """One prompt of `tokens` tokens as a whole, in chunks of 8,192."""
    values = {
        "arm": arm,
        "prompt_tokens": tokens,
        "max_num_batched_tokens": 8192,
        "num_steps": -(-tokens // 8192),
        "window": 128,
        "num_local_experts": 48,
        "prefill_us": prefill_us,
        "p10": 0.9 * prefill_us,
        "p90": 1.1 * prefill_us,
        "n": 5,
        "host_us": 0.5 * prefill_us,
        "launch_us": 6.0,
    }
    return values | changes


def record(kind: str, points: list[Point], **changes) -> Record:
    """A record of these points on GPU, of the decoder flash-rank."""
    settings = {"subject": "experts", "model": "flash-rank", "copy_bandwidth_gbps": 4000.0, "matmul_tflops": 800.0}
    return Record(
        kind=kind, environment=ENVIRONMENT | changes, command="measure", seed=0, settings=settings, points=points
    )


def model() -> StepModel:
    """A model of the prior's coefficients that saw 256 to 8,192 tokens, eager steps and graphs with replay graphs."""
    seen = {"num_tokens": (256, 8192), "num_reqs": (1, 64), "window": (64, 1024), "num_local_experts": (8, 96)}
    domain = {arm: {**seen, "replay_rows": (0, 8192)} for arm in ("eager_off", "piecewise_replay_graphs")}
    return StepModel(
        shape="flash-rank",
        rates=Rates(4e12, 8e14),
        launch_us=6.0,
        launch_bounds=(5.0, 10.0),
        provenance="nothing",
        seed=0,
        coefficients=PRIORS,
        errors={"eager_off": ArmError(median=0.02, p95=0.05, n=9), "all": ArmError(median=0.01, p95=0.04, n=20)},
        domain=domain,
    )
