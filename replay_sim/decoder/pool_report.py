"""The prediction of pool bytes as flat rows, as JSON values and as a table."""

from __future__ import annotations

from typing import Any

from replay_sim.decoder.pool_prediction import PlanMemory, PoolGrowth

MIB = 1 << 20
SOURCE = "modelled from shapes"


def growth_row(growth: PoolGrowth) -> dict[str, Any]:
    """One prediction in the names of the `pool` records, bytes as they grow over the group's whole capture (O5)."""
    return {
        "arrangement": growth.arrangement.value,
        "order": "largest_first" if growth.largest_first else "smallest_first",
        "outputs": "held" if growth.outputs_held else "dropped",
        "group": growth.group,
        "num_graphs": growth.num_graphs,
        "predicted_bytes": growth.pool_bytes,
    }


def chosen_pool_bytes(memory: PlanMemory, growths: tuple[PoolGrowth, ...]) -> int:
    """Graph pool bytes of both groups in the arrangement that the system picks by itself (O4)."""
    return sum(growth.pool_bytes for growth in growths if growth.arrangement is memory.sharing.sharing)


def pool_summary(memory: PlanMemory, growths: tuple[PoolGrowth, ...]) -> dict[str, Any]:
    """JSON values: each arrangement's rows, the one chosen, and what is allocated beside tensors, by name."""
    return {
        "predicted_pool": [growth_row(growth) for growth in growths],
        "predicted_pool_source": SOURCE,
        "pool_sharing": memory.sharing.sharing.value,
        "pool_sharing_reason": memory.sharing.reason,
        "library_workspaces": [{"name": name, "bytes_per_stream": nbytes} for name, nbytes in memory.workspaces],
        "scratch": [{"operation": op, "name": name, "most_bytes": nbytes} for op, name, nbytes in memory.scratch],
    }


def pool_table(memory: PlanMemory, growths: tuple[PoolGrowth, ...]) -> str:
    """The arrangements in MiB, the buffers, and what operations and libraries allocate by themselves."""
    from tabulate import tabulate

    rows = [
        (
            growth.arrangement.value + (" (chosen)" if growth.arrangement is memory.sharing.sharing else ""),
            growth.group,
            growth.num_graphs,
            f"{growth.pool_bytes / MIB:,.0f}",
        )
        for growth in growths
    ]
    first = growths[0]
    order = "largest first" if first.largest_first else "smallest first"
    held = "held" if first.outputs_held else "dropped"
    lines = [
        f"Reserved memory, {SOURCE}; captured {order}, outputs {held}:",
        tabulate(rows, ("arrangement", "group", "graphs", "pool MiB"), tablefmt="simple"),
        "not predicted: library workspaces beside those named, and the driver's memory for the graphs themselves",
        f"chosen: {memory.sharing.reason}",
        f"buffers: inputs {memory.static_bytes / MIB:,.1f} MiB, break outputs {memory.break_bytes / MIB:,.1f} MiB",
        *(f"library: {name}, {nbytes / MIB:,.1f} MiB for each stream" for name, nbytes in memory.workspaces),
        *(f"scratch: {op}, {name}, at most {nbytes / MIB:,.2f} MiB" for op, name, nbytes in memory.scratch),
        f"Recorded {memory.num_graphs} graphs by shapes in {memory.seconds:.1f} s; no tensor of them was made.",
    ]
    return "\n".join(lines)
