"""Python objects among ranks: rank 0 looks something up and tells the others, all report to rank 0, one fails for all.

What every rank would read from a file system or a hub by itself, rank 0 reads: thousands of ranks that ask for the same file
are a load of their own, and two of them may see different answers (NFS caches attributes for seconds). An all-gather of objects
would send n answers to each of n ranks; here n answers go to one rank, or one answer goes to all.

The axis must carry tensors of the CPU, as `world` does on every backend.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from framework.comm.agreement import check_agreement
from framework.comm.collectives import all_reduce
from framework.errors import MeshwrightError
from framework.mesh.axis import Axis

T = TypeVar("T")


def tell(work: Callable[[], T], axis: Axis) -> T:
    """The result of `work`, which the axis's rank 0 alone does; all ranks get it, or its MeshwrightError. Collective.

    The result must be picklable. Bytes: its size, sent by rank 0 to each of the others (a broadcast).
    """
    return _tell_from(0, work, axis)


def share_errors(work: Callable[[], T], axis: Axis) -> T:
    """This rank's own result of `work`, which every rank of the axis does; where it is a MeshwrightError on one, that error
    is raised on all of them (of the lowest such rank). Collective: one integer is reduced, and an error broadcast.

    Without it a rank that fails would leave while the others wait for it in the next collective.
    """
    result: T | None = None
    failure: MeshwrightError | None = None
    try:
        result = work()
    except MeshwrightError as error:
        failure = error
    first = torch.tensor(axis.size if failure is None else axis.rank)
    all_reduce(first, axis, "min", label="share_errors")
    if first < axis.size:
        _tell_from(int(first), lambda: _raise(failure), axis)
    return result  # type: ignore[return-value]  # no rank has failed


def gather_to_first(obj: Any, axis: Axis) -> list[Any]:
    """On the axis's rank 0 every rank's picklable object, in the axis's order; on the others an empty list. Collective.

    Bytes: this rank's object, sent once (rank 0 receives them all).
    """
    if axis.size == 1:
        return [obj]
    check_agreement(axis, "gather_to_first", "", None)
    axis.traffic.record("gather_to_first", len(pickle.dumps(obj)) if axis.rank else 0)
    gathered = [None] * axis.size if axis.rank == 0 else None
    dist.gather_object(obj, gathered, group=axis.group, group_dst=0)
    return gathered or []


def _tell_from(source: int, work: Callable[[], T], axis: Axis) -> T:
    outcome: T | MeshwrightError | None = None
    if axis.rank == source:
        try:
            outcome = work()
        except MeshwrightError as error:
            outcome = error
    if axis.size > 1:
        check_agreement(axis, "tell", "", None)
        axis.traffic.record("tell", len(pickle.dumps(outcome)) if axis.rank == source else 0)
        told = [outcome]
        dist.broadcast_object_list(told, group=axis.group, group_src=source)
        outcome = told[0]
    if isinstance(outcome, MeshwrightError):
        raise outcome
    return outcome  # type: ignore[return-value]  # what `work` has returned on the source


def _raise(error: MeshwrightError | None) -> None:
    assert error is not None, "only a rank that has failed tells its error"
    raise error
