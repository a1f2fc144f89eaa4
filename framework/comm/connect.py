"""Connect: from a Topology to a Mesh whose axes have process groups; and the launcher's environment of this rank.

store     ranks meet there: over TCP in rank 0's process, or in a file
compare   fingerprints, before anything is made that would have to be closed
world     the first group; then one for each other distinct set of ranks that this rank is in
start     NCCL, group by group, in one order on all ranks
"""

import os
import platform
import resource
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import ceil, log2
from typing import Any

import torch
import torch.distributed as dist

from framework.comm.communicator import Communicator, DeviceProgress, Waits, link_levels
from framework.comm.groups import (
    SHARD_AXES,
    Backend,
    Backends,
    GroupPlan,
    carry_only_messages,
    choose_backends,
    compare_fingerprints,
    connect_limit_s,
    persist,
    plan_groups,
    use_of,
)
from framework.errors import ConnectionFailed, NodeError, RecipeError, TopologyError
from framework.host import stay_near
from framework.mesh.topology import Topology
from framework.output import first_line
from framework.torch_private import connect_eagerly, make_group_in_store, restart_group_names, set_group_timeout

# The variable in which a launcher gives each rank the secret of this start.
SECRET = "MESHWRIGHT_SECRET"
# Where ranks of one machine meet: nobody else reaches them there. gloo and NCCL would listen where the name of the machine leads.
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Variables with which SLURM says that it binds GPUs to tasks, so that each rank sees its own as the first and only one.
BOUND_GPUS = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK")


@dataclass(frozen=True, eq=False)
class Mesh:
    """One rank's place in the world: the topology, its device, and a Communicator for each axis, connected until `close`. store:
    in which the ranks have met; None in a world of one rank."""

    topology: Topology
    rank: int
    device: torch.device
    axes: dict[str, Communicator]
    store: dist.Store | None = None

    def axis(self, name: str) -> Communicator:
        """The communicator of an axis, one of `topology.AXIS_NAMES`."""
        return self.axes[name]

    @property
    def waits(self) -> Waits:
        """The operation, if any, that the thread that communicates over the mesh waits for."""
        return self.axes["world"].waits

    def close(self) -> None:
        """Give the process groups back. Collective: every rank of the world calls it. AssertionError where an operation is open.

        The barrier keeps a fast rank from closing connections that a slow one still uses: without it gloo aborts at
        times.
        """
        self.waits.check_ended("the run")
        for each in (held for axis in self.axes.values() for held in axis.held.values()):
            each.destroy()
        # destroy_process_group without a group is an error, and a world of one rank has none.
        if self.topology.world > 1:
            dist.barrier()
            dist.destroy_process_group()


def disconnect() -> None:
    """Close the connections of a mesh that was not closed, without a word to the other ranks: those that wait for this one
    wake up with an error."""
    if dist.is_initialized():
        dist.destroy_process_group()


def connect(
    topology: Topology,
    device: torch.device,
    rendezvous: str | None = None,
    rank: int | None = None,
    timeout_s: float = 1800,
    check_s: float | None = None,
    fingerprint: Mapping[str, str] | None = None,
    backend: Backend | None = None,
) -> Mesh:
    """Join the other ranks of the world and return this rank's mesh. A world of one rank has no process group at all.

    rendezvous None: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment, as launchers set them;
    else a URL such as `file:///tmp/x` (a file that does not exist yet), with an explicit rank.
    backend None: NCCL for GPUs, gloo for CPUs; gloo on GPUs is slow and works where ranks share one.
    Collectives that take longer than `timeout_s` fail. check_s: the debug mode of `comm/collectives.py`. fingerprint: what must
    be equal on all ranks, compared before any group is made. Raises TopologyError when the world has not the topology's size,
    ConnectionFailed when a rank does not come within `timeout_s`, RanksDiffer on all ranks when fingerprints differ.
    """
    # Before any group: NCCL and `torch.zeros(device="cuda")` take the current device, which is the first GPU in every process.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = _agree_on_rank(topology, rendezvous, rank)
    axes = link_levels({name: Communicator(axis) for name, axis in topology.axes(rank).items()})
    store = None
    if topology.world > 1:
        timeout, backends = timedelta(seconds=timeout_s), choose_backends(device.type, check_s is not None, backend)
        # First, because a process that runs out of descriptors while it connects leaves the others waiting.
        allow_descriptors(count_sockets(topology, rank, backends.is_lazy))
        secret = read_secret()
        if rendezvous is not None and rendezvous.startswith("file://"):  # on one machine, among ranks of one user
            os.environ |= {name: LOOPBACK for name in INTERFACES if name not in os.environ}
        store = _open_store(rendezvous or "env://", rank, topology.world, timeout)
        if isinstance(store, dist.FileStore):
            # Made by rank 0: every process that may read the file knows it.
            if rank == 0:
                store.set("secret", secrets.token_hex(16))
            secret = store.get("secret")
        if fingerprint is not None:
            compare_fingerprints(dist.PrefixStore("fingerprint", store), fingerprint, rank, topology.world, timeout)
        axes = join_axes(topology, rank, backends, store, timeout, check_s, secret)
        if "nccl" in backends.world:
            _start_nccl(axes.values(), device)
    return Mesh(topology, rank, device, axes, store)


