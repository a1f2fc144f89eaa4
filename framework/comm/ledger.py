"""Ledger: the traffic of each axis of a mesh, in total and between two moments.

A reading is {axis: {operation: (calls, bytes)}}, bytes as `collectives` defines them.
"""

from framework.comm.connect import Mesh

Reading = dict[str, dict[str, tuple[int, int]]]


def snapshot(mesh: Mesh) -> Reading:
    """Calls and bytes of every axis since the mesh was connected."""
    return {
        name: {operation: (calls, axis.traffic.bytes[operation]) for operation, calls in axis.traffic.calls.items()}
        for name, axis in mesh.axes.items()
    }


def difference(after: Reading, before: Reading) -> Reading:
    """Calls and bytes between two snapshots; operations and axes without a call are left out."""
    # Counters only grow, and an operation may appear between the readings: what is missing before counts as 0.
    changed: Reading = {}
    for axis, operations in after.items():
        for operation, (calls, num_bytes) in operations.items():
            calls_before, bytes_before = before.get(axis, {}).get(operation, (0, 0))
            if calls > calls_before:
                changed.setdefault(axis, {})[operation] = (calls - calls_before, num_bytes - bytes_before)
    return changed


def totals(reading: Reading) -> dict[str, dict[str, int]]:
    """Sums over operations: {axis: {"calls": n, "bytes": n}}, as a StepReport carries them."""
    return {
        axis: {
            "calls": sum(calls for calls, _ in operations.values()),
            "bytes": sum(num_bytes for _, num_bytes in operations.values()),
        }
        for axis, operations in reading.items()
    }
