"""The requests of one step, and the batch that they form."""

import enum
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt

INT32_MAX = np.iinfo(np.int32).max


class Phase(enum.Enum):
    """Whether a request computes its prompt or extends its output; it decides what is kept (S1)."""

    PREFILL = "prefill"
    DECODE = "decode"


def _count(instance: object, attribute: "attrs.Attribute[int]", value: object) -> None:
    """Refuse what is not an integer of at least 0, naming the field."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ValueError(f"{attribute.name} is {value!r}: it must be an integer of at least 0")


def _phase(instance: object, attribute: "attrs.Attribute[Phase]", value: object) -> None:
    """Refuse what is not a Phase, naming the field."""
    if not isinstance(value, Phase):
        raise ValueError(f"{attribute.name} is {value!r}: it must be Phase.PREFILL or Phase.DECODE")


@attrs.frozen
class Request:
    """What one request asks of one step, in tokens and positions.

    query_len: rows of this step; zero is ordinary (S6). computed: tokens computed before this step.
    all_rows_read: every row of the prompt is read, as for prompt log-probabilities. window_start: the lowest
    position whose window KV the request holds, at most `computed`. ValueError names the field out of range.
    """

    query_len: int = attrs.field(validator=_count)
    computed: int = attrs.field(validator=_count)
    phase: Phase = attrs.field(validator=_phase)
    all_rows_read: bool = False
    window_start: int = attrs.field(default=0, validator=_count)
    request_id: str = ""

    def __attrs_post_init__(self) -> None:
        if self.window_start > self.computed:
            raise ValueError(
                f"window_start is {self.window_start}: it must be at most computed, which is {self.computed}"
            )

    @property
    def seq_len(self) -> int:
        """Tokens of the request once this step has run."""
        return self.computed + self.query_len


@attrs.frozen(init=False, eq=False, repr=False)
class Batch:
    """The requests of one step, held as columns; arrays are read-only and have one entry a request (R).

    query_lens int32, computed int64, is_decode bool, all_rows_read bool, window_starts int64, request_ids
    str; query_start_loc int32 (R + 1) is the cumulative query length. An empty batch is ordinary (S6).
    """

    query_lens: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int64]
    is_decode: npt.NDArray[np.bool_]
    all_rows_read: npt.NDArray[np.bool_]
    window_starts: npt.NDArray[np.int64]
    request_ids: tuple[str, ...]
    query_start_loc: npt.NDArray[np.int32]

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        """Take the requests in batch order. ValueError if their tokens do not fit int32."""
        requests = tuple(requests)
        self._fill(
            np.array([request.query_len for request in requests], np.int64),
            np.array([request.computed for request in requests], np.int64),
            np.array([request.phase is Phase.DECODE for request in requests], np.bool_),
            np.array([request.all_rows_read for request in requests], np.bool_),
            np.array([request.window_start for request in requests], np.int64),
            tuple(request.request_id for request in requests),
        )

    @classmethod
    def from_columns(
        cls,
        query_lens: npt.ArrayLike,
        computed: npt.ArrayLike,
        is_decode: npt.ArrayLike,
        *,
        all_rows_read: npt.ArrayLike | None = None,
        window_starts: npt.ArrayLike | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> Self:
        """The same batch from its columns (R each), copied, without an object a request; same ValueErrors.

        Absent columns are those of a plain Request: rows not all read, window start 0, no id.
        """
        lengths = np.array(query_lens, np.int64)
        count = lengths.size
        columns = (
            _column("computed", computed, np.int64, count),
            _column("phase", is_decode, np.bool_, count),
            _column("all_rows_read", all_rows_read, np.bool_, count),
            _column("window_start", window_starts, np.int64, count),
        )
        ids = ("",) * count if request_ids is None else tuple(request_ids)
        if lengths.ndim != 1 or len(ids) != count:
            raise ValueError(
                f"query_len has shape {lengths.shape} for {len(ids)} request_ids: it must have one entry each"
            )
        if count:
            _check_columns(lengths, columns[0], columns[3])
        batch = cls.__new__(cls)
        batch._fill(lengths, *columns, ids)
        return batch

    def _fill(
        self,
        query_lens: npt.NDArray[np.int64],
        computed: npt.NDArray[np.int64],
        is_decode: npt.NDArray[np.bool_],
        all_rows_read: npt.NDArray[np.bool_],
        window_starts: npt.NDArray[np.int64],
        request_ids: tuple[str, ...],
    ) -> None:
        """Set the columns, make them read-only, and check that the tokens fit int32."""
        ends = query_lens.cumsum()
        if ends.size and ends[-1] > INT32_MAX:
            raise ValueError(f"query_len adds up to {ends[-1]} tokens: a batch holds at most {INT32_MAX}")
        query_start_loc = np.zeros(query_lens.size + 1, np.int32)
        query_start_loc[1:] = ends
        lengths = query_lens.astype(np.int32)
        for column in (lengths, computed, is_decode, all_rows_read, window_starts, query_start_loc):
            column.flags.writeable = False
        self.__attrs_init__(lengths, computed, is_decode, all_rows_read, window_starts, request_ids, query_start_loc)

    @property
    def num_tokens(self) -> int:
        """Rows of the step, pads not counted."""
        return int(self.query_start_loc[-1])

    @property
    def num_reqs(self) -> int:
        """Requests of the step, those of zero length included."""
        return len(self.query_lens)

    @property
    def seq_lens(self) -> npt.NDArray[np.int64]:
        """computed + query_len of each request, int64 (R)."""
        return self.computed + self.query_lens

    @property
    def uniform_decode_len(self) -> int | None:
        """The query length that all requests share if all decode, else None; None for an empty batch too."""
        if not self.num_reqs or not self.is_decode.all():
            return None
        first = int(self.query_lens[0])
        return first if (self.query_lens == first).all() else None

    @functools.cached_property
    def requests(self) -> tuple[Request, ...]:
        """The requests in batch order, made when first asked for."""
        columns = (
            self.query_lens.tolist(),
            self.computed.tolist(),
            [Phase.DECODE if decode else Phase.PREFILL for decode in self.is_decode.tolist()],
            self.all_rows_read.tolist(),
            self.window_starts.tolist(),
            self.request_ids,
        )
        return tuple(map(Request, *columns))

    @functools.cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """The position of every row in its request, int64 (T)."""
        offsets = self.computed - self.query_start_loc[:-1]
        return np.arange(self.num_tokens, dtype=np.int64) + np.repeat(offsets, self.query_lens)

    def __eq__(self, other: object) -> bool:
        return self.requests == other.requests if isinstance(other, Batch) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Batch({self.requests!r})"


def _column(name: str, values: npt.ArrayLike | None, dtype: type[np.generic], count: int) -> npt.NDArray[Any]:
    """A copy of the column, or zeros if absent; ValueError if it has not one entry a request."""
    if values is None:
        return np.zeros(count, dtype)
    column = np.array(values, dtype)
    if column.shape != (count,):
        raise ValueError(f"{name} has shape {column.shape}: it must have one entry for each of {count} requests")
    return column


def _check_columns(
    query_lens: npt.NDArray[np.int64], computed: npt.NDArray[np.int64], window_starts: npt.NDArray[np.int64]
) -> None:
    """Refuse what a Request would refuse, naming the field and its first bad value."""
    if (query_lens | computed | window_starts | (computed - window_starts)).min() >= 0:
        return
    for name, column in (("query_len", query_lens), ("computed", computed), ("window_start", window_starts)):
        if column.min() < 0:
            value = column[column < 0][0]
            raise ValueError(f"{name} is {value}: it must be an integer of at least 0")
    late = window_starts > computed
    if late.any():
        start, limit = window_starts[late][0], computed[late][0]
        raise ValueError(f"window_start is {start}: it must be at most computed, which is {limit}")
