"""Out of memory: what is said to lower, and that the numbers are those of the plans with it."""

import re
from functools import cache

import pytest
import torch

from framework.cli import main
from framework.errors import EXIT_MEMORY, OutOfMemory
from framework.model.load import load_config
from framework.output import show_bytes
from framework.plan.advice import describe_savings, explain_out_of_memory, find_relief, find_savings
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

WORDS = ("model=tiny_llama", "data=python_stdlib", "launch.ranks=4", "launch.device=cpu", "precision=fp32")
WORDS += ("batch.sequences_per_step=32", "batch.sequences_per_microbatch=8", "batch.context=512")


@cache
def plan_of(*words):
    recipe = compose([*WORDS, *words]).require()
    return make_plan(recipe, load_config(recipe.model))


@cache
def relief_of(*words):
    return list(find_relief(plan_of(*words), 0))


@cache
def savings_of(*words):
    return list(find_savings(plan_of(*words), 0))


@pytest.fixture(scope="module")
def plan():
    return plan_of()


@pytest.fixture(scope="module", autouse=True)
def no_plan_stays():
    yield
    for each in (plan_of, relief_of, savings_of):
        each.cache_clear()


def test_the_cheapest_comes_first_and_each_number_is_that_of_the_plan_with_those_before():
    plan = plan_of("parallel.dp=4")
    rows = list(find_relief(plan, 0))
    changes = [change for change, _ in rows]
    assert changes == [
        "zero.stage=1",
        "memory.chunked_loss=true",
        "batch.sequences_per_microbatch=4",
        "zero.stage=2",
        "batch.sequences_per_microbatch=2",
        "batch.sequences_per_microbatch=1",
        "memory.activation_checkpointing=selective",
        "memory.activation_checkpointing=full",
        "memory.activation_checkpointing=sqrt",
        "zero.stage=3",
    ]
    for number, (_, size) in enumerate(rows, start=1):
        assert plan_of("parallel.dp=4", *changes[:number]).memory(0).reserved == size
    sizes = [plan.memory(0).reserved, *(size for _, size in rows)]
    assert sizes == sorted(sizes, reverse=True)


def test_more_ranks_share_a_sequence_where_no_microbatch_is_smaller_and_dp_is_not_stated():
    words = ("zero.stage=2", "batch.sequences_per_microbatch=1", "memory.chunked_loss=true")
    rows = dict(relief_of(*words))
    assert [*rows][:2] == ["parallel.cp=2", "parallel.cp=4"]
    one, two, four = (plan_of(*words, f"parallel.cp={degree}").memory(0) for degree in (1, 2, 4))
    assert (two.reserved, four.reserved) == (rows["parallel.cp=2"], rows["parallel.cp=4"])
    # Half of the tokens, half of the activations; what ZeRO shards it shards over as many ranks.
    assert two.held["activations"] < 0.6 * one.held["activations"]
    of_tokens = {"activations": 0, "temporaries": 0}
    assert two.held | of_tokens == one.held | of_tokens
    told = {each.override for each in savings_of(*words)}
    assert "parallel.cp=2" in told
    assert not [change for change, _ in find_relief(plan_of(*words, "parallel.dp=4"), 0) if "cp" in change]


def test_offload_of_activations_comes_before_checkpointing_where_the_device_is_not_the_host():
    words = ("launch.device=cuda", "launch.ranks=1", "batch.sequences_per_microbatch=1")
    rows = dict(relief_of(*words))
    changes = [*rows]
    at = changes.index("memory.offload.activations=1.0")
    assert changes[at + 1] == "memory.activation_checkpointing=full"
    assert plan_of(*words, *changes[: at + 1]).memory(0).reserved == rows[changes[at]]


def test_nothing_is_said_that_does_not_fit_the_recipe():
    alone = plan_of("launch.ranks=1", "batch.sequences_per_microbatch=1", "memory.activation_checkpointing=sqrt")
    assert not [change for change, _ in find_relief(alone, 0) if "chunked" not in change]


@pytest.mark.parametrize(
    "error",
    few_of(
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.\nmore"),
            RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to"),
            MemoryError("cannot allocate"),
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            RuntimeError("Cuda failure 2 'out of memory'"),
        ],
        lambda error: isinstance(error, torch.OutOfMemoryError),
    ),
)
def test_every_way_to_be_out_of_memory_is_one_error_with_the_numbers(plan, error):
    with pytest.raises(OutOfMemory) as caught, explain_out_of_memory(plan, 0):
        raise error
    said = str(caught.value)
    assert caught.value.exit_code == EXIT_MEMORY
    assert said.startswith(str(error).splitlines()[0])
    assert f"planned to hold {show_bytes(plan.memory(0).reserved)}" in said
    # The three cheapest, each with what the rank would hold.
    cheapest = [f"{change} {show_bytes(size)}" for change, size in relief_of()][:3]
    assert cheapest[0].startswith("zero.stage=1 ")
    assert [" ".join(line.split()) for line in said.splitlines() if line.startswith("  ")] == cheapest


def test_of_nccls_lines_the_one_that_names_the_memory_comes_first(plan):
    text = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
    with pytest.raises(OutOfMemory, match=r"^Cuda failure 2 'out of memory'\n"), explain_out_of_memory(plan, 0):
        raise RuntimeError(text)


def test_an_error_without_a_word_is_explained_too(plan):
    with pytest.raises(OutOfMemory, match=r"^MemoryError\n"), explain_out_of_memory(plan, 0):
        raise MemoryError


def test_another_error_stays_what_it_is(plan):
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory(plan, 0):
        raise RuntimeError("shapes do not match")


SHOWN = ("zero.stage=3", "memory.offload.optimizer=1.0", "precision.moments=int8")


@pytest.mark.parametrize(
    "is_shown", [SHOWN.__contains__, pytest.param(bool, marks=pytest.mark.grid)], ids=["few", "all"]
)
def test_each_option_by_itself_saves_what_the_plan_with_it_says(is_shown):
    words = ("launch.device=cuda", "precision=bf16", "zero.stage=1")
    before, rows = plan_of(*words).memory(0), savings_of(*words)
    told = {each.override: each for each in rows}
    assert set(SHOWN) <= told.keys()
    for override, each in told.items():
        if not is_shown(override):
            continue
        after = plan_of(*words, override).memory(0)
        assert (each.device, each.host) == (before.reserved - after.reserved, after.host), override
    assert told["memory.activation_checkpointing=full"].costs.endswith("% FLOPs")
    assert re.match(r"\+\d+% bytes sent", told["zero.stage=3"].costs)
    text = "\n".join(describe_savings(plan_of(*words)))
    assert all(each.override in text for each in rows)


def test_doctor_says_what_each_option_saves_and_costs_and_the_three_cheapest(capsys):
    words = ("launch.device=cuda", "precision=bf16", "zero.stage=1")
    main(["doctor", *WORDS, *words])
    lines = capsys.readouterr().out.splitlines()
    options = {line.split()[2]: line for line in lines if line.split()[1] == "option"}
    rows = savings_of(*words)
    assert [*options] == [each.override for each in rows]
    for each in rows:
        assert f"saves {show_bytes(each.device)}" in options[each.override]
        assert options[each.override].endswith(f"costs {each.costs}")
    away = "memory.offload.optimizer=1.0"
    assert f"the host holds {show_bytes(plan_of(*words, away).memory(0).host)} more" in options[away]
    [memory] = [line for line in lines if line.split()[1] == "memory"]
    three = [f"{change}: {show_bytes(size)}" for change, size in relief_of(*words)][:3]
    assert memory.endswith(", then ".join(three))
