"""Row selection and dispatch in plain Python, one row and one size at a time."""

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.plan.capture_plan import CapturePlan


def is_kept(request: Request, position: int, window: int) -> bool:
    """S1 for one row: may anything still read it?"""
    if request.phase is Phase.DECODE or request.all_rows_read:
        return True
    return position >= request.computed + request.query_len - window


def select_row_by_row(batch: Batch, window: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """S1-S4: rows, their positions, the cumulative kept length and the window starts."""
    rows: list[int] = []
    positions: list[int] = []
    starts, window_starts = [0], []
    row = 0
    for request in batch.requests:
        trimmed = False
        for position in range(request.computed, request.computed + request.query_len):
            if is_kept(request, position, window):
                rows.append(row)
                positions.append(position)
            else:
                trimmed = True
            row += 1
        starts.append(len(rows))
        lowest = request.computed + request.query_len - window
        window_starts.append(max(request.window_start, lowest) if trimmed else request.window_start)
    return rows, positions, starts, window_starts


def dispatch_plainly(
    batch: Batch, plan: CapturePlan, captured: dict[str, set[int]]
) -> tuple[str, int, str | None, int, int]:
    """D1-D3, S5, G3: mode, padded tokens, replay mode (None without a replay batch), replay rows, padded rows."""
    tokens = sum(request.query_len for request in batch.requests)
    kept = len(select_row_by_row(batch, plan.window)[0])
    mode, padded = "NONE", tokens
    decodes = all(request.phase is Phase.DECODE for request in batch.requests)
    uniform = all(request.query_len == plan.query_len_decode for request in batch.requests)
    for kind, wanted in (("PIECEWISE", True), ("FULL", decodes and uniform)):
        sizes = {"PIECEWISE": plan.model_sizes, "FULL": plan.full_sizes}[kind]
        fitting = [size for size in sizes if size >= tokens]
        if tokens and wanted and fitting and min(fitting) in captured[kind]:
            mode, padded = kind, min(fitting)
    if mode == "NONE":
        replays = kept < tokens
    else:
        replays = mode == "PIECEWISE" and plan.trim_threshold is not None and padded >= plan.trim_threshold
    if not replays:
        return mode, padded, None, 0, 0
    fitting = [size for size in plan.replay_sizes if size >= kept]
    if fitting and min(fitting) in captured["REPLAY"]:
        return mode, padded, "PIECEWISE", kept, min(fitting)
    return mode, padded, "NONE", kept, kept
