"""Attention metadata of a batch and of its replay batch, against a plain oracle of one row at a time."""

import attrs
import numpy as np
import pytest
import torch

from replay_sim.batch.metadata import AttentionMetadata, BatchMetadataBuffers, ReplayMetadataBuffers
from replay_sim.batch.request import Batch, Phase, Request

WINDOW, BLOCK_SIZE, MAX_ROWS, MAX_SEQS, MAX_BLOCKS = 8, 4, 96, 6, 16
BATCH_COLUMNS = ("positions", "slot_mapping", "request_of_row", "window_start", "input_ids")
REPLAY_COLUMNS = (
    "rows",
    "positions",
    "slot_mapping",
    "request_of_row",
    "window_start_first",
    "window_start_rest",
)
PAD_OF_BATCH, PAD_OF_REPLAY = (0, -1, -1, 0, 0), (-1, 0, -1, -1, 0, 0)


def prefill(query_len: int, computed: int = 0, **settings) -> Request:
    return Request(query_len, computed, Phase.PREFILL, **settings)


def decode(query_len: int, computed: int, **settings) -> Request:
    return Request(query_len, computed, Phase.DECODE, **settings)


MIXES = {
    "no request": [],
    "a request of no rows": [prefill(0)],
    "requests of no rows between others": [prefill(0), prefill(11), prefill(0, 7), decode(1, 3), prefill(0)],
    "a one-token prompt": [prefill(1)],
    "lengths around the window": [prefill(WINDOW - 1), prefill(WINDOW), prefill(WINDOW + 1), prefill(3 * WINDOW + 5)],
    "chunks of longer prompts": [prefill(WINDOW + 3, 40), prefill(2, 17, window_start=10), prefill(WINDOW, 23)],
    "windows that start late": [prefill(13, 20, window_start=20), decode(1, 30, window_start=29), prefill(3, 9)],
    "all rows read": [prefill(2 * WINDOW + 1, all_rows_read=True), prefill(2 * WINDOW + 1)],
    "decodes beside prefills": [decode(1, 50, window_start=43), prefill(30), decode(WINDOW + 4, 9), prefill(5, 5)],
    "as many requests as there may be": [decode(1, 4 * index) for index in range(MAX_SEQS)],
}
every_mix = pytest.mark.parametrize("requests", MIXES.values(), ids=MIXES)