def connect_beside(mesh: Mesh, name: str) -> Communicator:
    """`world` over a gloo group of its own, for a thread beside training: in one group the collectives of two threads would meet
    in any order, and NCCL's would queue behind each other. Collective, once for each name; closed with the mesh. Raises
    ConnectionFailed as `connect` does.

    On GPUs two ranks are connected when they first talk, as over the world's own group.
    """
    world = mesh.axis("world")
    if world.size == 1:
        return Communicator(world.axis)
    assert mesh.store is not None, "a mesh that `connect` has not made cannot be connected again"
    is_lazy = mesh.device.type == "cuda"
    sockets = count_sockets(mesh.topology, mesh.rank, is_lazy)
    allow_descriptors(sockets + count_group_sockets(world.size, mesh.rank, is_lazy))
    connect_s = connect_limit_s(world.size)
    create = partial(_create_group, GroupPlan(name, world.ranks, "gloo"), mesh.rank, timedelta(seconds=connect_s))
    with _gloo_connects_lazily(is_lazy):
        group = persist(create, dist.PrefixStore(name, mesh.store), world.size, world.timeout, connect_s)
    set_group_timeout(world.timeout, group)
    return Communicator(world.axis, group, timeout=world.timeout, secret=world.secret)


def open_store_beside() -> tuple[dist.Store, str]:
    """A connection of its own to the store in which the launcher's ranks meet, and who hosts that: for a thread beside training.

    In here and in every later question it waits for the host for as long as it takes, whatever time-outs say (torch 2.13: a
    TCPStore's `add` waits for ever for a stopped process): only for a thread that nobody waits for. A world of one rank has a
    store to itself. Raises ConnectionFailed where the launcher has not said where that is.
    """
    if launched_place()[1] == 1:
        return dist.HashStore(), "this rank"
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConnectionFailed("MASTER_ADDR and MASTER_PORT, which launchers set, do not say where ranks meet")
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, None, False, timedelta(days=1), wait_for_workers=False)
    return dist.PrefixStore("watch", store), f"the launcher on {address}" if is_agents else f"rank 0 on {address}"


def read_secret() -> bytes:
    """The secret of this start of the run, which its launcher has given to each rank; empty without a launcher of ours."""
    return os.environ.get(SECRET, "").encode()


def launched_place() -> tuple[int, int]:
    """This process's rank and the number of ranks, as the launcher says; 0 of 1 without one."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _agree_on_rank(topology: Topology, rendezvous: str | None, rank: int | None) -> int:
    """This process's rank, once the launcher's world is seen to be the topology's."""
    # A rendezvous is for tests, benchmarks and `verify`, which start their ranks themselves: no launcher has numbered these.
    if rendezvous is not None:
        if rank is None:
            raise TopologyError(f"rendezvous={rendezvous} needs an explicit rank")
        launched_world = topology.world
    else:
        rank, launched_world = launched_place()
    if launched_world != topology.world or not 0 <= rank < topology.world:
        raise TopologyError(
            f"rank {rank} of {launched_world} launched, but pp x dp x cp x tp = {topology.pp} x {topology.dp} x"
            f" {topology.cp} x {topology.tp} = {topology.world}: launch {topology.world} ranks or change the degrees"
        )
    return rank


