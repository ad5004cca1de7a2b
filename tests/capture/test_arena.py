"""The arena: real memory under the model's addresses."""

import gc
import resource
import weakref

import numpy as np
import pytest

from replay_sim.capture.arena import POISON, Arena

MIB, GIB = 1 << 20, 1 << 30
POOL = 1


def test_the_default_arena_is_64_gib_of_address_space_that_costs_nothing_untouched() -> None:
    """C12."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arena = Arena()
    address = arena.allocator.malloc(60 * GIB)
    arena.view(address, 60 * GIB)[-1] = 1
    assert arena.virtual_bytes == 64 * GIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10


def test_addresses_are_offsets_that_ascend_in_2_mib_steps_from_2_mib() -> None:
    """C12: the same in every process; 0 is no address."""
    arena = Arena(64 * MIB)
    addresses = [arena.allocator.malloc(size) for size in (512, 4 * MIB, 30 * MIB, 512)]
    assert addresses == [2 * MIB, 4 * MIB, 24 * MIB, 2 * MIB + 512]


def test_a_view_is_new_each_time_and_shows_the_same_bytes() -> None:
    """C12: so that the end of each can be told apart."""
    arena = Arena(64 * MIB)
    address = arena.allocator.malloc(1000)
    first, second = arena.view(address, 1000), arena.view(address, 1000)
    assert first is not second and first.dtype == np.uint8 and first.shape == (1000,)
    first[:] = 7
    assert second.sum() == 7000


def test_a_finalizer_on_a_view_frees_its_block_for_the_next_allocation() -> None:
    """C12: what is captured next gets the dead tensor's bytes, old contents included."""
    arena = Arena(64 * MIB)
    allocator = arena.allocator
    address = allocator.malloc(4096)
    view = arena.view(address, 4096)
    weakref.finalize(view, allocator.free, address)
    view[:] = 3
    del view
    gc.collect()
    assert allocator.allocated_bytes() == 0
    assert allocator.malloc(2048) == address
    assert set(arena.view(address, 2048)) == {3}


def test_a_view_outlives_the_arena() -> None:
    """C12: the array keeps the mapping."""
    arena = Arena(64 * MIB)
    view = arena.view(arena.allocator.malloc(512), 512)
    del arena
    gc.collect()
    view[:] = 9
    assert view.sum() == 9 * 512


def test_poison_fills_exactly_its_range_and_is_nan_in_every_float_type() -> None:
    """C12."""
    arena = Arena(64 * MIB)
    address = arena.allocator.malloc(4096)
    arena.view(address + 1024, 1024).fill(POISON)
    whole = arena.view(address, 4096)
    assert not whole[:1024].any() and not whole[2048:].any()
    for dtype in (np.float16, np.float32, np.float64):
        assert np.isnan(whole[1024:2048].view(dtype)).all()


def test_a_process_pointer_leads_back_to_its_address() -> None:
    """C12."""
    arena = Arena(64 * MIB)
    address = arena.allocator.malloc(512)
    view = arena.view(address, 512)
    assert arena.pointer(address) == view.ctypes.data
    arena.view_at(view.ctypes.data, 512)[:] = 5
    assert view.sum() == 5 * 512
    assert arena.contains(view.ctypes.data)
    assert not arena.contains(np.zeros(1).ctypes.data)
    assert not arena.contains(arena.pointer(arena.virtual_bytes))


def test_a_range_outside_of_one_segment_is_refused() -> None:
    """C12."""
    arena = Arena(64 * MIB)
    address = arena.allocator.malloc(512)
    for start, nbytes in ((address, 2 * MIB + 1), (0, 1), (address, -1), (address + 2 * MIB, 1)):
        with pytest.raises(ValueError, match=f"{nbytes} bytes at address {start}"):
            arena.view(start, nbytes)


def test_segments_that_are_given_back_are_joined_and_used_again_and_read_as_zero() -> None:
    """C12: 12 + 12 MiB given back hold a segment of 22 MiB in an arena with 2 MiB left."""
    arena = Arena(28 * MIB)
    allocator = arena.allocator
    first, second = allocator.malloc(12 * MIB), allocator.malloc(12 * MIB)
    arena.view(second, 512).fill(POISON)
    allocator.free(first)
    allocator.free(second)
    assert allocator.empty_cache() == [first, second]
    assert allocator.malloc(22 * MIB) == first
    assert not arena.view(second, 512).any()


def test_running_out_of_address_space_is_an_error_with_the_numbers_and_the_remedy() -> None:
    """C12: the allocator stays usable."""
    arena = Arena(16 * MIB)
    arena.allocator.malloc(512)
    with pytest.raises(MemoryError, match="20971520 bytes .* virtual_bytes=16777216.* 12582912 bytes; give"):
        arena.allocator.malloc(4 * MIB)
    assert arena.allocator.reserved_bytes() == 2 * MIB
    assert arena.allocator.malloc(12 * MIB) == 4 * MIB


def test_the_arena_can_stand_for_a_device_of_a_given_capacity() -> None:
    """D8."""
    arena = Arena(64 * MIB, capacity_bytes=10 * MIB)
    with pytest.raises(MemoryError, match="capacity_bytes=10485760"):
        arena.allocator.malloc(2 * MIB)


@pytest.mark.parametrize("virtual_bytes", [0, 2 * MIB, 5 * MIB, -4 * MIB])
def test_a_size_that_is_no_multiple_of_2_mib_or_too_small_is_refused(virtual_bytes: int) -> None:
    """C12."""
    with pytest.raises(ValueError, match=f"virtual_bytes is {virtual_bytes}"):
        Arena(virtual_bytes)


def test_an_arena_that_the_system_cannot_map_names_the_setting() -> None:
    """C12: 4 EiB are more than any address space."""
    with pytest.raises(MemoryError, match=f"cannot map virtual_bytes={1 << 62}"):
        Arena(1 << 62)
