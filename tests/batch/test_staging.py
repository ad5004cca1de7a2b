"""Staging: fields lie apart and aligned, twins hold what is written, copies name what they could not do."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replay_sim.batch.metadata import BatchMetadataBuffers
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.batch.staging import ALIGNMENT, RING, Staging

FIELDS = {
    "first": ((70,), torch.int64),
    "second": ((70,), torch.int64),
    "one": ((1,), torch.int32),
    "table": ((5, 33), torch.int32),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def filled(staging: Staging, seed: int, entries: int, rows: int) -> dict[str, np.ndarray]:
    """Write a step of random values, copy the first entries of each field, and return all that was written."""
    draw = np.random.default_rng(seed)
    with staging.step() as host:
        for array in host.values():
            array[...] = draw.integers(1, 1 << 30, array.shape)
        staging.copy_each(("first", "second"), entries)
        staging.copy_all("one", "table", rows)
        return {name: array.copy() for name, array in host.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_fields_are_aligned_apart_zero_and_of_their_shapes(device: str) -> None:
    """B4: as allocations of their own would be, in one block of memory."""
    staging = Staging(FIELDS, torch.device(device))
    ends = 0
    for name, tensor in staging.tensors.items():
        assert (tuple(tensor.shape), tensor.dtype) == FIELDS[name] and not bool(tensor.any())
        assert tensor.data_ptr() >= ends and (tensor.data_ptr() - staging.tensors["first"].data_ptr()) % ALIGNMENT == 0
        ends = tensor.data_ptr() + tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("device", DEVICES)
def test_steps_that_follow_each_other_each_leave_their_own_values(device: str) -> None:
    """More steps than pinned blocks: none is written while its copy is under way."""
    staging = Staging(FIELDS, torch.device(device))
    for seed in range(3 * RING):
        written = filled(staging, seed, 70, 5)
        for name, tensor in staging.tensors.items():
            assert tensor.tolist() == written[name].tolist(), name


def check_copied(staging: Staging, tensors: dict[str, torch.Tensor], entries: int, rows: int) -> None:
    """After a step `tensors` hold the entries asked for, and what they held beyond."""
    for tensor in tensors.values():
        tensor.fill_(-7)
    written = filled(staging, 1, entries, rows)
    for name, count in (("first", entries), ("second", entries), ("one", 1), ("table", rows)):
        assert tensors[name][:count].tolist() == written[name][:count].tolist()
        assert bool((tensors[name][count:] == -7).all())


ENTRIES = pytest.mark.parametrize(("entries", "rows"), [(0, 0), (1, 2), (69, 5)])


@pytest.mark.gpu
@ENTRIES
def test_no_more_is_copied_than_was_asked_for(entries: int, rows: int) -> None:
    """S8: entries beyond keep what they held."""
    staging = Staging(FIELDS, torch.device("cuda"))
    check_copied(staging, staging.tensors, entries, rows)


@ENTRIES
def test_the_lines_of_each_copy_are_those_of_the_fields_in_both_blocks(monkeypatch, entries: int, rows: int) -> None:
    """S8: CUDA's copy of several lines done plainly; it takes no pitch below a line's width."""
    staging = Staging(FIELDS, torch.device("cpu"))
    target = torch.zeros_like(staging._block)

    def copy(self: Staging, begin: int, width: int, height: int, pitch: int) -> None:
        assert pitch * ALIGNMENT >= width
        for line in range(begin, begin + height * pitch * ALIGNMENT, pitch * ALIGNMENT) if width else ():
            target[line : line + width] = self._block[line : line + width]

    monkeypatch.setattr(Staging, "_copy", copy)
    check_copied(staging, staging._views(target, FIELDS), entries, rows)


class OperationsRun(TorchDispatchMode):
    """The names of all operations of torch that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_written_without_an_operation_of_torch_but_views(device: str) -> None:
    """Its pool of threads would wake for tables of more than 32,768 entries, 15 ms a step beside a GPU."""
    buffers = BatchMetadataBuffers(
        max_rows=70, max_num_seqs=40, max_blocks=1000, block_size=4, window=8, device=torch.device(device)
    )
    batch = Batch([Request(30, 10, Phase.PREFILL), Request(1, 3900, Phase.DECODE)])
    tables = [np.arange(1, 11, dtype=np.int32), np.arange(1000, 0, -1, dtype=np.int32)]
    with OperationsRun() as run:
        metadata = buffers.write(batch, tables, np.arange(31, dtype=np.int32), 64)
    assert run.names <= {"slice"}, "an operation that is no view"
    assert metadata.positions[:31].tolist() == [*range(10, 40), 3900]
    assert buffers.block_table[1].tolist() == tables[1].tolist() and buffers.input_ids[:31].tolist() == [*range(31)]
