"""Where tests of Triton kernels run: compiled on a GPU; without one interpreted on a CPU.

Import this before any module that imports Triton, which reads the setting when it is imported.
"""

import os
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

# Triton 3.6 interprets no loop whose bound a kernel computes under NumPy 2.4, which turns no 1-d array into an int.
pytest.importorskip("triton", minversion="3.7" if DEVICE == "cpu" else "3.6")


def _multiply_bfloat16_as_float32() -> None:
    """Teach the interpreter tl.dot of bfloat16: it holds those as uint16 and would multiply their bits."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    builder.create_dot = create_dot


if DEVICE == "cpu":
    _multiply_bfloat16_as_float32()
