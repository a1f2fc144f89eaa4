"""Process groups of a rank: which it makes for its axes, over which backends, and what each is for.

Two axes over the same ranks share a group: each would cost threads, sockets and, over NCCL, memory on the GPU. NCCL runs the
operations of one communicator in turn: in backward a gather, which computation waits for, would queue behind a reduction, which
nobody waits for; and tokens on their way to experts behind the gathers of units that come next. So reduce-scatters, tokens, and
sums over the levels of an axis (within nodes, between nodes) have communicators of their own.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from framework.mesh.topology import LEVELS, Axis

# Over these tokens go to experts and back, by all-to-alls.
TOKEN_AXES = ("ep", "ep_inner", "ep_outer")
# Over these parts of parameters are gathered.
SHARD_AXES = ("shard", "expert_shard")

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Backends:
    """Backends that carry messages between ranks, by torch's names."""

    world: str
    axes: str
    """Backend of the groups of all axes but the world's."""
    scatter: str | None = None
    """Backend of second groups over axes of shards, for their reduce-scatters, and over TOKEN_AXES; None where operations do not
    queue."""
    is_lazy: bool = False
    """gloo connects two ranks when they first talk, and not every pair at once."""
    is_staged: bool = False
    """Tensors of a GPU go through host memory."""


def choose_backends(device_type: str, is_debug: bool, backend: Backend | None = None) -> Backends:
    """NCCL for tensors of GPUs, gloo for all else.

    On GPUs gloo carries Python objects and small sums only, over the world, and connects a pair of ranks when it first talks: all
    pairs of thousands of ranks would exceed a process's descriptors, and every rank would read every other's address from the
    store. On CPUs it carries tensors between every two ranks of an axis, and connects them at once: a rank whose peer has died
    then hears of it at once.

    is_debug: ranks compare what they start over every axis (`agreement`), which takes gloo there. backend: as for `connect`.
    """
    if (backend or ("nccl" if device_type == "cuda" else "gloo")) == "gloo":
        return Backends(world="gloo", axes="gloo", is_staged=device_type == "cuda")
    # One group of two backends: torch takes that of a tensor's device, so objects go over gloo beside NCCL.
    both = "cpu:gloo,cuda:nccl"
    return Backends(world=both, axes=both if is_debug else "nccl", scatter="nccl", is_lazy=True)


@dataclass(frozen=True)
class GroupPlan:
    """One process group. axis: the first that it is for. use: `scatter`, `tokens` or `level` of a second one. is_urgent:
    computation waits for its gathers, so its kernels go before others. only_messages: as `carry_only_messages`."""

    axis: str
    ranks: tuple[int, ...]
    backend: str
    use: str = ""
    is_urgent: bool = False
    only_messages: bool = False

    @property
    def name(self) -> str:
        """A name that no other group of the run has."""
        return f"{self.use} {self.axis} {self.ranks[0]}".lstrip()


def carry_only_messages(names: Iterable[str]) -> bool:
    """Whether a group of axes with such names carries none but messages between two ranks, and all-to-alls."""
    return set(names) <= {"pp", *TOKEN_AXES}


def use_of(name: str) -> str:
    """The use of the group that an axis takes, where there are second groups."""
    return "tokens" if name in TOKEN_AXES else "level" if name in LEVELS else ""


def plan_groups(axes: Mapping[str, Axis], backends: Backends) -> Iterator[GroupPlan]:
    """The groups of a rank, in the order in which all ranks make theirs: one for each distinct set of more than one rank, the
    world first; then those of reduce-scatters and of tokens."""
    of_ranks: dict[tuple[int, ...], list[str]] = {}
    for axis in axes.values():
        if axis.size > 1 and axis.name not in LEVELS:
            of_ranks.setdefault(axis.ranks, []).append(axis.name)
    for ranks, names in of_ranks.items():
        backend = backends.axes if names[0] != "world" else backends.world
        gathers = "nccl" in backend and any(name in SHARD_AXES for name in names)
        yield GroupPlan(names[0], ranks, backend, "", gathers, carry_only_messages(names))
    levels = {axes[name].ranks: name for name in reversed(LEVELS) if axes[name].size > 1}
    for ranks, name in reversed(levels.items()):
        if backends.scatter is not None or ranks not in of_ranks:
            yield GroupPlan(name, ranks, backends.axes, use_of(name) if backends.scatter is not None else "")
    if backends.scatter is None:
        return
    for axis in _distinct(axes, SHARD_AXES):
        yield GroupPlan(axis.name, axis.ranks, backends.scatter, "scatter")
    for axis in _distinct(axes, TOKEN_AXES):
        # On the axes' backends: in debug mode ranks compare over them what they start, by CPU tensors.
        yield GroupPlan(axis.name, axis.ranks, backends.axes, "tokens", only_messages=True)


def _distinct(axes: Mapping[str, Axis], names: Iterable[str]) -> list[Axis]:
    """The first of the named axes over each set of more than one rank."""
    found: dict[tuple[int, ...], Axis] = {}
    for name in names:
        if axes[name].size > 1:
            found.setdefault(axes[name].ranks, axes[name])
    return list(found.values())
