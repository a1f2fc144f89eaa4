"""Ledger: the traffic of each axis of a mesh, in total and between two moments.

A reading is {axis: {operation: (calls, bytes)}}, bytes as `collectives` defines them.
"""

from framework.comm.connect import Mesh

Reading = dict[str, dict[str, tuple[int, int]]]


def snapshot(mesh: Mesh, between_nodes: bool = False) -> Reading:
    """Calls and bytes of every axis since the mesh was connected. between_nodes: only those bytes that leave their node."""
    return {
        name: {
            operation: (calls, (traffic.bytes_leaving if between_nodes else traffic.bytes)[operation])
            for operation, calls in traffic.calls.items()
        }
        for name, traffic in ((name, axis.traffic) for name, axis in mesh.axes.items())
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


def totals(reading: Reading, between_nodes: Reading | None = None) -> dict[str, dict[str, int]]:
    """Sums over operations: {axis: {"calls": n, "bytes": n}}, as a StepReport carries them; with a reading of what went between
    nodes also "bytes_between_nodes", where there are any."""
    found = {
        axis: {
            "calls": sum(calls for calls, _ in operations.values()),
            "bytes": sum(num_bytes for _, num_bytes in operations.values()),
        }
        for axis, operations in reading.items()
    }
    for axis, operations in (between_nodes or {}).items():
        if away := sum(num_bytes for _, num_bytes in operations.values()):
            found[axis]["bytes_between_nodes"] = away
    return found