def _open_store(url: str, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The store in which ranks meet; over TCP, rank 0 waits here for the others."""
    try:
        return next(dist.rendezvous(url, rank, world, timeout=timeout))[0]
    except RuntimeError as error:
        raise ConnectionFailed(
            f"the store of rank 0, in which {world} ranks meet, cannot be reached, or not all have come to it:"
            f" see the logs of the others ({first_line(error)})"
        ) from error


def join_axes(
    topology: Topology,
    rank: int,
    backends: Backends,
    store: dist.Store,
    timeout: timedelta,
    check_s: float | None = None,
    secret: bytes = b"",
) -> dict[str, Communicator]:
    """This rank's communicators by axis, with a process group for each distinct set of more than one rank. Collective.

    A rank creates only its own groups, so that thousands of ranks do not create each other's. Members of a group agree
    on whether an earlier axis had the same ranks, and all go through the axes in one order: nobody waits in a cycle.
    """

    def join(plan: GroupPlan) -> Any:
        connect_s = connect_limit_s(len(plan.ranks))
        build = partial(_create_group, plan, rank, timedelta(seconds=connect_s))
        with _gloo_connects_lazily(backends.is_lazy):
            group = persist(build, dist.PrefixStore(plan.name, store), len(plan.ranks), timeout, connect_s)
        # Made with a short timeout, so that a hang while connecting is tried again; collectives wait for slow ranks far longer.
        set_group_timeout(timeout, group)
        return group

    axes = topology.axes(rank)
    joined = {(plan.use, plan.ranks): join(plan) for plan in plan_groups(axes, backends)}
    # One of all axes: the thread that trains waits over one of them at a time, or has its device wait.
    waits = Waits(DeviceProgress() if "nccl" in backends.world else None)
    communicators = {
        name: Communicator(
            axis,
            joined.get((use_of(name), axis.ranks), joined.get(("", axis.ranks))),
            joined.get(("scatter", axis.ranks)) if name in SHARD_AXES else None,
            check_s=check_s,
            staged=backends.is_staged,
            timeout=timeout,
            waits=waits,
            secret=secret,
        )
        for name, axis in axes.items()
    }
    return link_levels(communicators)


def _create_group(plan: GroupPlan, rank: int, timeout: timedelta, attempt: dist.Store) -> Any:
    """In a store of its own: `new_group` would find what a failed attempt has left there, addresses where nobody listens."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if plan.is_urgent else None
    if plan.name == "world 0":
        # torch names it by a counter, and its keys in the store after the name. The counter goes up where an attempt fails in
        # here, and back to 0 where it fails later: ranks would look for each other under two names, in all attempts that follow.
        restart_group_names()
        dist.init_process_group(plan.backend, None, timeout, len(plan.ranks), rank, attempt, pg_options=options)
        return dist.group.WORLD
    return make_group_in_store(plan.ranks, rank, plan.backend, attempt, plan.name, options, timeout)


@contextmanager
def _gloo_connects_lazily(is_lazy: bool) -> Iterator[None]:
    """Tell torch how gloo groups that are made meanwhile connect: two ranks when they first talk, or every pair at once."""
    name = "TORCH_GLOO_LAZY_INIT"
    former = os.environ.get(name)
    os.environ[name] = str(int(is_lazy))
    try:
        yield
    finally:
        del os.environ[name]
        if former is not None:
            os.environ[name] = former


def _start_nccl(axes: Iterable[Communicator], device: torch.device) -> None:
    """Make NCCL build each communicator now, in one order: built lazily inside a point-to-point call it would wait for
    ranks that take no part in that call."""
    names: dict[Any, list[str]] = {}
    for axis in axes:
        for group in axis.groups:
            names.setdefault(group, []).append(axis.name if group is axis.group else f"scatter {axis.name}")
    for group, uses in names.items():
        if carry_only_messages(uses):
            # No all-reduce: it would connect rings and trees, with buffers of their own, that no message goes through.
            connect_eagerly(group, device)
        else:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def choose_device(kind: str) -> torch.device:
    """This rank's device, of the kind that the launcher has written into the recipe: `cpu`, or `cuda`, the GPU of its local rank.

    Raises NodeError where this machine shows too few GPUs: it may not train on something else than the other ranks.
    """
    assert kind in ("cpu", "cuda"), f"launch.device={kind} reached a rank: the launcher resolves it"
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device(
        "cuda", _gpu_index(local_rank(), count, is_bound=any(name in os.environ for name in BOUND_GPUS))
    )


def stay_beside(device: torch.device) -> None:
    """Have this rank's threads that are still to come run on cores beside its GPU."""
    if device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(device)
        stay_near(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")


def _gpu_index(local_rank: int, count: int, is_bound: bool) -> int:
    """The index of a rank's GPU among the node's `count` visible ones. is_bound: SLURM shows each rank its own only."""
    if count == 1 and is_bound:
        return 0
    if local_rank >= count:
        raise NodeError(
            f"launch.device=cuda, but torch sees {count or 'no'} GPU{'s' if count > 1 else ''} on node {platform.node()}, and"
            f" this is its rank {local_rank}: `nvidia-smi` there may say why; to train without GPUs: launch.device=cpu"
        )
    return local_rank


def local_rank() -> int:
    """This process's number among the ranks of its machine, as the launcher says; 0 without a launcher."""
    # torchrun's variable first: under `srun torchrun` SLURM's numbers are those of the agents, not of the ranks.
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def num_nodes() -> int:
    """Machines of this run, as the launcher says; where it does not, as many as nodes like this one make."""
    # Unknown to a launcher that sets RANK and WORLD_SIZE only: then nodes are taken to be alike.
    alike = int(os.environ.get("WORLD_SIZE", "1")) // ranks_per_node()
    return int(os.environ.get("GROUP_WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_NODES", alike)))


def node_name() -> str:
    """This machine, by a name that none of the run's others has and that it keeps for the next start."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def ranks_per_node() -> int:
    """Ranks on this machine, as the launcher says; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))


