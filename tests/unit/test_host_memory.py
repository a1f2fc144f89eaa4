"""Host memory that offloaded states take: per node, compared with what a node has before training begins."""

from dataclasses import replace
from math import ceil, log2
from typing import Any

import pytest

from framework.errors import RecipeError
from framework.launch.settle import refuse_offload_to_device
from framework.model.load import load_config
from framework.parallel.zero.buffer_plan import Home
from framework.parallel.zero.plan_buffers import choose_homes, is_shared
from framework.plan.advice import find_relief
from framework.plan.check import (
    MEMORY,
    bytes_checkpointed,
    bytes_of_copies,
    bytes_of_fullest_node,
    bytes_saved,
    check_copies,
    check_host_memory,
    find_node_bytes,
)
from framework.plan.plan import Plan, make_plan
from framework.plan.plan_text import describe_ranks
from framework.recipe.compose import compose
from framework.recipe.schema import Offload
from tests.grid import IN_TURN

pytestmark = IN_TURN

WORDS = ("model=tiny_llama", "data=python_stdlib", "launch.device=cuda", "precision=bf16", "batch.context=64")
WORDS += ("batch.sequences_per_step=8", "batch.sequences_per_microbatch=1", "launch.ranks=4")


def plan_of(*words: str) -> Plan:
    recipe = compose([*WORDS, *words]).require()
    return make_plan(recipe, load_config(recipe.model))


@pytest.fixture(scope="module")
def away() -> Plan:
    return plan_of("zero.stage=2", "memory.offload.optimizer=1")


def test_what_the_device_does_not_hold_the_host_holds(away: Plan) -> None:
    there = plan_of("zero.stage=2").memory(0)
    memory = away.memory(0)
    assert there.host == 0
    moved = there.held["master"] + there.held["optimizer"]
    assert there.reserved - memory.reserved == moved == bytes_saved(away, 0)
    # fp32: master, two moments and a copy of the gradient
    assert memory.on_host["master"] + memory.on_host["optimizer"] == moved
    assert memory.on_host["gradients"] == memory.on_host["master"]
    assert bytes_of_fullest_node(away) == 4 * memory.host


def test_each_pinned_block_takes_the_next_power_of_two(away: Plan) -> None:
    """Pinned are copies of gradients, in fp32, and of the new weights, in bf16: torch's cache of such memory rounds each up."""
    blocks = [buffer.numel_owned * itemsize for buffer in away.of_rank(0).buffers for itemsize in (4, 2)]
    added = sum(2 ** ceil(log2(block)) - block for block in blocks)
    assert 0 < added == away.memory(0).on_host["pinning"]
    assert away.memory(0).host == sum(away.memory(0).on_host.values())


def test_a_node_is_asked_for_all_of_its_ranks() -> None:
    words = ("launch.kind=slurm", "launch.ranks=4", "launch.ranks_per_node=2", "parallel.pp=2", "zero.stage=1")
    plan = plan_of(*words, "memory.offload.optimizer=1", "launch.memory_per_rank_gb=3")
    stages = [plan.memory(rank).host for rank in plan.topology.ranks("pp", 0)]
    assert stages[0] != stages[1]
    assert bytes_of_fullest_node(plan) == 2 * max(stages)
    assert find_node_bytes(plan.recipe) <= 6e9


