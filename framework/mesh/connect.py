"""Connect: from a Topology to a Mesh whose axes have process groups. The only file of this folder that needs torch."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from framework.errors import TopologyError
from framework.mesh.axis import Axis
from framework.mesh.topology import AXIS_NAMES, Topology


@dataclass(frozen=True, eq=False)
class Mesh:
    """The axes of one rank. Its process groups live until `close`."""

    topology: Topology
    rank: int
    device: torch.device
    axes: dict[str, Axis]

    def axis(self, name: str) -> Axis:
        """The axis of that name: one of `topology.AXIS_NAMES`."""
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
) -> Mesh:
    """Join the other ranks of the world and return this rank's mesh. A world of one rank has no process group at all.

    rendezvous None: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment, as launchers set them;
    else a URL such as `file:///tmp/x` (a file that does not exist yet), with an explicit rank.
    Collectives that take longer than `timeout_s` fail. check_s: the debug mode of `comm/agreement.py`. Raises TopologyError
    when the world has not the topology's size.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = _agree_on_rank(topology, rendezvous, rank)
    if topology.world > 1:
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous or "env://",
            rank=rank,
            world_size=topology.world,
            timeout=timedelta(seconds=timeout_s),
        )
    groups = _create_groups(topology, rank, timedelta(seconds=timeout_s))
    if device.type == "cuda":
        _start_communicators(groups, device)
    axes = {}
    for name in AXIS_NAMES:
        ranks = topology.ranks(name, rank)
        axes[name] = Axis(name, len(ranks), topology.index(name, rank), ranks, groups.get(ranks), check_s=check_s)
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


def _create_groups(topology: Topology, rank: int, timeout: timedelta) -> dict[tuple[int, ...], Any]:
    """This rank's process groups by their ranks: one for each distinct set of more than one rank.

    A rank creates only its own groups, so that thousands of ranks do not create each other's. Members of a group agree
    on whether an earlier axis had the same ranks, and all go through the axes in one order: nobody waits in a circle.
    """
    groups: dict[tuple[int, ...], Any] = {}
    for name in AXIS_NAMES:
        ranks = topology.ranks(name, rank)
        if len(ranks) == 1 or ranks in groups:
            continue
        if len(ranks) == topology.world:
            groups[ranks] = dist.group.WORLD
        else:
            groups[ranks] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return groups


def _start_communicators(groups: dict[tuple[int, ...], Any], device: torch.device) -> None:
    """Make NCCL build each communicator now, in one order: built lazily inside a point-to-point call it would wait for
    ranks that take no part in that call."""
    for group in groups.values():
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def local_rank() -> int:
    """This process's number among the ranks of its machine, as the launcher says; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def ranks_per_node() -> int:
    """Ranks on this machine, as the launcher says; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
