"""The replay batch's metadata from one launch, against the clauses written out and against the plain reference."""

import numpy as np
import pytest
import torch
from triton_device import DEVICE

from replay_sim.batch.metadata import BatchMetadataBuffers, ReplayMetadataBuffers
from replay_sim.batch.metadata_op import metadata_tensors, write_replay_metadata
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.batch.rows_kernel import replay_metadata_

WINDOW, BLOCK_SIZE = 8, 4
PADS = (0, 1, 300)
PER_ROW = ("rows", "positions", "slot_mapping", "request_of_row", "window_start_first", "window_start_rest")
POISON = 77


def prefill(query_len: int, computed: int = 0, **settings: int | bool) -> Request:
    return Request(query_len, computed, Phase.PREFILL, **settings)


def decode(query_len: int, computed: int, **settings: int | bool) -> Request:
    return Request(query_len, computed, Phase.DECODE, **settings)


MIXES = {
    "no request": [],
    "a request of no rows": [prefill(0)],
    "a one-token prompt": [prefill(1)],
    "lengths around the window": [prefill(WINDOW - 1), prefill(WINDOW), prefill(WINDOW + 1), prefill(3 * WINDOW + 5)],
    "chunks of longer prompts": [prefill(WINDOW + 3, 40, window_start=33), prefill(2, 17, window_start=10)],
    "all rows read": [prefill(2 * WINDOW + 1, all_rows_read=True), prefill(2 * WINDOW + 1)],
    "decodes beside prefills": [decode(1, 50, window_start=43), prefill(30), decode(WINDOW + 4, 9), prefill(0, 5)],
    "more rows and requests than one block": [*[decode(1, 3 + i) for i in range(300)], prefill(700, 1), decode(600, 0)],
}


def random_mix(seed: int) -> list[Request]:
    draw = np.random.default_rng(seed)
    requests = []
    for _ in range(draw.integers(1, 17)):
        query_len = int(draw.choice([0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, draw.integers(0, 60)]))
        computed = int(draw.choice([0, draw.integers(0, 100)]))
        start = int(draw.integers(0, computed + 1))
        phase = Phase.DECODE if draw.random() < 0.3 else Phase.PREFILL
        requests.append(Request(query_len, computed, phase, bool(draw.random() < 0.2), start))
    return requests


def fill(requests: list[Request], window: int, device: str) -> tuple[Batch, BatchMetadataBuffers]:
    """The batch, and metadata buffers that hold it."""
    batch = Batch(requests)
    tables, first = [], 0
    for request in requests:
        count = -(-request.seq_len // BLOCK_SIZE)
        tables.append(list(range(first + count - 1, first - 1, -1)))
        first += count
    blocks = max([len(table) for table in tables], default=1)
    source = BatchMetadataBuffers(
        max_rows=batch.num_tokens + 1, max_num_seqs=batch.num_reqs + 1, max_blocks=blocks, block_size=BLOCK_SIZE,
        window=window, device=torch.device(device),
    )  # fmt: skip
    source.write(batch, tables, np.zeros(batch.num_tokens, np.int32), batch.num_tokens + 1)
    return batch, source


ALL = (*PER_ROW, "output_row_of", "query_start_loc", "num_rows")


def poisoned(rows: int, num_reqs: int, device: str) -> ReplayMetadataBuffers:
    target = ReplayMetadataBuffers(max_rows=rows, max_num_seqs=num_reqs + 1, device=torch.device(device))
    for name in ALL:
        getattr(target, name).fill_(POISON)
    return target


def launch(target: ReplayMetadataBuffers, source: BatchMetadataBuffers, num_reqs: int, padded: int) -> None:
    replay_metadata_(*metadata_tensors(target, source), num_reqs, source.window, padded)


def written_out(requests: list[Request], slots: list[int], window: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """The kept rows, one tuple in the order of PER_ROW each, and their query_start_loc, request by request."""
    rows, ends, begin = [], [0], 0
    for index, request in enumerate(requests):
        keeps_all = request.phase is Phase.DECODE or request.all_rows_read
        kept = request.query_len if keeps_all else min(request.query_len, window)
        start = request.window_start
        rest = max(start, request.seq_len - window) if kept < request.query_len else start
        for offset in range(request.query_len - kept, request.query_len):
            row, position = begin + offset, request.computed + offset
            lowest = position - window + 1
            rows.append((row, position, slots[row], index, max(start, lowest), max(rest, lowest)))
        ends.append(len(rows))
        begin += request.query_len
    return rows, ends


def check(requests: list[Request], window: int, pads: int, told_reqs: int | None = None) -> None:
    batch, source = fill(requests, window, DEVICE)
    rows, ends = written_out(requests, source.slot_mapping.tolist(), window)
    padded = len(rows) + pads
    size = max(padded, batch.num_tokens) + 1
    target = poisoned(size, batch.num_reqs, DEVICE)
    launch(target, source, batch.num_reqs if told_reqs is None else told_reqs, padded)
    expected = [*rows, *[(-1, 0, -1, -1, 0, 0)] * pads, *[(POISON,) * len(PER_ROW)] * (size - padded)]
    for name, column in zip(PER_ROW, zip(*expected, strict=True), strict=True):
        assert getattr(target, name).tolist() == list(column), name
    lands = {row[0]: place for place, row in enumerate(rows)}
    assert target.output_row_of.tolist() == [lands.get(row, -1) for row in range(size)]
    assert target.query_start_loc.tolist() == [*ends, ends[-1]], "B8: the tail repeats the last offset"
    assert target.num_rows.tolist() == [len(rows)]


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", MIXES)
def test_the_kernel_keeps_the_rows_that_the_clauses_say(name: str) -> None:
    """S1 to S4, S6, S7, S9; no bound on lengths or on the number of requests."""
    check(MIXES[name], WINDOW, pads=3)


@pytest.mark.sanitizer
@pytest.mark.parametrize("pads", PADS)
def test_pads_belong_to_no_request_and_nothing_beyond_them_is_written(pads: int) -> None:
    """S8."""
    check(MIXES["decodes beside prefills"], WINDOW, pads)


@pytest.mark.sanitizer
def test_told_of_more_requests_than_there_are_the_kernel_writes_the_same() -> None:
    """S9, B8: a captured launch is told max_num_seqs, as it cannot read the host's count."""
    requests = MIXES["decodes beside prefills"]
    check(requests, WINDOW, pads=3, told_reqs=len(requests) + 1)


@pytest.mark.sanitizer
def test_a_window_wider_than_one_block_of_the_kernel_is_kept_whole() -> None:
    """S1, S9."""
    check([prefill(700, 20, window_start=4), prefill(290)], window=300, pads=2)


@pytest.mark.parametrize("seed", range(40))
def test_the_kernel_equals_the_plain_reference_exactly(seed: int) -> None:
    """S9: random batches, lengths around the window, all phases."""
    requests = random_mix(seed)
    batch, on_host = fill(requests, WINDOW, "cpu")
    padded = len(written_out(requests, on_host.slot_mapping.tolist(), WINDOW)[0]) + seed % 4
    size, told = max(padded, batch.num_tokens) + 1, batch.num_reqs + seed % 2
    reference = poisoned(size, batch.num_reqs, "cpu")
    write_replay_metadata(reference, on_host, told, padded)
    actual = poisoned(size, batch.num_reqs, DEVICE)
    launch(actual, fill(requests, WINDOW, DEVICE)[1], told, padded)
    for name in ALL:
        assert torch.equal(getattr(actual, name).cpu(), getattr(reference, name)), name
