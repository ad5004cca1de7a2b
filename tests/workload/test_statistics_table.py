"""The statistics table: as a server logs it, as it is pasted, and what is refused."""

from collections import Counter

import pytest

from replay_sim.batch.dispatch import CudagraphMode, DispatchTable, ModelReason, ReplayReason, StepRecord
from replay_sim.workload.detect import read_trace
from replay_sim.workload.statistics_table import StatisticsRow, StatisticsTable, has_statistics, read_statistics
from replay_sim.workload.trace import TraceError

PREFIX = "(APIServer pid=3606348) INFO 12-02 16:51:04 [compilation/cuda_graph.py:108] "
HEADER = "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |"
RULE = "|-----------------|---------------|--------------|--------------|-------|"
ROWS = ("| 1 | 1 | 0 | FULL | 300 |", "| 70 | 72 | 2 | PIECEWISE | 4 |", "| 9000 | 9000 | 0 | NONE | 2 |")
LOG = (
    "**CUDAGraph Config Settings:**",
    "",
    "- Mode: FULL_AND_PIECEWISE",
    "- Capture sizes: [1, 2, 4, 8, 72]",
    "",
    "**CUDAGraph Stats:**",
    "",
    HEADER,
    RULE,
    *ROWS,
)
EXPECTED = (
    StatisticsRow(1, 1, "FULL", 300),
    StatisticsRow(70, 72, "PIECEWISE", 4),
    StatisticsRow(9000, 9000, "NONE", 2),
)


def write(tmp_path, *lines):
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines))
    return path


def record(tokens, padded, mode, rows=0, padded_rows=0, replay_mode=None):
    return StepRecord(
        tokens, padded, mode, rows, padded_rows, replay_mode, ReplayReason.GRAPH, 1, ModelReason.PIECEWISE
    )


@pytest.mark.parametrize("prefix", ["", PREFIX, "vllm-1  | " + PREFIX, "\x1b[0;36m(Worker pid=7)\x1b[0;0m "])
def test_a_table_is_read_whatever_stands_before_its_rows(tmp_path, prefix):
    """Issue 6, point 6."""
    path = write(tmp_path, *(prefix + line for line in LOG), "", PREFIX + "Avg prompt throughput: 3 | 4 tokens/s")
    assert read_statistics(path).rows == EXPECTED


def test_tables_of_two_intervals_add_up(tmp_path):
    table = read_statistics(write(tmp_path, *(PREFIX + line for line in (*LOG, *LOG))))
    assert table.rows == EXPECTED * 2
    assert table.histogram() == {1: 600, 70: 8, 9000: 4}
    assert table.histogram("PIECEWISE") == {70: 8}
    assert table.histogram(graphs="replay") == {}


def test_what_the_dispatch_table_prints_is_read_back_whole(tmp_path):
    """G3: both tables, and not the one of reasons."""
    printed = DispatchTable()
    piecewise, none = CudagraphMode.PIECEWISE, CudagraphMode.NONE
    printed.extend([record(0, 0, none), record(3, 4, CudagraphMode.FULL)])
    printed.extend([record(900 + i, 1024, piecewise, 100 + i, 128, piecewise) for i in range(20) for _ in range(i + 1)])
    printed.extend([record(5000, 5000, none, 4500, 4500, none)] * 7)
    read = read_statistics(write(tmp_path, printed.markdown()))
    for graphs, counts in (("model", printed.model), ("replay", printed.replay)):
        rows = {(r.unpadded, r.padded, CudagraphMode(r.runtime_mode)): r.count for r in read.rows if r.graphs == graphs}
        assert rows == counts
        for mode in CudagraphMode:
            expected = Counter()
            for (unpadded, _, kind), count in counts.items():
                expected[unpadded] += count if kind is mode else 0
            assert read.histogram(mode.value, graphs) == +expected
    assert read.histogram(graphs="replay").total() == printed.replay.total()


def test_a_table_that_was_cut_is_refused(tmp_path):
    printed = DispatchTable()
    printed.extend([record(size, 8, CudagraphMode.PIECEWISE) for size in range(1, 9)])
    with pytest.raises(TraceError, match="expected a table that is whole, found '5 more rows, 5 dispatches"):
        read_statistics(write(tmp_path, printed.markdown(3)))


