"""Breakable graph capture: segments and eager breaks, on CUDA graphs or on a recording CPU backend (C1-C12)."""

from replay_sim.capture.backend import CaptureBackend, CaptureError, Segment
from replay_sim.capture.breakable_graph import BreakableGraph, capture, garbage_collection_paused, warm_up
from replay_sim.capture.eager_break import eager_break, refuse_nested_capture

__all__ = [
    "BreakableGraph",
    "CaptureBackend",
    "CaptureError",
    "Segment",
    "capture",
    "eager_break",
    "garbage_collection_paused",
    "refuse_nested_capture",
    "warm_up",
]
