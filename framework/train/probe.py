"""The start-up probe: checks in about a second, once the ranks are connected, whether every node is fit to train.

    each rank    its clock, its device's arithmetic, its node's memory, whether it sees a file of rank 0, all-reduces per axis
    rank 0       compares them with one another, with the plan and with the disk; prints oddities, names nodes that are bad

A bad node ends all ranks with 87, and the job's script leaves it out from then on. A slow CPU, or a value that is not as
expected, is only printed. Code, versions and recipe are compared before (`comm/connect.py`), and too few GPUs are found before
that (`launch/process.py`). Nothing depends on clocks; their differences are printed because people read the logs of several nodes
together.
"""

import platform
import shutil
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from framework.checkpoint.commit import list_checkpoints
from framework.checkpoint.staging import free_bytes
from framework.checkpoint.storage import checkpoints_of
from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.comm.connect import Mesh, node_name, ranks_per_node
from framework.comm.objects import broadcast_object, gather_object
from framework.errors import NodeError, RunError
from framework.launch.process import is_task, leave_out
from framework.lease import Lease
from framework.object_store import ObjectPath
from framework.output import show_bytes
from framework.plan.cluster import ClusterRates
from framework.plan.plan import Plan

# A new name shows at once on a network file system; a file that has not come by then is on another one.
SHARED_WITHIN_S = 10.0
# A larger difference of clocks misleads readers of several nodes' logs.
CLOCK_BOUND_S = 1.0
# The rows of the matrix, and how often it is multiplied.
ROWS, REPEATS = 256, 4
# Bytes of an all-reduce: few on CPUs, where the ranks often share a machine's memory.
BYTES_ON_CPU, BYTES_ON_GPU = 1 << 18, 1 << 26
TIMED = 3
# Slow: so many times the median of its peers, beyond their spread, and by more than the noise of a busy machine.
SLOW_FACTOR, SPREADS, MIN_PEERS = 3.0, 6.0, 4
NOISE_ON_CPU_S, NOISE_ON_GPU_S = 0.1, 1e-3
# The least share of the data sheet's rate that a collective reaches.
LEAST_SHARE = 0.1
AXES = ("world", "tp", "cp", "dp", "pp", "ep")


