"""The debug mode turns ranks that fall out of step into an error that says where, and changes nothing else."""

import pytest
import torch

from framework.comm.collectives import all_reduce
from framework.comm.connect import connect
from framework.comm.p2p import start_receive
from framework.errors import OrderError
from framework.mesh.topology import Topology
from framework.plan.plan import make_plan
from framework.recipe.schema import Zero
from framework.train.build import build
from framework.train.step import TrainingRun, train_step
from framework.verify.layout import share
from tests.families import family
from tests.grid import few_of
from tests.ranks.parity import CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankPool

SKIPPED = 2  # the unit layers.1
DIVIDED = Zero(stage=2, shard_within=2, optimizer_within="all")


def skip_a_gather(run: TrainingRun) -> None:
    """As if the unit's unshard had been forgotten."""
    start_unshard = run.stages[0].parameters.start_unshard

    def forgetful(index: int) -> None:
        if index == SKIPPED:
            run.stages[0].parameters.unsharded.add(index)
        start_unshard(index)

    run.stages[0].parameters.start_unshard = forgetful  # type: ignore[method-assign]


def train(
    rank: int, world: int, rendezvous: str, case: Case, check_s: float | None, fault: str
) -> list[list[float]] | str:
    """Body: losses and norms of all steps, or the OrderError's message. fault: what the last rank does wrong."""
    (recipe,) = case.layouts.values()
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank, check_s=check_s)
    run = build(make_plan(recipe, case.config), mesh)
    reports = []
    if fault == "skip" and rank == world - 1:
        skip_a_gather(run)
    try:
        for step, batch in enumerate(case.batches()):
            if fault == "end" and rank == world - 1 and step == 1:
                return "ended"
            microbatches = share(batch, recipe.batch.sequences_per_microbatch, mesh)
            reports.append(train_step(run, microbatches, step, 1e-2).read())
    except OrderError as error:
        return str(error)
    mesh.close()
    return reports


def case_of(world: int, zero: Zero) -> Case:
    return Case("", family("llama"), {"": small_recipe("fp32", world, 1, 12, 0.05, zero)})


@pytest.mark.parametrize("zero", few_of([Zero(stage=3), DIVIDED, Zero(stage=0)], lambda zero: zero.stage == 3), ids=str)
def test_ranks_in_step_train_as_without_the_mode(pool: RankPool, zero: Zero) -> None:
    world = 4 if zero.shard_within else 2
    assert pool.run(world, train, case_of(world, zero), 30.0, "") == pool.run(
        world, train, case_of(world, zero), None, ""
    )


@pytest.mark.parametrize("world", [2, 3])
def test_a_skipped_gather_is_an_error_that_names_unit_and_operation(pool: RankPool, world: int) -> None:
    *others, faulty = pool.run(world, train, case_of(world, Zero(stage=3)), 30.0, "skip")
    for message in others:
        assert f"rank {world - 1} all_gather parameters of layers.2" in message
        assert "all_gather parameters of layers.1 float32" in message
    assert "rank 0 all_gather parameters of layers.1" in faulty


def test_a_rank_that_ended_is_named(pool: RankPool) -> None:
    message, _ = pool.run(2, train, case_of(2, Zero(stage=3)), 5.0, "end")
    assert "rank(s) [1] have started no collective there" in message


def wait_apart(rank: int, world: int, rendezvous: str) -> str:
    """Body: rank 0 sums over its axis, rank 1 of it starts nothing, because it waits for a message that never comes."""
    mesh = connect(Topology(dp=world), CPU, rendezvous, rank, timeout_s=10, check_s=1.0)
    try:
        if rank == 0:
            all_reduce(torch.ones(1), mesh.axis("dp"), label="one")
        start_receive(torch.ones(1), mesh.axis("dp"), 0).wait()
    except (OrderError, RuntimeError) as error:
        return str(error)
    return "nothing happened"


def test_a_rank_that_starts_nothing_is_named_in_time(pool: RankPool) -> None:
    message, _ = pool.run(2, wait_apart)
    assert "rank 0 is about to start all_reduce one float32[1] on axis dp, and for 1 s rank(s) [1]" in message
