"""NCCL as framework/comm calls it, on one GPU: a world of one rank has real communicators, works, events and streams. 15 s.

python scripts/gpu/nccl_api.py          --tiny: over gloo on a CPU, which shows only that it runs
"""

import pickle
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rows import Rows
from torch import Tensor

from framework.comm import connect
from framework.comm.algorithms import Pending, gather_by_tensor, scatter_by_tensor
from framework.comm.codec import Rounding, scatter_coded, sum_coded
from framework.comm.communicator import Communicator
from framework.comm.groups import GroupPlan
from framework.mesh.topology import Axis
from framework.torch_private import dump_flight_records

TINY = "--tiny" in sys.argv
DEVICE = torch.device("cpu") if TINY else torch.device("cuda", 0)
LIMIT = timedelta(seconds=60)
# Cycles for which a kernel sleeps: some 100 ms.
NAP = 200_000_000


def lands(pending: Pending, out: Tensor, expected: Tensor) -> bool:
    """Whether a started operation leaves the numbers in `out`."""
    pending.wait()
    return torch.equal(out, expected)


def check_collectives(rows: Rows, axis: Communicator) -> None:
    """Each collective over a communicator of one rank, in place and not."""
    x, out = torch.arange(8.0, device=DEVICE), torch.zeros(8, device=DEVICE)
    rows.attempt("all-gather", lambda: lands(gather_by_tensor(out, x, axis), out, x))
    rows.attempt("reduce-scatter", lambda: lands(scatter_by_tensor(out.zero_(), x, axis), out, x))
    for name, start in (("all-gather", gather_by_tensor), ("reduce-scatter", scatter_by_tensor)):
        both = x.clone()
        rows.attempt(f"{name} in place", lambda start=start, both=both: lands(start(both, both, axis), both, x))
    if TINY:
        return
    rounded, whole, wire = x.bfloat16().float(), x.clone(), Rounding(torch.bfloat16)
    rows.attempt("rounded reduce-scatter", lambda: lands(scatter_coded(out, x, axis, wire), out, rounded))
    rows.attempt("rounded all-reduce", lambda: lands(sum_coded(whole, axis, wire), whole, rounded))
    rows.attempt("messages to itself are one work", lambda: send_to_itself(axis, x))


def send_to_itself(axis: Communicator, x: Tensor) -> bool:
    """Whether a batch of a send and a receive is one work, as `p2p` counts on."""
    came = torch.zeros_like(x)
    calls = [dist.P2POp(call, y, group=axis.group, group_peer=0) for call, y in ((dist.irecv, came), (dist.isend, x))]
    works = dist.batch_isend_irecv(calls)
    for work in works:
        work.wait()
    return len(works) == 1 and torch.equal(came, x)


def time_host_in_wait(axis: Communicator) -> float:
    """Milliseconds of the host in a wait while the device is busy."""
    x = torch.zeros(1 << 20, device=DEVICE)
    torch.cuda._sleep(NAP)
    work = dist.all_reduce(x, group=axis.group, async_op=True)
    began = time.perf_counter()
    work.wait()
    taken_ms = 1e3 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    return taken_ms


def resize_beside_a_stream() -> bool:
    """Whether memory may come and go while another stream has it, as ZeRO-3 has it do with each unit."""
    stream, full = torch.cuda.Stream(), torch.empty(1 << 26, device=DEVICE)
    storage, num_bytes = full.untyped_storage(), full.untyped_storage().nbytes()
    is_right = True
    for number in range(50):
        if storage.nbytes() < num_bytes:
            storage.resize_(num_bytes)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            full.data.fill_(number)
            done = stream.record_event()
        torch.cuda.current_stream().wait_event(done)
        total = full[:: 1 << 20].sum()
        storage.resize_(0)
        other = torch.full((1 << 26,), -1.0, device=DEVICE)
        is_right &= total.item() == number * 64
        del other
    return is_right


def gather_an_object(axis: Communicator) -> bool:
    """Whether objects go over a group without a backend for CPUs."""
    came: list[object] = [None]
    dist.all_gather_object(came, {"a": 1}, group=axis.group)
    return came == [{"a": 1}]


def start(axis: Communicator, world: Communicator) -> float:
    """Seconds until NCCL has built both communicators."""
    began = time.perf_counter()
    connect._start_nccl([world, axis], DEVICE)
    if not TINY:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    """All of it, as rows."""
    rows = Rows("nccl")
    if not TINY:
        torch.cuda.set_device(DEVICE)
    store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
    both, own = ("gloo", "gloo") if TINY else ("cpu:gloo,cuda:nccl", "nccl")
    group = connect._create_group(GroupPlan("world", (0,), both), 0, LIMIT, dist.PrefixStore("a", store))
    world = Communicator(Axis("world", 1, 0), group)
    sub = connect._create_group(
        GroupPlan("shard", (0,), own, is_urgent=own == "nccl"), 0, LIMIT, dist.PrefixStore("b", store)
    )
    axis = Communicator(Axis("shard", 1, 0), sub, sub)
    rows.attempt("time-outs are set", lambda: connect.set_group_timeout(timedelta(seconds=1800), sub))
    rows.attempt("NCCL starts two communicators", lambda: start(axis, world), "s")
    if not TINY:
        free, total = torch.cuda.mem_get_info()
        rows.add("memory outside of torch", (total - free - torch.cuda.memory_reserved()) / 2**20, "MiB")
    check_collectives(rows, axis)
    rows.attempt("objects over the group", lambda: gather_an_object(axis))
    if not TINY:
        rows.attempt("host in a wait while the device is busy", lambda: time_host_in_wait(axis), "ms")
        rows.attempt("storage.resize_ beside another stream", resize_beside_a_stream)
    rows.attempt(
        "flight records",
        lambda: sum(len(pickle.loads(each).get("entries", [])) for each in dump_flight_records().values()),
        "entries",
    )
    rows.attempt("barrier", dist.barrier)
    rows.attempt("end", dist.destroy_process_group)


if __name__ == "__main__":
    main()