@dataclass(frozen=True)
class Facts:
    """Measurements of one rank."""

    node: str
    clock_s: float  # its wall clock as all ranks left a barrier
    barrier_s: float  # the time that the barrier took this rank
    wrong: str  # errors of its device's arithmetic; empty if there are none
    device_s: float  # of a matmul
    free: int | None  # bytes of the host's memory; None where unknown
    sees_run: bool  # whether it found the file of rank 0
    # Axis: the first rank of this rank's group, and the seconds of an all-reduce.
    reduce_s: Mapping[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeFinding:
    """An oddity of a node. is_bad: it must not train."""

    node: str
    text: str
    is_bad: bool = False


@dataclass(frozen=True)
class Expected:
    """Expectations of the plan. host_bytes: the memory that the ranks of a node need at least. link_s: seconds of an all-reduce
    by axis, on known GPUs. is_gpu: slow nodes are then bad ones."""

    host_bytes: int
    link_s: Mapping[str, float]
    is_gpu: bool


def probe(plan: Plan, mesh: Mesh, lease: Lease) -> None:
    """Raise NodeError on all ranks where a node is bad, RunError where the run's folder is not shared. Collective."""
    world = mesh.axis("world")
    name = broadcast_object(lambda: _leave_note(lease), world)
    facts = gather_object(_find_facts(mesh, lease.run, name), world)

    def conclude() -> None:
        findings = [*judge(facts, _expect(plan, mesh)), *check_room(plan, lease.run)]
        for finding in (each for each in findings if not each.is_bad):
            print(f"probe: {finding.text}", file=sys.stderr, flush=True)
        refuse([each for each in findings if each.is_bad], facts, lease)

    try:
        broadcast_object(conclude, world)
    finally:
        if mesh.rank == 0 and name:
            with suppress(OSError):
                (lease.run / name).unlink()
                lease.tidy()


def judge(facts: Sequence[Facts], expected: Expected) -> Iterator[NodeFinding]:
    """The oddities of the ranks' nodes. facts: of all ranks, in their order."""
    yield from _judge_clocks(facts)
    for rank, each in enumerate(facts):
        if each.wrong:
            yield NodeFinding(
                each.node, f"the device of rank {rank} on {each.node} computes wrongly: {each.wrong}", True
            )
        if not each.sees_run:
            text = f"{each.node} does not see what rank 0 wrote into the run's folder {SHARED_WITHIN_S:.0f} s ago"
            yield NodeFinding(each.node, text, True)
    for node, free in {each.node: each.free for each in facts if each.free is not None}.items():
        if free < expected.host_bytes:
            text = f"{node} has {show_bytes(free)} of free memory; its ranks need at least {show_bytes(expected.host_bytes)}"
            yield NodeFinding(node, text)
    noise_s = NOISE_ON_GPU_S if expected.is_gpu else NOISE_ON_CPU_S
    seconds = {rank: each.device_s for rank, each in enumerate(facts)}
    for rank, usual_s in find_slow(seconds, noise_s).items():
        node, times = facts[rank].node, seconds[rank] / usual_s
        text = (
            f"rank {rank} on {node} multiplies matrices in {1e3 * seconds[rank]:.3g} ms, {times:.1f} times the median"
        )
        yield NodeFinding(node, text, expected.is_gpu)
    for axis in dict.fromkeys(axis for each in facts for axis in each.reduce_s):
        yield from _judge_axis(axis, facts, expected, noise_s)


def find_slow(seconds: Mapping[int, float], noise_s: float) -> dict[int, float]:
    """The keys that take far longer than their peers, with the peers' median: by the median and the median deviation, which one
    slow peer among four does not move. None among fewer than four."""
    if len(seconds) < MIN_PEERS:
        return {}
    usual_s = median(seconds.values())
    spread_s = 1.4826 * median(abs(each - usual_s) for each in seconds.values())
    bound_s = max(SLOW_FACTOR * usual_s, usual_s + SPREADS * spread_s, usual_s + noise_s)
    return {key: usual_s for key, each in seconds.items() if each > bound_s}


def check_room(plan: Plan, run_dir: Path) -> list[NodeFinding]:
    """Check the disk of the checkpoints, which need not be the run's, for room for `checkpoint.keep` of them and one that is
    being written."""
    keep, here = plan.recipe.checkpoint.keep, checkpoints_of(run_dir)
    if isinstance(here, ObjectPath):
        return []  # a store does not say how much room it has
    try:
        each, free = checkpoint_bytes(plan), shutil.disk_usage(here).free
    except OSError:
        return []  # a save says more of it
    to_come = max(1, keep + 1 - len(list_checkpoints(here)))
    if free >= to_come * each:
        return []
    text = (
        f"{here.resolve()} has {show_bytes(free)} of free space, and the run writes {to_come} more checkpoints of about"
        f" {show_bytes(each)} before it removes one: free space, lower checkpoint.keep, or a save fails"
    )
    return [NodeFinding(platform.node(), text)]


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of a checkpoint at the most, without laying the model out."""
    return plan.memory_model.pipelines.checkpoint_bytes


def refuse(bad: Sequence[NodeFinding], facts: Sequence[Facts], lease: Lease) -> None:
    """Raise NodeError with the bad nodes, which a job leaves out from then on; RunError where no other node sees the run."""
    if not bad:
        return
    nodes, blind = list(dict.fromkeys(each.node for each in bad)), {each.node for each in facts if not each.sees_run}
    others = {each.node for each in facts} - {facts[0].node}
    if len(others) > 1 and blind == others:
        raise RunError(
            f"{lease.run} is not on a file system that all nodes share: {', '.join(sorted(blind))} do not see what rank 0, on"
            f" {facts[0].node}, writes there. Set run.root to a folder on a shared one"
        )
    if is_task():
        lease.check()
        leave_out(lease.run, nodes)
    raise NodeError("\n".join(dict.fromkeys(each.text for each in bad)))


def compute_known(device: torch.device, work: Tensor | None = None) -> tuple[str, float]:
    """Compute a matmul whose result is known. Returns (errors, empty if none; the shortest seconds of a matmul).

    H H' = n 1 for a Hadamard matrix H, and for any signs of its rows: every product and partial sum is an integer of at most n =
    256, which all dtypes of more than seven bits hold exactly. So the check is equality, and no tolerance hides a wrong bit.
    work: [ROWS, ROWS], the matrix to multiply.
    """
    signs = hadamard(ROWS).to(device) if work is None else work
    known, shortest_s, wrong = ROWS * torch.eye(ROWS, device=device), float("inf"), ""
    for repeat in range(REPEATS):
        rows = signs * (1 - 2 * ((torch.arange(ROWS, device=device) >> repeat) & 1)).unsqueeze(1)
        _finish(device)
        began_s = time.perf_counter()
        found = rows @ rows.T
        _finish(device)
        shortest_s = min(shortest_s, time.perf_counter() - began_s)
        if not torch.equal(found, known):
            count = int((found != known).sum())
            wrong = (
                f"{count} of {ROWS * ROWS} elements of a known matmul are wrong, in repeat {repeat + 1} of {REPEATS}"
            )
    return wrong or find_memory_errors(device), shortest_s


def hadamard(rows: int) -> Tensor:
    """[rows, rows] of 1 and -1 whose rows are orthogonal (Sylvester's); rows: a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < rows:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def find_memory_errors(device: torch.device) -> str:
    """Errors of a GPU's memory that ECC could not correct since the driver began, by NVML; empty without a count."""
    if device.type != "cuda":
        return ""
    try:
        import pynvml
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        count = pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_VOLATILE_ECC)
    except pynvml.NVMLError:  # no ECC, or no right to ask
        return ""
    return f"{count} errors of its memory that ECC could not correct" if count else ""


def _find_facts(mesh: Mesh, run_dir: Path, name: str) -> Facts:
    clock_s, barrier_s = _read_clock(mesh.axis("world"))
    # One rank of each node looks: thousands would ask the file server at once.
    sees_run = not name or mesh.rank % ranks_per_node() != 0 or _sees(run_dir / name, SHARED_WITHIN_S)
    wrong, device_s = compute_known(mesh.device)
    return Facts(node_name(), clock_s, barrier_s, wrong, device_s, free_bytes(), sees_run, dict(_time_axes(mesh)))


def _read_clock(world: Communicator) -> tuple[float, float]:
    """This rank's wall clock as all leave a barrier, and how long the barrier took it."""
    all_reduce(torch.zeros(1), world, label="probe")  # the first also connects
    began_s = time.monotonic()
    all_reduce(torch.zeros(1), world, label="probe")
    return time.time(), time.monotonic() - began_s


def _judge_clocks(facts: Sequence[Facts]) -> Iterator[NodeFinding]:
    first, slack_s = facts[0], max(each.barrier_s for each in facts)
    seen = set()
    for each in facts:
        skew_s = each.clock_s - first.clock_s
        if abs(skew_s) > CLOCK_BOUND_S + slack_s and each.node not in seen:
            seen.add(each.node)
            where = "ahead of" if skew_s > 0 else "behind"
            text = f"the clock of {each.node} is {abs(skew_s):.1f} s {where} that of rank 0's node: times in the logs differ"
            yield NodeFinding(each.node, f"{text}. Training does not depend on it")


def _judge_axis(axis: str, facts: Sequence[Facts], expected: Expected, noise_s: float) -> Iterator[NodeFinding]:
    """Compare the groups of an axis with one another, and on GPUs their median with the plan's link."""
    groups: dict[int, list[float]] = defaultdict(list)
    nodes: dict[int, list[str]] = defaultdict(list)
    for each in facts:
        if axis in each.reduce_s:
            first, seconds = each.reduce_s[axis]
            groups[first].append(seconds)
            nodes[first].append(each.node)
    # The last to arrive has waited least, and saw the collective alone.
    times = {first: min(each) for first, each in groups.items()}
    for first, usual_s in find_slow(times, noise_s).items():
        inside = list(dict.fromkeys(nodes[first]))
        text = (
            f"an all-reduce over {axis} takes {1e3 * times[first]:.3g} ms on {', '.join(inside)},"
            f" {times[first] / usual_s:.1f} times the median of {len(times)} groups"
        )
        # Among several nodes the slow one is unknown.
        yield NodeFinding(inside[0], text, expected.is_gpu and len(inside) == 1)
    usual_s, planned_s = median(times.values()), expected.link_s.get(axis)
    if planned_s is not None and usual_s > planned_s / LEAST_SHARE:
        text = f"an all-reduce over {axis} takes {1e3 * usual_s:.3g} ms, and {1e3 * planned_s:.3g} ms by the rates of its links"
        yield NodeFinding(facts[0].node, f"{text}: is NCCL on the right network (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)?")


def _time_axes(mesh: Mesh) -> Iterator[tuple[str, tuple[int, float]]]:
    """(axis, (first rank, shortest seconds of an all-reduce)) of each distinct group. Collective: all go through them in one
    order."""
    is_gpu, met = mesh.device.type == "cuda", set()
    for name in AXES:
        axis = mesh.axis(name)
        if axis.size == 1 or axis.ranks in met:
            continue
        met.add(axis.ranks)
        x = torch.zeros((BYTES_ON_GPU if is_gpu else BYTES_ON_CPU) // 4, device=mesh.device)
        seconds = []
        for _ in range(1 + TIMED):  # the first connects
            _finish(mesh.device)
            began_s = time.perf_counter()
            all_reduce(x, axis, label="probe")
            _finish(mesh.device)
            seconds.append(time.perf_counter() - began_s)
        yield name, (axis.ranks[0], min(seconds[1:]))


def _expect(plan: Plan, mesh: Mesh) -> Expected:
    is_gpu, here = mesh.device.type == "cuda", plan.derived.ranks_per_node
    # A save stages there what the node's ranks write; on CPUs they hold as much, and more.
    host = checkpoint_bytes(plan) // max(1, plan.derived.world // here) * (1 if is_gpu else 2)
    cluster = ClusterRates.from_recipe(plan.recipe)
    links = {}
    if is_gpu and not cluster.is_assumed:
        for name in AXES:
            ranks = mesh.axis(name).ranks
            nodes = len({rank // here for rank in ranks})
            links[name] = cluster.collective_seconds("all_reduce", BYTES_ON_GPU, len(ranks), nodes)
    return Expected(host, links, is_gpu)


def _leave_note(lease: Lease) -> str:
    """Make a file of a new name in the run's folder, on rank 0. Returns its path there; empty if there is no room for it."""
    try:
        path = lease.workplace() / f"probe-{uuid.uuid4().hex}"
        path.touch()
    except OSError as error:
        print(
            f"probe: {lease.run} cannot be written ({error}): whether all nodes share it is not known", file=sys.stderr
        )
        return ""
    return str(path.relative_to(lease.run))


def _sees(path: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