# Files of data, logs and libraries, and NCCL's own sockets, beside those that are counted here.
OTHERS = 256
# A soft limit is raised so far where the hard one allows it. Some programs visit every possible descriptor when they start.
ENOUGH = 65_536


def count_sockets(topology: Topology, rank: int, is_lazy: bool) -> int:
    """Number of sockets that a rank opens for the store and for gloo. is_lazy: gloo is on the world only, for Python objects, and
    connects pairs as they talk.

    Rank 0 keeps the store, to which everyone connects, and everyone's objects are gathered there.
    """
    world = topology.world
    own = world if rank == 0 else 1
    if is_lazy:
        return own + count_group_sockets(world, rank, is_lazy)
    groups = {axis.ranks for axis in topology.axes(rank).values() if axis.size > 1}
    return own + sum(count_group_sockets(len(ranks), rank, is_lazy) for ranks in groups)


def count_group_sockets(size: int, rank: int, is_lazy: bool) -> int:
    """Number of sockets of a gloo group of `size` ranks: a listener, and one for each rank that it talks to. rank: within a lazy
    group."""
    # A barrier's and a broadcast's tree connect 2 log2 n pairs; rank 0's gathers need all.
    return 1 + (min(size - 1, 2 * ceil(log2(size))) if is_lazy and rank else size - 1)


def allow_descriptors(num_sockets: int) -> None:
    """Raise this process's soft limit on open files, as far as is enough. RecipeError where the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = num_sockets + OTHERS
    if hard != unlimited and hard < needed:
        raise RecipeError(
            f"a rank of this layout opens {num_sockets} sockets, and this process may have {hard} files open (`ulimit -Hn`):"
            f" have the limit raised to {max(ENOUGH, needed)} (LimitNOFILE of slurmd, or limits.conf), or use fewer ranks"
        )
    enough = max(ENOUGH, needed) if hard == unlimited else min(hard, max(ENOUGH, needed))
    if soft != unlimited and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
