"""The framework's copies between host and device, and its times of waits, as CUDA would run them; and what CUDA would make wrong.

The simulated GPU is late where CUDA may be, so each right use here is beside one that is wrong.
"""

import threading
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from framework.comm.algorithms import ExposedCommunication
from framework.comm.codec import Rounding, scatter_coded, sum_coded
from framework.comm.collectives import start_all_reduce
from framework.comm.communicator import DeviceProgress, Operation, Waits
from framework.comm.connect import Mesh
from framework.comm.transfer import (
    Arrival,
    AsyncHostCopy,
    Copies,
    CopyStream,
    Download,
    Moment,
    segment_on_host,
    start_copy,
    upload,
    upload_values,
    write_across,
    zeros_on_host,
)
from framework.mesh.topology import Axis, Topology
from tests.nccl.gpu import GPU, GpuError, SimulatedGpu, installed, move_to_host
from tests.nccl.simulator import installed as nccl_installed
from tests.nccl.simulator import run_ranks


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    with installed(), SimulatedGpu() as entered:
        yield entered


# --- the device itself


def test_tensors_say_where_they_are(gpu: SimulatedGpu) -> None:
    here, there = torch.ones(2), torch.ones(2, device=GPU)
    assert [here.is_cuda, there.is_cuda, (there + 1).is_cuda, there.view(2, 1).is_cuda] == [False, True, True, True]
    assert there.device == torch.zeros_like(there).device == GPU
    assert there.cpu().device == torch.device("cpu")
    assert upload(here, GPU).device == GPU


@pytest.mark.parametrize(
    "wait",
    [Tensor.tolist, Tensor.item, bool, float, Tensor.cpu, lambda x: torch.equal(x, x), lambda x: x.to("cpu")],
)
def test_a_question_to_the_device_is_a_wait_and_to_the_host_none(
    gpu: SimulatedGpu, wait: Callable[[Tensor], object]
) -> None:
    wait(torch.ones(1))
    assert not gpu.waits
    wait(torch.ones(1, device=GPU))
    assert [each.split(":")[0] for each in gpu.waits] == [__file__]


def test_what_is_uploaded_makes_nobody_wait_and_from_pageable_memory_it_would(gpu: SimulatedGpu) -> None:
    assert upload_values([1.0, 2.0], torch.float32, GPU).add(1).cpu().tolist() == [2.0, 3.0]
    assert len(gpu.waits) == 1  # of `cpu`, above
    torch.ones(2).to(GPU, non_blocking=True)
    assert len(gpu.waits) == 2


# --- copies that are under way


def test_a_vector_comes_to_the_host_behind_its_event_and_may_be_overwritten_by_kernels(gpu: SimulatedGpu) -> None:
    vector = torch.tensor([1.0, 2.0], device=GPU)
    pending = AsyncHostCopy(vector)
    assert pending._arrival._done.is_blocking  # a host that spins takes a core from NCCL's proxy
    assert pending._host.isnan().all()
    vector.zero_()
    assert pending.values() == [1.0, 2.0]


def test_the_host_may_not_write_to_what_is_being_uploaded(gpu: SimulatedGpu) -> None:
    x = zeros_on_host(2, torch.float32, GPU)
    upload(x, GPU)
    x[0] = 7
    with pytest.raises(GpuError, match="the source of a copy was written to"):
        gpu.synchronize()


def copy_to_host(source: Tensor) -> tuple[Tensor, Copies]:
    target = segment_on_host(source.nbytes, GPU).view(source.dtype)
    return target, CopyStream().start([(target, source)])


def write_to(x: Tensor) -> None:
    x.add_(1)


def give_back(x: Tensor) -> None:
    x.untyped_storage().resize_(0)


def leave(x: Tensor) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (leave, None),
        (write_to, "the source of a copy was written to"),
        (give_back, "the source of a copy was given up"),
    ],
)
def test_memory_of_a_copy_stream_is_left_alone_until_the_wait(
    gpu: SimulatedGpu, spoil: Callable[[Tensor], None], told: str | None
) -> None:
    source = torch.ones(4, device=GPU)
    target, copies = copy_to_host(source)
    assert target.isnan().all()
    spoil(source)
    if told is None:
        copies.wait()
        assert target.tolist() == [1.0] * 4
    else:
        with pytest.raises(GpuError, match=told):
            copies.wait()


def test_a_copy_whose_source_nobody_keeps_reads_the_memory_of_another(gpu: SimulatedGpu) -> None:
    _, copies = copy_to_host(torch.ones(4, device=GPU) + 1)
    with pytest.raises(GpuError, match="the source of a copy was given up"):
        copies.wait()


