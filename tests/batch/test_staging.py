"""Staging: a step's arrays reach pinned memory as they are, without torch's pool of threads."""

import numpy as np
import pytest
import torch

from replay_sim.batch.staging import write_bytes

TABLES = np.arange(17 * 2048, dtype=np.int32).reshape(17, 2048)
SOURCES = {
    "block tables of 17 requests": TABLES,
    "every other row of them": TABLES[::2],
    "positions": np.arange(8192, dtype=np.int64),
    "one number": np.array([3], np.int32),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_bytes_are_those_of_the_source_and_nothing_beside_them_is_written(source: np.ndarray) -> None:
    room = torch.full((source.nbytes + 32,), 7, dtype=torch.uint8)
    write_bytes(source, room[16:-16])
    written = room[16:-16].clone().view(torch.from_numpy(source[:1].copy()).dtype).view(source.shape)
    assert (written.numpy() == source).all()
    assert (room[:16] == 7).all() and (room[-16:] == 7).all()


def test_torch_copies_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wake its threads for tables of more than 32,768 entries, 15 ms a step beside a GPU."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch copied on the host")

    for name in ("copy_", "clone", "contiguous"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(torch, "tensor", refuse)
    buffer = torch.empty(TABLES.nbytes, dtype=torch.uint8)
    write_bytes(TABLES, buffer)
    assert buffer.numpy().view(np.int32).tolist() == TABLES.reshape(-1).tolist()


def test_a_buffer_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        write_bytes(TABLES, torch.empty(TABLES.nbytes - 4, dtype=torch.uint8))
