"""Process groups of a rank: which it makes for its axes, over which backends, what each is for; and how ranks meet to make them.

Two axes over the same ranks share a group: each would cost threads, sockets and, over NCCL, memory on the GPU. NCCL runs the
operations of one communicator in turn: in backward a gather, which computation waits for, would queue behind a reduction, which
nobody waits for; and tokens on their way to experts behind the gathers of units that come next. So reduce-scatters, tokens, and
sums over the levels of an axis (within nodes, between nodes) have communicators of their own.

Ranks meet in a store: all have come, or all give up. There `compare_fingerprints` settles that all run the same software, and
`persist` makes a process group anew on all ranks where one of them has failed.
"""

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from framework.errors import ConnectionFailed, RanksDiffer
from framework.mesh.topology import LEVELS, Axis
from framework.torch_private import carries_cpu_tensors

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

    is_debug: ranks compare what they start over every axis (`collectives`), which takes gloo there. backend: as for `connect`.
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


# gloo now and then hangs while it connects ranks that are all there (once in some ten thousand times on one machine). So all
# ranks first arrive, however late; connecting then may take so long, and is tried again from the start so many times.
CONNECT_S = 60.0
# And so much longer for each rank: the store and NCCL's root answer ranks one after another, in some milliseconds each.
CONNECT_S_PER_RANK = 0.02
CONNECT_ATTEMPTS = 3
# Outcome of a meeting of all ranks: the first word of its entry in the store.
MET, GIVEN_UP = "met ", "given up "
# Explanations that the last rank to be compared reads from the store.
DIFFERENCES_SHOWN = 8


def connect_limit_s(num_ranks: int) -> float:
    """Seconds that the slowest of so many ranks may take to connect once all have come."""
    return CONNECT_S + CONNECT_S_PER_RANK * num_ranks


def compare_fingerprints(store: dist.Store, mine: Mapping[str, str], rank: int, world: int, timeout: timedelta) -> None:
    """Return when every rank's fingerprint is seen to be rank 0's. Collective. Else RanksDiffer, the same on all ranks.

    Each rank reads one fingerprint and one verdict, whatever the world's size.
    """
    if rank == 0:
        store.set("first", json.dumps(dict(mine)))
    meet(store, "arrived", world, timeout)
    # The meeting is over, so rank 0's is there: `get` of a key that is not would wait for it.
    difference = describe_difference(mine, json.loads(store.get("first")))
    if difference:
        number = store.add("number that differ", 1)
        if number <= DIFFERENCES_SHOWN:
            store.set(f"differs {number}", f"rank {rank} on {platform.node()}: {difference}")

    # The last rank to come counts for all: each then reads one verdict, and not what thousands have to say.
    def conclude() -> str:
        count = store.add("number that differ", 0)
        shown = [store.get(f"differs {number + 1}").decode() for number in range(min(count, DIFFERENCES_SHOWN))]
        return json.dumps([count, shown])

    count, shown = json.loads(meet(store, "compared", world, timeout, conclude))
    if count:
        raise RanksDiffer(explain_differences(shown, count, world))


# Fixes, by the name of a difference.
FIXES = {
    "recipe": "recipe.yaml of the run was changed or is not yet seen while ranks start (a file system's cache): start again",
    "code": "ranks import different copies of Meshwright: one installation, or one image, on all nodes",
}
FIX = "nodes have different software: one environment, or one image, on all of them"


def describe_difference(mine: Mapping[str, str], first: Mapping[str, str]) -> str:
    """The differences of `mine` from `first`, rank 0's, as one line; empty if there are none."""
    names = [*first, *(name for name in mine if name not in first)]
    differs = [name for name in names if mine.get(name) != first.get(name)]
    return ", ".join(f"{name} {mine.get(name, 'none')} (rank 0: {first.get(name, 'none')})" for name in differs)


