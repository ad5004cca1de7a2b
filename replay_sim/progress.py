"""How long work shows that it goes on: a wrapper around the items that it goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Progress = Callable[[Iterable[Any], str], Iterable[Any]]
"""Passes items through and shows how far they are, under a word that says what they are."""


def progress_bar(items: Iterable[Any], what: str) -> Iterable[Any]:
    """The items under a bar on a terminal, and as they are elsewhere."""
    from tqdm import tqdm

    return tqdm(items, desc=what, disable=None, leave=False)


def no_progress(items: Iterable[Any], what: str) -> Iterable[Any]:
    """The items as they are."""
    return items
