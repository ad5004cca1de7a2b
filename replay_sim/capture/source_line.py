"""Where in the user's own files something happened: from the running stack, or from an error's traceback."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType, TracebackType

import attrs
import torch

_NOT_THE_USERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    str(Path(linecache.__file__).parent / "contextlib.py"),
    str(Path(linecache.__file__).parent / "weakref.py"),
    str(Path(linecache.__file__).parent / "importlib"),
    "<",
)


@attrs.frozen
class SourceLine:
    """A line of a source file; `line` counts from 1."""

    path: str
    line: int

    @property
    def text(self) -> str:
        """The line itself, stripped; empty if the file cannot be read."""
        return linecache.getline(self.path, self.line).strip()

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def calling_line() -> SourceLine | None:
    """The innermost running line that is neither PyTorch's nor this package's capture; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return SourceLine(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def failing_line(traceback: TracebackType | None, folder: Path | None = None) -> SourceLine | None:
    """The innermost line of an error's traceback under `folder`, if there is one, and not of an installed package.

    Else the innermost that is neither PyTorch's nor this package's capture; None if there is none.
    """
    own = outside = None
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        if not path.startswith(_NOT_THE_USERS):
            outside = SourceLine(path, traceback.tb_lineno)
            if folder is not None and Path(path).is_relative_to(folder) and "site-packages" not in path:
                own = outside
        traceback = traceback.tb_next
    return own or outside
