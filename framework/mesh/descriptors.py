"""Descriptors: how many sockets a rank opens to connect, and the process's limit on open files, which they count against."""

import resource
from math import ceil, log2

from framework.errors import RecipeError
from framework.mesh.topology import Topology

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
    # Of a barrier's and a broadcast's tree 2 log2 n pairs; rank 0's gathers need them all.
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
