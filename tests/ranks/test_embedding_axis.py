"""A tied embedding is one parameter, on whichever ranks a table of one's own puts the first and the last stage."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.parallel.pipeline.execute import StageLinks
from framework.parallel.zero import gradients
from framework.plan.plan import make_plan
from framework.recipe.schema import Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, Case, assert_equal, small_recipe, topology_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

# One microbatch; the line is the rank. First and last stage on ranks 1 and 2; on 2 and 0; both on 1, of two stages each.
TABLES = {
    "on ranks 1 and 2": "1F0,1B0\n0F0,0B0\n2F0,2B0\n",
    "on ranks 2 and 0": "2F0,2B0\n1F0,1B0\n0F0,0B0\n",
    "both on rank 1": "1F0,4F0,4B0,1B0\n0F0,5F0,5B0,0B0\n2F0,3F0,3B0,2B0\n",
}


def recipe_of(table: Path) -> Recipe:
    recipe = small_recipe("fp64", 3, 1, 6, 0.05, Zero(stage=1), Parallel(pp=3))
    return replace(recipe, pipeline=Pipeline(table=str(table)))


@pytest.mark.parametrize("name", few_of(TABLES, lambda name: name == "both on rank 1"))
def test_a_table_may_put_the_ends_of_a_tied_model_anywhere(pool: RankPool, tmp_path: Path, name: str) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(TABLES[name])
    changes = {"num_hidden_layers": 6, "tie_word_embeddings": True}
    assert_equal(pool, 3, [Case(name, family("llama"), {name: recipe_of(table)}, changes)])


def log_messages(rank: int, world: int, rendezvous: str, case: Case) -> tuple[list[str], list[str]]:
    """Body: what a step has sent over `pp` and summed over `embedding`, in this order, and the labels of the sums."""
    (recipe,) = case.layouts.values()
    started: list[str] = []
    labels: list[str] = []
    start, reduce = StageLinks.start, gradients.start_all_reduce

    def start_logged(links: StageLinks, actions: Any, outputs: Any) -> None:
        started.extend("message" for _ in actions)
        start(links, actions, outputs)

    def reduce_logged(x: Any, axis: Communicator, label: str, **more: Any) -> Any:
        if axis.name == "embedding":
            started.append("sum")
            labels.append(label)
        return reduce(x, axis, label=label, **more)

    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    microbatches = share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh)
    with patch.object(StageLinks, "start", start_logged), patch.object(gradients, "start_all_reduce", reduce_logged):
        train_step(run, microbatches, 0, 1e-3)
    mesh.close()
    return started, labels


@pytest.mark.parametrize("zero", [Zero(stage=0), Zero(stage=2)], ids=["stage 0", "stage 2"])
def test_a_tied_embedding_is_summed_behind_all_messages_of_the_pipeline(pool: RankPool, zero: Zero) -> None:
    """Over NCCL both may share a communicator, which runs what it is given in turn: a sum in front of the gradient that the first
    stage waits for would never end. gloo's messages are independent, so nothing else here can see it. And both ranks call the sum
    by one name, which the debug mode compares."""
    recipe = small_recipe("fp32", 2 if zero.stage == 0 else 4, 2, 8, 0.05, zero, Parallel(pp=2))
    case = Case("", family("llama"), {"": recipe}, {"num_hidden_layers": 6, "tie_word_embeddings": True})
    found = pool.run(recipe.launch.ranks, log_messages, case)  # type: ignore[arg-type]
    for started, labels in found:
        assert started.count("sum") == 1
        assert started[-1] == "sum", started
        assert started.count("message") > 0
        assert labels == found[0][1]