def test_states_come_home_and_go_back_beside_what_is_computed(gpu: SimulatedGpu) -> None:
    stream, there = CopyStream(), torch.ones(3, device=GPU)
    home = zeros_on_host(3, torch.float32, GPU)
    download = Download(there, home, stream)
    assert home.isnan().all()
    download.wait()
    write_across(there, home.mul_(3))
    back = torch.empty(3, device=GPU)
    with stream.queue(GPU):
        start_copy(back, home)
        arrival = Arrival(GPU)
    arrival.wait()
    assert back.tolist() == there.tolist() == [3.0] * 3


@pytest.mark.parametrize("is_late", [False, True])
def test_another_thread_copies_what_was_computed_at_a_moment_and_nothing_later(
    gpu: SimulatedGpu, is_late: bool
) -> None:
    early = torch.full((4,), 5, dtype=torch.uint8, device=GPU)
    moment = Moment(GPU)
    source = early + 1 if is_late else early
    target = segment_on_host(4, GPU)
    errors: list[GpuError] = []

    def copy() -> None:
        try:
            with gpu, moment.copies():
                start_copy(target, source)
                Arrival(GPU).wait_on_host()
        except GpuError as error:
            errors.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert [str(error) for error in errors if "has not waited for" not in str(error)] == []
    assert bool(errors) == is_late
    assert is_late or target.tolist() == [5] * 4


# --- how far it has come


def test_the_first_event_that_has_not_passed_says_what_a_device_waits_in_or_has_not_come_to(gpu: SimulatedGpu) -> None:
    waits, axis = Waits(DeviceProgress()), Axis("dp", 2, 0, (0, 1))
    first, second, third = (Operation(axis, "sum", "", number) for number in (1, 2, 3))
    for operation in (first, second):
        waits.begin(operation, operation)
    with torch.cuda.stream(torch.cuda.Stream()):  # behind an upload, of which the computing stream says nothing
        waits.begin(third, third)
    places = []
    waits.wait([], first)
    waits.wait([], second)
    for gpu.computing.num_passed in range(7):
        places.append(waits.find_place())
    assert [place.waits_in for place in places] == [None, None, None, first, None, second, None]
    assert [len(place.ahead) for place in places] == [2, 1, 0, 0, 0, 0, 0]
    waits.open.clear()
    waits.check_ended("the step")
    assert [each.seconds >= 0 for each in waits.ended] == [True, True]
    assert waits.find_place() == (None, ())


# --- with messages


@pytest.fixture
def two_ranks() -> Iterator[Topology]:
    with nccl_installed():
        yield Topology(dp=2)


def test_exposed_communication_is_of_the_device_and_can_be_asked_behind_a_wait(two_ranks: Topology) -> None:
    def body(mesh: Mesh) -> tuple[int, float]:
        exposed, x = ExposedCommunication(mesh.device), torch.ones(2, device=GPU)
        exposed.wait([start_all_reduce(x, mesh.axis("dp"))])
        (wait,) = exposed.take()
        with pytest.raises(RuntimeError, match="have passed"):
            _ = wait.seconds
        total = int(sum(AsyncHostCopy(x).values()))
        return total, wait.seconds

    assert all(total == 4 and seconds > 0 for total, seconds in run_ranks(two_ranks, body))


def test_rounded_sums_are_exchanged_at_once_and_added_in_the_order_of_ranks(two_ranks: Topology) -> None:
    """By the one all-to-all of GPUs: each term is rounded, no sum is, and an odd number of elements is padded."""
    terms = [torch.randn(5, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    rounded = [term.bfloat16().float() for term in terms]

    def body(mesh: Mesh) -> tuple[list[float], list[float]]:
        axis, x = mesh.axis("dp"), upload(terms[mesh.rank], GPU)
        mine = torch.empty(2, device=GPU)
        scatter_coded(mine, x[:4].clone(), axis, Rounding(torch.bfloat16)).wait()
        whole = x.clone()
        sum_coded(whole, axis, Rounding(torch.bfloat16)).wait()
        return mine.tolist(), whole.tolist()

    for term in terms:
        move_to_host(term)
    total = rounded[0] + rounded[1]
    for rank, (mine, whole) in enumerate(run_ranks(two_ranks, body)):
        assert mine == total[:4].view(2, 2)[rank].tolist()
        assert whole == total.bfloat16().float().tolist()


def test_a_stream_that_does_not_wait_for_what_it_copies_is_told(gpu: SimulatedGpu) -> None:
    source = torch.ones(4, device=GPU)
    with (
        patch.object(torch.cuda.Stream, "wait_stream", lambda self, other: None),
        pytest.raises(GpuError, match="has not waited for"),
    ):
        copy_to_host(source)
