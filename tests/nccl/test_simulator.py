"""The simulator tells what NCCL would make wrong: planted here on two ranks without a model."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from framework.comm.collectives import all_reduce, start_all_gather, start_all_reduce
from framework.comm.connect import Mesh
from framework.comm.p2p import exchange, exchange_apart
from framework.mesh.topology import Topology
from tests.nccl.gpu import GPU
from tests.nccl.simulator import SimulatorError, installed, run_ranks

TWO_RANKS = Topology(dp=2)


@pytest.fixture(autouse=True)
def simulator() -> Iterator[None]:
    with installed():
        yield


def run(body: Callable[[Mesh], object], serial: bool = False) -> list[object]:
    return run_ranks(TWO_RANKS, body, serial)


def test_results_are_those_of_the_operations_and_land_in_their_wait() -> None:
    def body(mesh: Mesh) -> tuple[list[float], bool, list[float]]:
        axis, x = mesh.axis("dp"), torch.full((2,), 1.0 + mesh.rank, device=GPU)
        out = torch.empty(4, device=GPU)
        pending = start_all_gather(out, x, axis)
        is_early = bool(out.isfinite().any())
        pending.wait()
        other = torch.empty(2, device=GPU)
        exchange([(x, 1 - mesh.rank)], [(other, 1 - mesh.rank)], axis).wait()
        all_reduce(x, axis)
        return out.tolist(), is_early, (other + x).tolist()

    assert run(body) == [([1.0, 1.0, 2.0, 2.0], False, [5.0, 5.0]), ([1.0, 1.0, 2.0, 2.0], False, [4.0, 4.0])]


def write_to_input(x: Tensor) -> None:
    x[0] = 7


def give_memory_back(x: Tensor) -> None:
    x.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("spoil", "told"), [(write_to_input, "its input was written to"), (give_memory_back, "memory was given back")]
)
def test_memory_of_an_operation_under_way_is_left_alone(spoil: Callable[[Tensor], None], told: str) -> None:
    def body(mesh: Mesh) -> None:
        x = torch.ones(2, device=GPU)
        pending = start_all_gather(torch.empty(4, device=GPU), x, mesh.axis("dp"))
        spoil(x)
        pending.wait()

    with pytest.raises(SimulatorError, match=f"all_gather .* over dp 0: {told}|all_gather .* over world 0: {told}"):
        run(body)


def test_ranks_that_start_different_collectives_are_told() -> None:
    def body(mesh: Mesh) -> None:
        axis, x = mesh.axis("dp"), torch.ones(2, device=GPU)
        all_reduce(x, axis) if mesh.rank else start_all_gather(torch.empty(4, device=GPU), x, axis).wait()

    with pytest.raises(SimulatorError, match=r"different operations #0 .* rank 0 all_gather .* rank 1 all_reduce"):
        run(body)


def test_an_operation_that_one_rank_leaves_out_is_a_deadlock() -> None:
    def body(mesh: Mesh) -> None:
        if mesh.rank == 0:
            all_reduce(torch.ones(2, device=GPU), mesh.axis("dp"))

    with pytest.raises(SimulatorError, match=r"deadlock: rank 0: all_reduce"):
        run(body)


def test_messages_that_wait_for_one_another_need_one_batch() -> None:
    def body(mesh: Mesh) -> None:
        axis, peer, x = mesh.axis("dp"), 1 - mesh.rank, torch.ones(2, device=GPU)
        leaving, arriving = exchange([(x, peer)], [], axis), exchange([], [(torch.empty(2, device=GPU), peer)], axis)
        leaving.wait()
        arriving.wait()

    with pytest.raises(SimulatorError, match="deadlock: rank 0: messages to"):
        run(body)


@pytest.mark.parametrize("serial", [False, True])
def test_two_communicators_in_two_orders_are_a_deadlock_on_one_queue(serial: bool) -> None:
    topology = Topology(dp=2, tp=2)

    def body(mesh: Mesh) -> None:
        # Ranks 0 and 3 start over dp first, 1 and 2 over tp: around a square of ranks everyone waits for the next.
        axes = ("dp", "tp") if mesh.rank in (0, 3) else ("tp", "dp")
        for pending in [start_all_reduce(torch.ones(2, device=GPU), mesh.axis(name)) for name in axes]:
            pending.wait()

    if serial:
        with pytest.raises(SimulatorError, match="deadlock"):
            run_ranks(topology, body, serial)
    else:
        run_ranks(topology, body)


def test_what_was_only_received_leaves_nothing_open() -> None:
    """One work for a batch: it must not be open a second time as what was sent."""

    def body(mesh: Mesh) -> None:
        axis, tensors = mesh.axis("dp"), [torch.ones(2, device=GPU), torch.ones(3, device=GPU)]
        messages = [(x, 1 - mesh.rank) for x in tensors]
        sent, received = exchange_apart([], messages, axis) if mesh.rank else exchange_apart(messages, [], axis)
        (received if mesh.rank else sent).wait()
        mesh.waits.check_ended("the body")

    run(body)
