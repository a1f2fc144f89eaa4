"""Bounds of a node: host memory, disks and devices count in each verdict, as the memory of a device does."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from framework.cli import main
from framework.errors import EXIT_MEMORY, EXIT_USER, RecipeError
from framework.optim.optimizers import state_names
from framework.plan.advice import caution_of_fit, describe_verdict, find_changes
from framework.plan.check import bytes_of_copies, bytes_of_fullest_node, check_layout
from framework.plan.find import Question, choose_layout, search
from framework.plan.forecast_memory import MemoryForecast, ranks_on_nodes
from framework.plan.forecast_plan import forecast_plan
from framework.plan.plan import Plan
from framework.plan.state_bytes import measure_units, total_on_host
from framework.recipe.compose import compose, compose_for_nodes, compose_open, find_pins
from framework.recipe.machines import BY_GPU, OF_CPUS, read_shipped
from tests.grid import IN_TURN

pytestmark = IN_TURN

WORDS = ["model=tiny_llama", "data=python_stdlib", "cluster=h100_ib", "launch.device=cuda", "precision=bf16"]
WORDS += ["batch.sequences_per_step=64", "batch.sequences_per_microbatch=1", "launch.ranks=4"]
AWAY = ["zero.stage=1", "memory.offload.optimizer=1"]
LITTLE = "cluster.host_memory_gb=0.02"
SLURM = ["launch=slurm", "launch.ranks=16"]


def plan_of(*words: str) -> Plan:
    return check_layout(compose([*WORDS, *words]).require())


def memory_of(*words: str) -> MemoryForecast:
    return forecast_plan(plan_of(*words)).forecast.memory


def test_every_shipped_machine_says_what_its_nodes_have() -> None:
    for name in {*BY_GPU.values(), OF_CPUS, "h100_efa"}:
        assert (read_shipped(name).host_memory_gb or 0) >= read_shipped(name).memory_gb


def test_what_a_node_holds_is_what_is_planned() -> None:
    plan = plan_of(*AWAY, "parallel.pp=2")
    node = forecast_plan(plan).forecast.memory.node
    assert node.offloaded == bytes_of_fullest_node(plan) > 0
    assert node.fits
    assert node.there == 2048 << 30
    copied = plan_of(*SLURM, "checkpoint.neighbor_copies=1", "checkpoint.neighbor_every_steps=10")
    found = forecast_plan(copied).forecast.memory.node
    assert found.copies == pytest.approx(bytes_of_copies(copied), rel=0.02)


def test_pinned_memory_is_whole_powers_of_two() -> None:
    plan = plan_of(*AWAY)
    buffers, states = plan.of_rank(0).buffers, partial(state_names, plan.recipe.optim)
    pinned, pageable = (total_on_host(measure_units(buffers, states), is_pinned=each) for each in (True, False))
    # Masters and moments are not pinned; gradients arrive in fp32 and casts of masters leave in bf16.
    owned = [buffer.numel_owned for buffer in buffers]
    rounded = sum(1 << (numel * size - 1).bit_length() for numel in owned for size in (2, 4))
    assert pinned["gradients"] + pinned["gathered"] + pinned["pinning"] == rounded
    assert {**pinned, "pinning": 0} == pageable


@pytest.mark.parametrize(
    ("words", "expected", "relief"),
    [
        ([*AWAY, LITTLE], "host memory (cluster.host_memory_gb)", "memory.offload.optimizer=0.0"),
        (
            [*SLURM, "checkpoint.neighbor_copies=1", "checkpoint.neighbor_every_steps=10", LITTLE],
            "copies of steps (checkpoint.neighbor_copies)",
            "checkpoint.neighbor_copies=0 checkpoint.neighbor_every_steps=null",
        ),
        (
            [*AWAY, "memory.offload.home=disk", "memory.offload.disk_path=/scratch", "cluster.node_disk_gb=0.001"],
            "a node's own disks (cluster.node_disk_gb)",
            "memory.offload.home=host memory.offload.disk_path=null",
        ),
    ],
)
def test_what_a_node_has_not_is_said_with_what_would_fit(
    words: list[str], expected: str, relief: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(*words)
    found = forecast_plan(plan)
    assert found.forecast.memory.spare > 0, "the device has room: the node decides"
    assert expected in describe_verdict(found.forecast.memory, found.cluster)
    assert expected in caution_of_fit(plan)
    assert relief in [change.overrides for change in find_changes(found)]
    assert main(["plan", *WORDS, *words]) == EXIT_MEMORY
    assert "does not fit" in capsys.readouterr().out


def test_a_plan_that_fits_ends_with_0_and_one_too_large_for_devices_with_89() -> None:
    assert main(["plan", *WORDS]) == 0
    assert main(["plan", *WORDS, "cluster.memory_gb=0.5"]) == EXIT_MEMORY


def test_a_job_has_what_it_asks_for() -> None:
    node = memory_of(*SLURM, *AWAY, "launch.memory_per_rank_gb=2").node
    assert node.there == 8 * 2 * 10**9


def ask(words: list[str], **more: Any) -> Question:
    composition = compose_open(words, ())
    return Question(composition.require(), find_pins(composition, words, ()), **more)


def test_a_search_ranks_what_fits_a_node_alone() -> None:
    words = [*WORDS, "parallel.tp=1", "parallel.cp=1", "batch.sequences_per_microbatch=1"]
    free = search(ask(words, best=10**6))
    limit_gb = 0.02
    bound = search(ask([*words, f"cluster.host_memory_gb={limit_gb}"], best=10**6))
    fitting = [
        each.candidate for each in free.ranked if each.forecast.memory.node.offloaded <= int(0.9 * limit_gb * 2**30)
    ]
    assert [each.candidate for each in bound.ranked] == fitting
    assert 0 < len(fitting) < len(free.ranked)
    assert sum(each.count for each in bound.rejections if each.kind == "node") == len(free.ranked) - len(fitting)
    assert bound.num_layouts == bound.num_rejected + bound.num_forecast


def test_the_line_of_a_chosen_layout_says_what_a_node_holds() -> None:
    composition = compose_open([*WORDS, *AWAY], ())
    _, line = choose_layout(composition.require(), find_pins(composition, [*WORDS, *AWAY], ()))
    assert line.endswith("of a node's 2,048.0 GiB of host memory")


def test_ranks_without_nodes_are_not_one_node() -> None:
    composition = compose_for_nodes([*WORDS, "launch.ranks=64"], [])
    launch = composition.require().launch
    assert (launch.kind, launch.ranks, launch.ranks_per_node) == ("slurm", 64, 8)
    assert check_layout(composition.require()).derived.nodes == 8
    smaller = compose_for_nodes([*WORDS, "launch.ranks=64", "cluster.devices_per_node=4"], []).require()
    assert check_layout(smaller).derived.nodes == 16


def test_a_forecast_needs_no_text() -> None:
    composition = compose_for_nodes(["experiment=llama3_1_8b_128k", "cluster=h100_ib"], [])
    assert composition.require().data.sources["files"].path == "not-given"
    assert compose(["experiment=llama3_1_8b_128k"]).problems, "training does"


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["launch.ranks=64", "launch.kind=local"], "launch.kind=slurm launch.ranks_per_node=8"),
        (["launch=slurm", "launch.ranks=64", "launch.ranks_per_node=16"], "launch.ranks_per_node=8"),
    ],
)
def test_more_ranks_than_devices_are_refused_with_the_fix(words: list[str], fix: str) -> None:
    recipe = compose_for_nodes([*WORDS, *words], []).require()
    with pytest.raises(RecipeError, match=fix):
        forecast_plan(check_layout(recipe))
    with pytest.raises(RecipeError, match=fix):
        choose_layout(replace(recipe, parallel=replace(recipe.parallel, layout="auto")), frozenset())


def test_ranks_of_a_node_are_neighbours() -> None:
    assert ranks_on_nodes(16, 2, 8) == ((8, 0), (0, 8))
    assert ranks_on_nodes(8, 4, 8) == ((2, 2, 2, 2),)
    assert ranks_on_nodes(6, 3, 3) == ((2, 1, 0), (0, 1, 2))


def test_submit_says_that_a_recipe_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, *SLURM, *AWAY, f"run.root={tmp_path}"]
    assert main(["submit", "--dry-run", *words]) == 0
    assert "does not fit" not in capsys.readouterr().err
    assert main(["submit", "--dry-run", *words, LITTLE]) == 0
    assert "caution  does not fit: " in capsys.readouterr().err


def test_doctor_calls_it_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *WORDS, *AWAY, LITTLE]) == EXIT_USER
    assert "-> does not fit: " in capsys.readouterr().out
