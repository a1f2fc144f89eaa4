"""Operations on host copies, as GPUs need them over gloo, give bitwise what the plain ones give; here on CPUs, where both run."""

from dataclasses import replace

import pytest
import torch

from framework.comm import collectives, p2p
from framework.comm.codec import Rounding
from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.mesh.topology import Topology
from framework.plan.plan import make_plan
from framework.recipe.schema import Parallel, Zero
from framework.verify.layout import run_layout
from tests.families import family
from tests.grid import few_of
from tests.ranks.parity import Case, small_recipe, topology_of

CPU = torch.device("cpu")
ODD = 1001


def staged(mesh):
    """The same mesh, as if its groups carried tensors of the CPU only and its tensors were elsewhere."""
    return replace(
        mesh,
        axes={
            name: Communicator(axis.axis, *axis.groups, staged=True, secret=axis.secret)
            for name, axis in mesh.axes.items()
        },
    )


def operate(axis):
    """The result of every operation on numbers that do not add up exactly."""
    x = torch.randn(axis.size, ODD, generator=torch.Generator().manual_seed(axis.rank))
    results = {}
    for op in ("sum", "max", "min"):
        results[op] = x.clone()
        collectives.all_reduce(results[op], axis, op)
    for wire in (None, Rounding(torch.bfloat16)):
        results[f"all_reduce {wire}"] = x.clone()
        collectives.start_all_reduce(results[f"all_reduce {wire}"], axis, wire=wire).wait()
        results[f"reduce_scatter {wire}"] = torch.empty(ODD)
        collectives.start_reduce_scatter(results[f"reduce_scatter {wire}"], x, axis, wire=wire).wait()
    results["gather"] = torch.empty(axis.size, axis.size * ODD)
    collectives.all_gather(results["gather"], x, axis)
    results["in place"] = x.clone()
    collectives.reduce_scatter(results["in place"][axis.rank], results["in place"], axis)
    collectives.all_gather(results["in place"], results["in place"][axis.rank], axis)
    results["all_to_all"] = torch.empty_like(x)
    collectives.all_to_all(results["all_to_all"], x, axis)
    results["broadcast"] = x.clone()
    collectives.start_broadcast(results["broadcast"], axis, source=axis.size - 1).wait()
    peers = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    results["exchange"] = torch.empty_like(x)
    p2p.exchange([(x, peers[0])], [(results["exchange"], peers[1])], axis).wait()
    results["apart"] = torch.empty_like(x)
    for pending in p2p.exchange_apart([(x, peers[0])], [(results["apart"], peers[1])], axis):
        pending.wait()
    return results


def compare_staged(rank, world, rendezvous):
    mesh = connect(Topology(dp=world), CPU, rendezvous, rank, timeout_s=60)
    plain, through_host = operate(mesh.axis("dp")), operate(staged(mesh).axis("dp"))
    mesh.close()
    return [name for name in plain if not torch.equal(plain[name], through_host[name])]


def see_when_results_come(rank, world, rendezvous):
    """What is put in is read at the start; what comes out is there after the wait, and not written before."""
    mesh = connect(Topology(dp=world), CPU, rendezvous, rank, timeout_s=60)
    axis = staged(mesh).axis("dp")
    x, out = torch.full((3,), float(rank)), torch.full((world * 3,), -1.0)
    pending = collectives.start_all_gather(out, x, axis)
    x.fill_(99.0)
    before = out.clone()
    pending.wait()
    mesh.close()
    return before.tolist(), out.tolist()


def train_staged(rank, world, rendezvous, case):
    """Losses, gradients and weights of the plain mesh and of the staged one."""
    recipe = case.layouts[""]
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    plain, through_host = (
        run_layout(make_plan(recipe, case.config), case.batches(), each) for each in (mesh, staged(mesh))
    )
    mesh.close()
    assert plain.losses == through_host.losses
    assert plain.norms == through_host.norms
    return all(torch.equal(plain.weights[name], through_host.weights[name]) for name in plain.weights)


@pytest.mark.parametrize("world", [2, 3])
def test_staged_operations_equal_the_plain_ones_bitwise(pool, world):
    assert pool.run(world, compare_staged) == [[]] * world


def test_staged_operations_read_at_the_start_and_write_at_the_wait(pool):
    assert pool.run(2, see_when_results_come) == [([-1.0] * 6, [0.0] * 3 + [1.0] * 3)] * 2


@pytest.mark.parametrize(
    ("parallel", "stage", "world"),
    few_of(
        [(Parallel(tp=2, pp=2), 0, 4), (Parallel(tp=2, overlap="always"), 0, 2), (Parallel(), 3, 2)],
        lambda _, stage, world: stage == 3,
    ),
    ids=["tp 2 pp 2", "overlapped tp", "zero 3"],
)
def test_a_staged_mesh_trains_bitwise_as_the_plain_one(pool, parallel, stage, world):
    recipe = small_recipe("fp32", world, 2, zero=Zero(stage=stage), parallel=parallel)
    assert all(pool.run(world, train_staged, Case("llama", family("llama"), {"": recipe})))
