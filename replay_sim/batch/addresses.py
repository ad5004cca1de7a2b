"""Fixed addresses: what captured graphs read must lie where it lay when they were captured (B4)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class FixedAddresses:
    """The addresses of tensors by name, as they were when this was made; errors say `prefix` and the name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        self._prefix = prefix
        self._addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}

    @property
    def names(self) -> Collection[str]:
        """Of the tensors."""
        return self._addresses.keys()

    def check(self, tensors: Mapping[str, Any]) -> None:
        """Raises RuntimeError naming a tensor that has moved since; cheap enough for every step.

        `tensors` may hold more than those, such as the attributes of their owner.
        """
        for name, address in self._addresses.items():
            now = tensors[name].data_ptr()
            if now != address:
                raise RuntimeError(
                    f"{self._prefix}{name} moved from {address:#x} to {now:#x} since it was made: its graphs would "
                    "read the old memory. Write into the buffer, never replace it"
                )
