"""Traces of allocations: a compact file format, and their replay through the caching allocator's model."""

import json
import lzma
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from replay_sim.capture.allocator_blocks import SEGMENT_GRANULE, Event, PoolId
from replay_sim.capture.caching_allocator import FIRST_ADDRESS, CachingAllocator
from replay_sim.whole_file import write_whole

FORMAT: Final = "replay_sim allocator trace"
VERSION: Final = 1
MAX_BYTES: Final = 64 << 20
MAX_EVENTS: Final = 2_000_000
MAX_NUMBER: Final = (1 << 63) - 1
MAX_NAME: Final = 200


class TraceError(ValueError):
    """A trace, or a file or snapshot to read one from, is not what it should be."""


def _natural(instance: object, attribute: "attrs.Attribute[Any]", value: int) -> None:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise TraceError(f"{attribute.name} is {value!r}; allowed: whole numbers from 0 to 2^63 - 1")


def _pool_or_none(instance: object, attribute: "attrs.Attribute[Any]", value: PoolId) -> None:
    if value is not None:
        _natural(instance, attribute, value)


def _short_text(instance: object, attribute: "attrs.Attribute[Any]", value: str) -> None:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise TraceError(f"{attribute.name} must be text of at most {MAX_NAME} characters")


@attrs.frozen
class Alloc:
    """Allocate `size` bytes (as requested, not rounded) under a new `id`."""

    id: int = attrs.field(validator=_natural)
    size: int = attrs.field(validator=_natural)
    stream: int = attrs.field(default=0, validator=_natural)
    pool: PoolId = attrs.field(default=None, validator=_pool_or_none)


@attrs.frozen
class Free:
    """Free the allocation `id`; its block is reusable from here on."""

    id: int = attrs.field(validator=_natural)


@attrs.frozen
class EmptyCache:
    """Give the free segments of the default pool and of released pools back to the device."""


@attrs.frozen
class Retain:
    """Count one more user of a private pool; before the pool's first allocation."""

    pool: int = attrs.field(validator=_natural)


@attrs.frozen
class Release:
    """Count one user of a private pool less."""

    pool: int = attrs.field(validator=_natural)


@attrs.frozen
class Mark:
    """A named point at which reserved bytes are asked for."""

    name: str = attrs.field(validator=_short_text)


TraceEvent = Alloc | Free | EmptyCache | Retain | Release | Mark
_KINDS: Final[dict[str, type]] = {
    "alloc": Alloc,
    "free": Free,
    "empty_cache": EmptyCache,
    "retain": Retain,
    "release": Release,
    "mark": Mark,
}
_KIND_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


@attrs.frozen
class Trace:
    """What was asked of an allocator, in order.

    `segments` are (address, bytes) of the segments that the recorded allocator got, in order, if it was
    recorded: equal blocks are taken by address, so an exact replay needs them. Raises TraceError for an id
    that is allocated while live, or freed while not.
    """

    events: tuple[TraceEvent, ...]
    segments: tuple[tuple[int, int], ...] = ()

    def __attrs_post_init__(self) -> None:
        live: set[int] = set()
        for number, event in enumerate(self.events, 1):
            if isinstance(event, Alloc):
                if event.id in live:
                    raise TraceError(f"event {number} allocates id {event.id}, which is live")
                live.add(event.id)
            elif isinstance(event, Free):
                if event.id not in live:
                    raise TraceError(f"event {number} frees id {event.id}, which is not live")
                live.remove(event.id)


@attrs.frozen
class MarkState:
    """Reserved bytes by pool (those with any) at a mark."""

    name: str
    reserved: Mapping[PoolId, int]


@attrs.frozen
class ReplayResult:
    """What the model answered: the marks, the segment_alloc and segment_free events, and its last state."""

    marks: tuple[MarkState, ...]
    segment_events: tuple[Event, ...]
    allocator: CachingAllocator


