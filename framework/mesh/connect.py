"""Connect: from a Topology to a Mesh whose axes have process groups. The only file of this folder that needs torch."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from framework.errors import ConnectionFailed, RecipeError, TopologyError
from framework.mesh.axis import Axis
from framework.mesh.topology import AXIS_NAMES, Topology

# gloo now and then hangs while it connects ranks that are all there (once in some ten thousand times on one machine). So all
# ranks first arrive, however late; connecting then may take so long, and is tried again from the start so many times.
CONNECT_S = 60.0
CONNECT_ATTEMPTS = 3


@dataclass(frozen=True, eq=False)
class Mesh:
    """The axes of one rank. Its process groups live until `close`."""

    topology: Topology
    rank: int
    device: torch.device
    axes: dict[str, Axis]

    def axis(self, name: str) -> Axis:
        """The axis of that name: one of `topology.AXIS_NAMES`, or `ends`."""
        if name not in self.axes:
            raise TopologyError(f"no axis {name!r}: the axes are {', '.join(AXIS_NAMES)}")
        return self.axes[name]

    def close(self) -> None:
        """Give the process groups back. Collective: every rank of the world calls it.

        The barrier keeps a fast rank from closing connections that a slow one still uses: without it gloo aborts at
        times.
        """
        if self.topology.world > 1:
            dist.barrier()
            dist.destroy_process_group()


def connect(
    topology: Topology,
    device: torch.device,
    rendezvous: str | None = None,
    rank: int | None = None,
    timeout_s: float = 1800,
    check_s: float | None = None,
    backend: Literal["gloo", "nccl"] | None = None,
) -> Mesh:
    """Join the other ranks of the world and return this rank's mesh. A world of one rank has no process group at all.

    rendezvous None: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment, as launchers set them;
    else a URL such as `file:///tmp/x` (a file that does not exist yet), with an explicit rank.
    backend None: NCCL for GPUs, gloo for CPUs; gloo on GPUs is slow and works where ranks share one.
    Collectives that take longer than `timeout_s` fail. check_s: the debug mode of `comm/agreement.py`. Raises TopologyError
    when the world has not the topology's size, ConnectionFailed when a rank does not come within `timeout_s`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = _agree_on_rank(topology, rendezvous, rank)
    has_nccl = device.type == "cuda" if backend is None else backend == "nccl"
    groups = _create_groups(topology, rank, has_nccl, rendezvous or "env://", timedelta(seconds=timeout_s))
    if has_nccl:
        _start_communicators(groups, device)
    axes = {}
    for name, ranks in topology.groups(rank).items():
        group = groups.get(ranks)
        staged = device.type == "cuda" and not has_nccl
        axes[name] = Axis(name, len(ranks), ranks.index(rank), ranks, group, check_s=check_s, staged=staged)
    if has_nccl and axes["shard"].size > 1:
        axes["shard"] = replace(axes["shard"], scatter_group=_create_scatter_group(axes["shard"], device))
    return Mesh(topology, rank, device, axes)


def _agree_on_rank(topology: Topology, rendezvous: str | None, rank: int | None) -> int:
    """This process's rank, once the launcher's world is seen to be the topology's."""
    if rendezvous is not None:
        if rank is None:
            raise TopologyError(f"rendezvous={rendezvous} needs an explicit rank")
        launched_world = topology.world
    else:
        launched_world = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", "0"))
    if launched_world != topology.world or not 0 <= rank < topology.world:
        raise TopologyError(
            f"rank {rank} of {launched_world} launched, but pp x dp x cp x tp = {topology.pp} x {topology.dp} x"
            f" {topology.cp} x {topology.tp} = {topology.world}: launch {topology.world} ranks or change the degrees"
        )
    return rank