def block_tables(requests: list[Request], spare: int = 0) -> list[np.ndarray]:
    """Blocks in falling order, dealt to the requests in turn; `spare` blocks more than each needs."""
    counts = [-(-request.seq_len // BLOCK_SIZE) + spare for request in requests]
    free = iter(range(500, 0, -1))
    return [np.array([next(free) for _ in range(count)], np.int32) for count in counts]


def token_ids(count: int, first: int = 100) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def make_buffers(device: torch.device) -> tuple[BatchMetadataBuffers, ReplayMetadataBuffers]:
    batch = BatchMetadataBuffers(
        max_rows=MAX_ROWS,
        max_num_seqs=MAX_SEQS,
        max_blocks=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        window=WINDOW,
        device=device,
    )
    return batch, ReplayMetadataBuffers(max_rows=MAX_ROWS, max_num_seqs=MAX_SEQS, device=device)


def test_before_any_step_no_row_has_a_place_in_the_outputs(backend) -> None:
    """L6: what is not written yet sends no row anywhere."""
    assert make_buffers(backend.device)[1].output_row_of.tolist() == [-1] * MAX_ROWS


@pytest.fixture
def buffers(backend) -> tuple[BatchMetadataBuffers, ReplayMetadataBuffers]:
    """Both kinds, as an earlier batch left them: no value is a zero by luck."""
    both = make_buffers(backend.device)
    for owner in both:
        for value in vars(owner).values():
            if isinstance(value, torch.Tensor):
                value.fill_(77)
    return both


def write(buffers, requests: list[Request], padded: int, padded_rows: int | None = None) -> Batch:
    batch = Batch(requests)
    buffers[0].write(batch, block_tables(requests), token_ids(batch.num_tokens), padded)
    if padded_rows is not None:
        buffers[1].write(batch, buffers[0], padded_rows)
    return batch


def oracle_rows(requests: list[Request]) -> list[tuple[int, ...]]:
    """Each row of the batch: position, slot, request, first position of its window, token id."""
    rows: list[tuple[int, ...]] = []
    for owner, (request, table) in enumerate(zip(requests, block_tables(requests), strict=True)):
        for offset in range(request.query_len):
            position = request.computed + offset
            slot = int(table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            lowest = max(request.window_start, position - WINDOW + 1)
            rows.append((position, slot, owner, lowest, 100 + len(rows)))
    return rows


def oracle_replay_rows(requests: list[Request]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The kept rows, in the order of REPLAY_COLUMNS, and the cumulative kept length (S1 to S4)."""
    every = oracle_rows(requests)
    kept: list[tuple[int, ...]] = []
    ends, begin = [0], 0
    for request in requests:
        keeps_all = request.phase is Phase.DECODE or request.all_rows_read or request.query_len <= WINDOW
        held = request.window_start if keeps_all else max(request.window_start, request.seq_len - WINDOW)
        for row in range(begin, begin + request.query_len):
            position, slot, owner, lowest, _ = every[row]
            if keeps_all or row >= begin + request.query_len - WINDOW:
                kept.append((row, position, slot, owner, lowest, max(held, position - WINDOW + 1)))
        begin += request.query_len
        ends.append(len(kept))
    return kept, ends


def columns(owner, names: tuple[str, ...], count: int) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(owner, name)[:count].tolist() for name in names), strict=True))


@every_mix
@pytest.mark.parametrize("pads", [0, 1, 20])
def test_every_row_of_a_batch_has_its_position_slot_request_window_and_id(buffers, requests, pads: int) -> None:
    """S3, S6, S8: pads have slot -1 and no request, and nothing beyond them is written."""
    expected = oracle_rows(requests)
    padded = len(expected) + pads
    batch = write(buffers, requests, padded)
    assert columns(buffers[0], BATCH_COLUMNS, padded) == expected + [PAD_OF_BATCH] * pads
    assert columns(buffers[0], BATCH_COLUMNS, MAX_ROWS)[padded:] == [(77,) * 5] * (MAX_ROWS - padded)
    assert buffers[0].num_rows.tolist() == [batch.num_tokens]


@every_mix
@pytest.mark.parametrize("pads", [0, 1, 20])
def test_every_row_of_a_replay_batch_is_the_batchs_row_with_the_windows_that_it_may_attend(
    buffers, requests, pads: int
) -> None:
    """S2, S3, S4, S8: the first replay layer keeps the batch's window starts, the rest begin at the kept rows."""
    expected, ends = oracle_replay_rows(requests)
    padded_rows = len(expected) + pads
    write(buffers, requests, sum(request.query_len for request in requests) + 2, padded_rows)
    assert columns(buffers[1], REPLAY_COLUMNS, padded_rows) == expected + [PAD_OF_REPLAY] * pads
    assert columns(buffers[1], REPLAY_COLUMNS, MAX_ROWS)[padded_rows:] == [(77,) * 6] * (MAX_ROWS - padded_rows)
    assert buffers[1].num_rows.tolist() == [len(expected)]
    assert buffers[1].query_start_loc.tolist() == ends + ends[-1:] * (MAX_SEQS + 1 - len(ends))


def test_a_trimmed_requests_later_layers_see_nothing_below_the_kept_rows(buffers) -> None:
    """S4, S7: a chunk of 11 tokens at 40 keeps 43 to 50; the first layer's row 43 still sees 36."""
    write(buffers, [prefill(WINDOW + 3, 40)], 11, 8)
    assert buffers[1].positions[:8].tolist() == [43, 44, 45, 46, 47, 48, 49, 50]
    assert buffers[1].window_start_first[:8].tolist() == [36, 37, 38, 39, 40, 41, 42, 43]
    assert buffers[1].window_start_rest[:8].tolist() == [43] * 8


def test_an_untrimmed_request_keeps_its_window_starts_in_every_layer(buffers) -> None:
    """S4: a decode, a short chunk, and a prompt whose rows are all read."""
    requests = [decode(3, 30), prefill(WINDOW, 20, window_start=15), prefill(20, all_rows_read=True)]
    write(buffers, requests, 31, 31)
    assert torch.equal(buffers[1].window_start_first[:31], buffers[1].window_start_rest[:31])


def test_blocks_beyond_those_that_a_request_needs_change_nothing(buffers) -> None:
    requests = MIXES["decodes beside prefills"]
    batch = Batch(requests)
    tables = [np.append(table, [400, 401]).astype(np.int32) for table in block_tables(requests)]
    buffers[0].write(batch, tables, token_ids(batch.num_tokens), 60)
    assert columns(buffers[0], BATCH_COLUMNS, batch.num_tokens) == oracle_rows(requests)


@every_mix
def test_block_tables_are_those_of_the_requests_and_zero_at_their_ends(buffers, requests) -> None:
    """C7: nothing of an earlier, longer table survives in a request's row."""
    write(buffers, requests, MAX_ROWS)
    for row, table in zip(buffers[0].block_table.tolist(), block_tables(requests), strict=False):
        assert row == [*table.tolist(), *[0] * (MAX_BLOCKS - len(table))]


def test_a_smaller_batch_leaves_nothing_of_a_larger_one_in_the_per_request_buffers(buffers) -> None:
    """B8: five prefills, then three decodes: the other two requests have length zero and offsets repeat the last."""
    write(buffers, [prefill(9, 4, window_start=2, all_rows_read=True) for _ in range(5)], 45, 45)
    write(buffers, [decode(1, 6, window_start=index) for index in range(3)], 5, 5)
    batch, replay = buffers
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3, 3]
    assert replay.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3, 3]
    assert batch.computed.tolist() == [6, 6, 6, 0, 0, 0]
    assert batch.request_window_start.tolist() == [0, 1, 2, 0, 0, 0]
    assert batch.keeps_all.tolist() == [1, 1, 1, 0, 0, 0]
    assert batch.request_of_row[:5].tolist() == replay.request_of_row[:5].tolist() == [0, 1, 2, -1, -1]
    assert batch.num_rows.tolist() == replay.num_rows.tolist() == [3]


def test_an_empty_batch_leaves_only_pads(buffers) -> None:
    """S6, B8."""
    write(buffers, MIXES["decodes beside prefills"], 60, 30)
    write(buffers, [], 4, 2)
    assert columns(buffers[0], BATCH_COLUMNS, 4) == [PAD_OF_BATCH] * 4
    assert columns(buffers[1], REPLAY_COLUMNS, 2) == [PAD_OF_REPLAY] * 2
    for owner in buffers:
        assert owner.num_rows.tolist() == [0] and not bool(owner.query_start_loc.any())


def test_which_requests_keep_all_rows_is_decided_by_phase_and_by_what_is_read(buffers) -> None:
    """S1."""
    write(buffers, [prefill(9), decode(9, 3), prefill(9, all_rows_read=True), decode(1, 3)], 28)
    assert buffers[0].keeps_all.tolist() == [0, 1, 1, 1, 0, 0]


def test_metadata_is_views_of_buffers_at_addresses_that_never_change(buffers) -> None:
    """B4: a captured graph reads every later batch where it read the first."""
    batch, replay = buffers
    names = [field.name for field in attrs.fields(AttentionMetadata) if field.name != "block_size"]

    def addresses() -> list[int]:
        of = [
            batch.metadata(7),
            replay.metadata(5, batch, first_layer=True),
            replay.metadata(5, batch, first_layer=False),
        ]
        found = [getattr(metadata, name).data_ptr() for metadata in of for name in names]
        return [*found, *(tensor.data_ptr() for tensor in (batch.num_rows, replay.num_rows, batch.input_ids))]

    before = addresses()
    for requests in MIXES.values():
        write(buffers, requests, MAX_ROWS, MAX_ROWS)
    assert addresses() == before


def test_metadata_has_the_padded_rows_and_the_dtypes_that_attention_reads(buffers) -> None:
    """S3, S4, S8."""
    batch, replay = buffers
    requests = MIXES["decodes beside prefills"]
    whole = batch.write(Batch(requests), block_tables(requests), token_ids(48), 50)
    replay.write(Batch(requests), batch, 40)
    first = replay.metadata(40, batch, first_layer=True)
    rest = replay.metadata(40, batch, first_layer=False)
    for metadata, rows in ((whole, 50), (first, 40), (rest, 40)):
        found = {name: (tuple(value.shape), value.dtype) for name, value in vars_of(metadata).items()}
        assert found == {
            "positions": ((rows,), torch.int64),
            "slot_mapping": ((rows,), torch.int64),
            "request_of_row": ((rows,), torch.int32),
            "window_start": ((rows,), torch.int64),
            "block_table": ((MAX_SEQS, MAX_BLOCKS), torch.int32),
        }
        assert metadata.block_size == BLOCK_SIZE
    assert torch.equal(first.window_start, replay.window_start_first[:40])
    assert torch.equal(rest.window_start, replay.window_start_rest[:40])


def vars_of(metadata: AttentionMetadata) -> dict[str, torch.Tensor]:
    values = attrs.asdict(metadata, recurse=False)
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def test_a_slot_beyond_int32_is_no_less_a_slot(buffers) -> None:
    """S3: slots are int64, blocks times their size may pass 2^31."""
    block = 2**30
    buffers[0].write(Batch([decode(1, 2)]), [np.array([block], np.int32)], token_ids(1), 1)
    assert buffers[0].slot_mapping[:1].tolist() == [block * BLOCK_SIZE + 2]


LONG_TABLE = [np.arange(MAX_BLOCKS + 1, dtype=np.int32)]
REFUSED = {
    "more requests than there may be": (
        [decode(1, 0)] * (MAX_SEQS + 1),
        {},
        f"batch of {MAX_SEQS + 1} requests exceeds max_num_seqs {MAX_SEQS}",
    ),
    "fewer padded tokens than tokens": ([prefill(9)], {"padded": 8}, "padded_tokens 8 .* 9 tokens"),
    "more padded tokens than rows": ([prefill(9)], {"padded": MAX_ROWS + 1}, f"padded_tokens 97 .* {MAX_ROWS} rows"),
    "too few blocks": ([prefill(9)], {"tables": [np.arange(2, dtype=np.int32)]}, "request 0 has 2 blocks: .* needs 3"),
    "more blocks than fit": ([prefill(9)], {"tables": LONG_TABLE}, f"has 17 blocks: .* at most {MAX_BLOCKS} fit"),
    "a table too few": (
        [prefill(1), prefill(1)],
        {"tables": block_tables([prefill(1)])},
        "1 block_tables .* 2 requests",
    ),
    "an id too few": ([prefill(9)], {"ids": token_ids(8)}, "8 input_ids for a batch of 9 tokens"),
    "an id too many": ([prefill(9)], {"ids": token_ids(10)}, "10 input_ids for a batch of 9 tokens"),
}


@pytest.mark.parametrize(("requests", "given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_batch_beyond_a_bound_is_refused_by_name_before_anything_is_written(
    buffers, requests: list[Request], given: dict, message: str
) -> None:
    """C7: a table one block too wide, and its kind."""
    batch = Batch(requests)
    tables = given.get("tables", block_tables(requests))
    ids = given.get("ids", token_ids(batch.num_tokens))
    with pytest.raises(ValueError, match=message):
        buffers[0].write(batch, tables, ids, given.get("padded", 20))
    assert bool((buffers[0].positions == 77).all()) and buffers[0].num_rows.tolist() == [77]


@pytest.mark.parametrize("padded_rows", [WINDOW - 1, MAX_ROWS + 1])
def test_a_replay_batch_that_does_not_fit_its_padded_rows_is_refused(buffers, padded_rows: int) -> None:
    """S8: rows kept 8."""
    batch = write(buffers, [prefill(20)], 20)
    with pytest.raises(ValueError, match=f"padded_rows {padded_rows} must be at least the 8 rows .* at most the 96"):
        buffers[1].write(batch, buffers[0], padded_rows)
    assert bool((buffers[1].rows == 77).all())