class RecordedPlacement:
    """Places segments where a recording had them; from the first of another size on, beyond them all."""

    def __init__(self, segments: tuple[tuple[int, int], ...]) -> None:
        """Follow `segments`, (address, bytes) in order of allocation."""
        self._recorded: Iterator[tuple[int, int]] | None = iter(segments)
        top = max((address + size for address, size in segments), default=0)
        self._next = max(FIRST_ADDRESS, -(-top // SEGMENT_GRANULE) * SEGMENT_GRANULE)

    def __call__(self, size: int) -> int:
        """The address for a segment of `size` bytes."""
        if self._recorded is not None:
            address, recorded_size = next(self._recorded, (0, None))
            if recorded_size == size:
                return address
            self._recorded = None
        address = self._next
        self._next += -(-size // SEGMENT_GRANULE) * SEGMENT_GRANULE
        return address


def replay(trace: Trace, capacity_bytes: int | None = None) -> ReplayResult:
    """Run a trace through a new `CachingAllocator` (O5): reserved bytes by pool at each mark, segment events.

    Raises what the allocator raises: OutOfMemoryError, or ValueError for a pool that is not retained.
    """
    segment_events: list[Event] = []

    def keep(event: Event) -> None:
        if event.action in ("segment_alloc", "segment_free"):
            segment_events.append(event)

    allocator = CachingAllocator(RecordedPlacement(trace.segments), capacity_bytes, keep)
    addresses: dict[int, int] = {}
    marks: list[MarkState] = []
    for event in trace.events:
        match event:
            case Alloc():
                addresses[event.id] = allocator.malloc(event.size, event.stream, event.pool)
            case Free():
                allocator.free(addresses.pop(event.id))
            case EmptyCache():
                allocator.empty_cache()
            case Retain():
                allocator.retain_pool(event.pool)
            case Release():
                allocator.release_pool(event.pool)
            case Mark():
                marks.append(MarkState(event.name, reserved_by_pool(segment_events)))
    return ReplayResult(tuple(marks), tuple(segment_events), allocator)


def reserved_by_pool(segment_events: list[Event]) -> dict[PoolId, int]:
    """Reserved bytes by pool (those with any) after the segment_alloc and segment_free events given."""
    reserved: dict[PoolId, int] = {}
    for event in segment_events:
        change = event.size if event.action == "segment_alloc" else -event.size
        reserved[event.pool] = reserved.get(event.pool, 0) + change
    return {pool: size for pool, size in reserved.items() if size}


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace, whole or not at all, as JSON lines, a header and one array an event; an .xz is compressed."""
    header = {"format": FORMAT, "version": VERSION, "segments": trace.segments}
    rows = ([_KIND_NAMES[type(event)], *attrs.astuple(event)] for event in trace.events)
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in (header, *rows))
    data = text.encode()
    write_whole(Path(path), lzma.compress(data) if str(path).endswith(".xz") else data)


def read_trace(path: str | Path, max_bytes: int = MAX_BYTES, max_events: int = MAX_EVENTS) -> Trace:
    """Read what `write_trace` wrote, up to `max_bytes` (uncompressed) and `max_events`.

    Raises TraceError, with the file and the line, for anything else.
    """
    try:
        with lzma.open(path) if str(path).endswith(".xz") else open(path, "rb") as stream:
            data = stream.read(max_bytes + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise TraceError(f"{path}: not a whole xz file: {error}") from error
    if len(data) > max_bytes:
        raise TraceError(f"{path}: more than max_bytes={max_bytes} bytes")
    lines = data.splitlines()
    if len(lines) - 1 > max_events:
        raise TraceError(f"{path}: {len(lines) - 1} events, more than max_events={max_events}")
    rows = [_parse(path, number, line) for number, line in enumerate(lines, 1)]
    segments = _read_header(path, rows[0] if rows else None)
    events = []
    for number, row in enumerate(rows[1:], 2):
        try:
            events.append(_read_event(row))
        except TraceError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
    try:
        return Trace(tuple(events), segments)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def _parse(path: str | Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}, line {number}: not JSON: {error}") from error


def _read_header(path: str | Path, header: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceError(f'{path}, line 1: not a header with "format": "{FORMAT}"')
    if header.get("version") != VERSION:
        raise TraceError(f"{path}, line 1: version {header.get('version')!r}; this reader knows {VERSION}")
    segments = header.get("segments", [])
    if not isinstance(segments, list) or not all(
        isinstance(row, list) and len(row) == 2 and all(type(n) is int and 0 <= n <= MAX_NUMBER for n in row)
        for row in segments
    ):
        raise TraceError(f"{path}, line 1: segments must be pairs [address, bytes] of whole numbers")
    return tuple((address, size) for address, size in segments)


def _read_event(row: Any) -> TraceEvent:
    if not isinstance(row, list) or not row or not isinstance(row[0], str) or row[0] not in _KINDS:
        raise TraceError(f"an event is an array that starts with one of {', '.join(_KINDS)}")
    kind = _KINDS[row[0]]
    if len(row) - 1 != len(attrs.fields(kind)):
        names = ", ".join(field.name for field in attrs.fields(kind)) or "nothing"
        raise TraceError(f"{row[0]} is followed by {names}; this one by {len(row) - 1} values")
    return kind(*row[1:])