def test_too_little_memory_is_told_with_what_fits(away: Plan) -> None:
    needed = bytes_of_fullest_node(away)
    check_host_memory(away, 2 * needed)
    with pytest.raises(RecipeError) as error:
        check_host_memory(away, needed // 2)
    told = str(error.value)
    assert told.startswith("memory.offload.optimizer=1: the 4 ranks of a node")
    assert "memory.offload.optimizer=0.45 or less" in told


def test_a_plan_without_offload_asks_nobody() -> None:
    check_host_memory(plan_of("zero.stage=2"), 0)


def test_the_page_says_what_is_saved_and_where_it_goes(away: Plan) -> None:
    page = "\n".join(describe_ranks(away))
    assert "bytes of the host's memory that it takes for them" in page
    assert "a node of 4 ranks: at most" in page
    assert "host's memory" not in "\n".join(describe_ranks(plan_of("zero.stage=2")))


def test_relief_names_offload_last_with_its_bytes() -> None:
    plan = plan_of("zero.stage=3", "memory=full_checkpointing")
    rows = list(find_relief(plan, 0))
    assert rows[-1][0] == "memory.offload.optimizer=1.0"
    held = plan.memory(0).held
    assert rows[-1][1] <= plan.memory(0).reserved - held["master"] - held["optimizer"]


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_a_fraction_is_of_bytes_and_spread_over_units(fraction: float) -> None:
    buffers = plan_of("zero.stage=2", f"memory.offload.optimizer={fraction}").of_rank(0).buffers
    away = [each for each in buffers if each.lifetimes.homes.master == Home.HOST]
    size = [sum(each.numel_owned for each in some) for some in (away, buffers)]
    largest = max(each.numel_owned for each in buffers)
    assert abs(size[0] - fraction * size[1]) <= largest
    assert (len(away) == 0) == (fraction == 0)
    assert (len(away) == len(buffers)) == (fraction == 1)


def test_what_two_stages_share_leaves_the_device_as_a_whole_or_not_at_all() -> None:
    """A CPU rounds otherwise than a GPU: copies of one embedding would part."""
    words = ("parallel.pp=2", "zero.stage=1", "model.config.tie_word_embeddings=true")
    plan = plan_of(*words)
    shared: list[Any] = [each for rank in (0, 2) for each in plan.of_rank(rank).buffers if is_shared(each)]
    assert len(shared) == 2
    for fraction, home in ((0.9, Home.DEVICE), (1.0, Home.HOST)):
        placed = choose_homes(shared, Offload(optimizer=fraction))
        assert {each.lifetimes.homes.master for each in placed} == {home}


def test_a_device_that_turns_out_to_be_the_host_is_refused() -> None:
    recipe = compose([*WORDS, "memory.offload.optimizer=1", "launch.device=auto"]).require()
    settled = plan_of("zero.stage=2").recipe
    refuse_offload_to_device(settled)
    with pytest.raises(RecipeError, match=r"memory\.offload\.optimizer"):
        refuse_offload_to_device(replace(recipe, launch=replace(recipe.launch, device="cpu")))


COPIES = ("launch.kind=slurm", "launch.ranks=4", "launch.ranks_per_node=2", "checkpoint.neighbor_every_steps=10")


@pytest.mark.parametrize(
    "words", [("zero.stage=0",), ("zero.stage=3",), ("parallel.pp=2", "zero.stage=1")], ids=" ".join
)
def test_what_ranks_write_is_what_a_checkpoint_has(words: tuple[str, ...]) -> None:
    plan = plan_of(*words)
    written = sum(bytes_checkpointed(plan, rank) for rank in range(4))
    assert written == 12 * plan.size.total  # fp32: master and two moments


def test_nodes_hold_two_steps_of_their_own_and_their_neighbours_ranks() -> None:
    plan = plan_of(*COPIES, "checkpoint.neighbor_copies=1")
    assert bytes_of_copies(plan) == pytest.approx(2 * 2 * 12 * plan.size.total / 2, rel=1e-3)
    assert bytes_of_copies(plan_of("zero.stage=0")) == 0
    assert f"in {MEMORY}: two steps of its own ranks and of 1 other node (" in "\n".join(describe_ranks(plan))
    assert str(MEMORY) not in "\n".join(describe_ranks(plan_of("zero.stage=2")))


def test_copies_that_do_not_fit_are_refused_with_the_key_and_what_is_there() -> None:
    plan = plan_of(*COPIES, "checkpoint.neighbor_copies=1")
    needed = bytes_of_copies(plan)
    check_copies(plan, 2 * needed, needed)
    with pytest.raises(
        RecipeError, match=r"checkpoint\.neighbor_copies=1: a node would hold .* and /dev/shm has 0 MiB"
    ):
        check_copies(plan, 2 * needed, 1000)
    with pytest.raises(RecipeError, match="a node can spare"):
        check_copies(plan, needed, 2 * needed)
    with pytest.raises(RecipeError, match="a node can spare"):
        check_host_memory(plan, needed)


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (("checkpoint.neighbor_copies=1", "launch.kind=local"), "neighbor_copies", "launch=slurm with launch.nodes=2"),
        (("checkpoint.neighbor_copies=2",), "neighbor_copies", "checkpoint.neighbor_copies=1"),
        (("checkpoint.neighbor_copies=1", "checkpoint.neighbor_every_steps=null"), "neighbor_copies", "every_steps=10"),
        ((), "neighbor_every_steps", "checkpoint.neighbor_copies=1"),
    ],
)
def test_copies_that_nobody_can_hold_are_refused(words: tuple[str, ...], key: str, fix: str) -> None:
    with pytest.raises(RecipeError) as error:
        compose([*WORDS, *COPIES, *words]).require()
    assert f"checkpoint.{key}" in str(error.value)
    assert fix in str(error.value)