def explain_differences(shown: Sequence[str], count: int, world: int) -> str:
    """The error of a world in which ranks differ: how many do, some of them in detail, and what to do about it.

    shown: descriptions of some of the `count` ranks that differ, each `rank 3 on n1: torch 2.12.0 (rank 0: 2.13.0), ...`.
    """
    words = {part.split()[0] for line in shown for part in line.partition(": ")[2].split(", ")}
    more = [f"  and {count - len(shown)} more"] if count > len(shown) else []
    fixes = dict.fromkeys(FIXES.get(word, FIX) for word in sorted(words))
    lines = [f"{count} of {world} ranks differ from rank 0", *(f"  {line}" for line in shown), *more]
    return "\n".join([*lines, *(f"-> {fix}" for fix in fixes)])


def persist(
    create: Callable[[dist.Store], Any], store: dist.Store, num_ranks: int, timeout: timedelta, connect_s: float
) -> Any:
    """The process group that `create` makes with a fresh store, once it has succeeded on all of `num_ranks` ranks; on all of
    them anew if on one it has not. Collective. Raises ConnectionFailed when a rank does not come within `timeout`, or when
    the last attempt fails. connect_s: how long the slowest may take once all have come."""
    for number in range(CONNECT_ATTEMPTS):
        # A store of its own for each attempt: what a failed one has left there would be taken for the other ranks' addresses.
        attempt = dist.PrefixStore(str(number), store)
        meet(attempt, "arrived", num_ranks, timeout)
        group, reason = None, None
        try:
            group = create(attempt)
            _greet(group)
            # A rank whose own group is made may not go on by itself: another may have failed, and would start anew alone.
            meet(attempt, "connected", num_ranks, timedelta(seconds=connect_s))
            return group
        except (RuntimeError, ConnectionFailed) as error:
            reason = error
            with suppress(RuntimeError):  # a store that is gone is said when ranks meet for the next attempt
                _decide(attempt, "connected", f"{GIVEN_UP}{error}")  # the others need not wait for this rank
            if group is not None:
                dist.destroy_process_group(group)
    raise ConnectionFailed(
        f"{num_ranks} ranks could not be connected in {CONNECT_ATTEMPTS} attempts: {reason}. Where nodes have several"
        " networks, name the one to use: launch.environment.GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )


def _greet(group: Any) -> None:
    """Use gloo for the first time, where the group has it. Lazy pairs of a barrier (2 log2 n of a rank's n-1, all of up to 5
    ranks') are connected now, where failure means another attempt. NCCL is started later, in `_start_nccl`."""
    # Only asked of gloo: a barrier over NCCL would start it here, inside of an attempt that may be thrown away.
    if carries_cpu_tensors(group):
        dist.barrier(group=group)


def meet(
    store: dist.Store, place: str, num_ranks: int, timeout: timedelta, conclude: Callable[[], str] = lambda: ""
) -> str:
    """Return on all ranks once all have come to the place, with what the last to come concludes; else ConnectionFailed on all.

    The first that has waited for `timeout` gives up for all: else a rank that comes at that moment would go on alone.
    """
    try:
        # `add` is atomic: exactly one rank is the last to come.
        if store.add(f"{place} number", 1) == num_ranks:
            _decide(store, place, MET + conclude())
        if not _is_there(store, place, timeout):
            count = store.add(f"{place} number", 0)
            late = f"only {count} of {num_ranks} ranks have {place} within {timeout.total_seconds():.0f} s"
            _decide(store, place, f"{GIVEN_UP}{late}: see the logs of the others")
            store.wait([place], timedelta(seconds=CONNECT_S))  # for what another rank decides at this moment
        decided = store.get(place).decode()
    except RuntimeError as error:
        raise ConnectionFailed(
            f"the store in which ranks meet is gone: see the logs of the others ({error})"
        ) from error
    if decided.startswith(GIVEN_UP):
        raise ConnectionFailed(decided.removeprefix(GIVEN_UP))
    return decided.removeprefix(MET)


def _is_there(store: dist.Store, key: str, timeout: timedelta) -> bool:
    """Whether the key is set within the time. A store that is gone answers the next question with an error."""
    try:
        store.wait([key], timeout)
    except RuntimeError:
        return False
    return True


def _decide(store: dist.Store, place: str, decision: str) -> None:
    """Settle how the meeting at the place ends, for all ranks, unless another one has done so."""
    # Between two that decide at one moment, the last to come and one that gives up, the counter chooses.
    if store.add(f"{place} decided", 1) == 1:
        store.set(place, decision)