@pytest.mark.parametrize(
    ("row", "field", "expected"),
    [
        ("| x | 72 | 2 | PIECEWISE | 4 |", "Unpadded Tokens", "integer from 0"),
        ("| 70 | -72 | 2 | PIECEWISE | 4 |", "Padded Tokens", "integer from 0"),
        ("| 70 | 7 | 0 | PIECEWISE | 4 |", "Padded Tokens", "at least the unpadded 70"),
        ("| 70 | 72 | 3 | PIECEWISE | 4 |", "Num Paddings", "2, padded less unpadded"),
        ("| 70 | 72 | 2 | SOME | 4 |", "Runtime Mode", "NONE, PIECEWISE, FULL"),
        ("| 70 | 72 | 2 | FULL | 0 |", "Count", "integer from 1 to 9007199254740992"),
        ("| 70 | 72 | 2 | FULL | 99999999999999999 |", "Count", "integer from 1"),
        ("| 70 | 72 | 2 | FULL |", "line", "5 cells between bars"),
        ("| 70 | 72 | 2 | FULL | 4", "line", "5 cells between bars"),
        ("| 70", "line", "5 cells between bars"),
    ],
)
def test_a_bad_row_is_refused_by_line_field_and_expectation(tmp_path, row, field, expected):
    """Nothing is half-read: good rows stand before and after it."""
    with pytest.raises(TraceError) as caught:
        read_statistics(write(tmp_path, HEADER, RULE, ROWS[0], row, ROWS[1]))
    assert (caught.value.line, caught.value.field) == (4, field)
    assert expected in caught.value.expected


def test_thousands_may_be_separated_as_a_spreadsheet_pastes_them(tmp_path):
    path = write(tmp_path, HEADER, RULE, "| 1,300 | 1,536 | 236 | PIECEWISE | 1,234,567 |")
    assert read_statistics(path).rows == (StatisticsRow(1300, 1536, "PIECEWISE", 1234567),)
    for cell in ("13,00", "1,3", ",300", "1,300,", "1.300"):
        with pytest.raises(TraceError, match="line 3, Unpadded Tokens: expected an integer"):
            read_statistics(write(tmp_path, HEADER, RULE, f"| {cell} | 1536 | 236 | PIECEWISE | 4 |"))


@pytest.mark.parametrize("title", ["Model", "Replay"])
def test_a_row_beyond_the_token_budget_is_of_another_server_and_refused_with_its_line(tmp_path, title):
    path = write(tmp_path, f"**{title} graphs**", HEADER, RULE, *ROWS)
    assert len(read_statistics(path, 9000).rows) == len(ROWS)
    expected = "line 6, Unpadded Tokens: expected at most max_num_batched_tokens 8999 of the config .*, found 9000"
    with pytest.raises(TraceError, match=expected):
        read_statistics(path, 8999)


@pytest.mark.parametrize("lines", [(), ("no table",), (HEADER, RULE), ROWS])
def test_a_file_without_a_table_or_rows_is_refused(tmp_path, lines):
    with pytest.raises(TraceError, match=r"line 1, file: expected a table with the columns Unpadded Tokens \| Padded"):
        read_statistics(write(tmp_path, *lines))


def test_a_statistics_table_is_no_trace_and_the_refusal_names_what_takes_it(tmp_path):
    path = write(tmp_path, *(PREFIX + line for line in LOG))
    assert has_statistics(path)
    with pytest.raises(TraceError, match="`tune --statistics FILE` takes it"):
        read_trace(path)
    assert not has_statistics(write(tmp_path, "a,b", "1,2"))


def test_of_a_long_file_that_is_no_trace_only_the_beginning_is_searched_for_a_table(tmp_path):
    """Issue 8: only the words of a refusal depend on it, and 10,000,000 lines take minutes."""
    assert has_statistics(write(tmp_path, *["a"] * 9_999, HEADER))
    assert not has_statistics(write(tmp_path, *["a"] * 10_000, HEADER))


@pytest.mark.parametrize("arguments", [("SOME",), ("FULL", "both")])
def test_an_unknown_mode_or_kind_of_graphs_is_named(arguments):
    with pytest.raises(ValueError, match="it must be one of"):
        StatisticsTable(EXPECTED).histogram(*arguments)


def test_a_line_that_another_process_logged_between_rows_ends_no_table(tmp_path):
    """Several processes share a server's standard output."""
    interleaved = [*LOG[:-1], "INFO 11-29 12:00:00 [loggers.py:1] Engine 000: running 3 requests", LOG[-1]]
    assert read_statistics(write(tmp_path, *interleaved)).rows == EXPECTED


def test_a_row_of_a_million_digits_is_refused_at_once(tmp_path):
    with pytest.raises(TraceError, match="line 3, Unpadded Tokens"):
        read_statistics(write(tmp_path, HEADER, RULE, f"| {'1' * 1_000_000} | 1 | 0 | FULL | 1 |"))
