"""The torch.library definition of the decoder's ops: their schemas, and one module of functions a device."""

from collections.abc import Callable
from types import ModuleType

import torch

NAMESPACE = "replay_sim"

SCHEMAS: dict[str, str] = {
    "boundary": (
        "(Tensor x, Tensor residual, Tensor pre, Tensor post, Tensor res, Tensor norm_weight,"
        " Tensor mix_weight, Tensor mix_scale, Tensor mix_bias,"
        " int sinkhorn_iters, float rms_eps, float hc_eps, float alpha=2.0)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "merge": "(Tensor x, Tensor residual, Tensor post, Tensor res) -> Tensor",
    "collapse": "(Tensor residual, Tensor pre, Tensor norm_weight, float rms_eps) -> Tensor",
    "q_norm_kv_rope": (
        "(Tensor qkv_a, Tensor q_norm_weight, Tensor positions, Tensor cos_sin, int q_lora, float rms_eps)"
        " -> (Tensor, Tensor)"
    ),
    "rope_": "(Tensor(a!) x, Tensor positions, Tensor cos_sin) -> ()",
    "write_kv_": "(Tensor(a!) cache, Tensor kv, Tensor slot_mapping) -> ()",
    "attend_": (
        "(Tensor(a!) out, Tensor q, Tensor window_cache, Tensor? shared_cache, Tensor positions,"
        " Tensor request_of_row, Tensor window_start, Tensor block_table,"
        " int block_size, int window, int topk, float scale) -> ()"
    ),
    "route": (
        "(Tensor logits, Tensor num_rows, int first_expert, int num_local, int top_k, float scaling)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "moe_gather": "(Tensor u, Tensor pair_token, Tensor offs) -> Tensor",
    "grouped_matmul": "(Tensor xs, Tensor w, Tensor offs) -> Tensor",
    "swiglu": "(Tensor x, float limit, Tensor? offs) -> Tensor",
    "moe_combine": "(Tensor ys, Tensor pair_pos, Tensor weights, Tensor shared) -> Tensor",
}

_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)


def register(dispatch_key: str, module: ModuleType) -> None:
    """Makes the functions of `module` the implementations of the ops of their names under `dispatch_key`.

    Raises AttributeError, before anything is registered, if `module` lacks one of the ops.
    """
    functions: dict[str, Callable[..., object]] = {name: getattr(module, name) for name in SCHEMAS}
    for name, function in functions.items():
        _library.impl(name, function, dispatch_key)