def _create_groups(
    topology: Topology, rank: int, has_nccl: bool, url: str, timeout: timedelta
) -> dict[tuple[int, ...], Any]:
    """This rank's process groups by their ranks: one for each distinct set of more than one rank.

    A rank creates only its own groups, so that thousands of ranks do not create each other's. Members of a group agree
    on whether an earlier axis had the same ranks, and all go through the axes in one order: nobody waits in a circle.
    """
    groups: dict[tuple[int, ...], Any] = {}
    if topology.world == 1:
        return groups
    backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
    store = next(dist.rendezvous(url, rank, topology.world, timeout=timeout))[0]
    connecting = timedelta(seconds=CONNECT_S)

    def create_world(attempt: dist.Store) -> Any:
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=topology.world, timeout=connecting)
        return dist.group.WORLD

    for name, ranks in topology.groups(rank).items():
        if len(ranks) == 1 or ranks in groups:
            continue
        if len(ranks) == topology.world:
            create = create_world
        else:
            create = partial(_create_subgroup, ranks, connecting)
        groups[ranks] = persist(create, dist.PrefixStore(f"{name} {ranks[0]}", store), len(ranks), timeout)
        _set_pg_timeout(timeout, groups[ranks])
    return groups


def _create_subgroup(ranks: tuple[int, ...], timeout: timedelta, _attempt: dist.Store) -> Any:
    """Its attempts are kept apart by torch, which numbers the groups of the same ranks."""
    return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)


def persist(
    create: Callable[[dist.Store], Any],
    store: dist.Store,
    num_ranks: int,
    timeout: timedelta,
    connect_s: float = CONNECT_S,
) -> Any:
    """The process group that `create` makes with a fresh store, once it has succeeded on all of `num_ranks` ranks; on all of
    them anew if on one it has not. Collective. Raises ConnectionFailed when a rank does not come within `timeout`, or when
    the last attempt fails. connect_s: how long the slowest may take once all have come."""
    for number in range(CONNECT_ATTEMPTS):
        attempt = dist.PrefixStore(str(number), store)
        _meet(attempt, "arrived", num_ranks, timeout)
        group, reason = None, None
        try:
            group = create(attempt)
            _meet(attempt, "connected", num_ranks, timedelta(seconds=connect_s))
            return group
        except (RuntimeError, ConnectionFailed) as error:
            reason = error
            if group is not None:
                dist.destroy_process_group(group)
    raise ConnectionFailed(f"{num_ranks} ranks could not be connected in {CONNECT_ATTEMPTS} attempts: {reason}")


def _meet(store: dist.Store, place: str, num_ranks: int, timeout: timedelta) -> None:
    """Return once all ranks have come to the place. The last to come tells the others."""
    if store.add(f"{place} number", 1) == num_ranks:
        store.set(place, "all")
    try:
        store.wait([place], timeout)
    except RuntimeError as error:
        count = store.add(f"{place} number", 0)
        raise ConnectionFailed(
            f"only {count} of {num_ranks} ranks have {place} within {timeout.total_seconds():.0f} s: see the logs of the others"
        ) from error


def _start_communicators(groups: dict[tuple[int, ...], Any], device: torch.device) -> None:
    """Make NCCL build each communicator now, in one order: built lazily inside a point-to-point call it would wait for
    ranks that take no part in that call."""
    for group in groups.values():
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _create_scatter_group(shard: Axis, device: torch.device) -> Any:
    """A second communicator over the shard axis, for its reduce-scatters. NCCL runs the operations of one communicator in turn:
    in backward a gather, which computation waits for, would queue behind a reduction, which nobody waits for."""
    group = dist.new_group(list(shard.ranks), backend="nccl", use_local_synchronization=True)
    _start_communicators({shard.ranks: group}, device)
    return group


def choose_device(device: str) -> torch.device:
    """This rank's device: the one of its local rank if there are GPUs, unless the recipe says otherwise."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RecipeError("launch.device=cuda, but torch sees no GPU here: use launch.device=auto or cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def local_rank() -> int:
    """This process's number among the ranks of its machine, as the launcher says; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def num_nodes() -> int:
    """Machines of this run, as the launcher says; where it does not, as many as nodes like this one make."""
    alike = int(os.environ.get("WORLD_SIZE", "1")) // ranks_per_node()
    return int(os.environ.get("GROUP_WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_NODES", alike)))


def ranks_per_node() -> int:
    """Ranks on this machine, as the launcher says; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
