"""What `plan` and `search` say agrees, and loses nothing of the user's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from framework.cli import main
from framework.comm.groups import choose_backends, plan_groups
from framework.errors import RecipeError
from framework.plan import pages
from framework.plan.advice import describe_verdict
from framework.plan.candidate import Candidate, resolve_target
from framework.plan.check import check_layout
from framework.plan.cluster import ClusterRates
from framework.plan.forecast_memory import MemoryForecast, MemoryModel, StageMemory
from framework.plan.forecast_plan import BY_DATA_SHEETS, forecast_plan, measure_traffic
from framework.plan.plan import make_plan
from framework.plan.plan_text import describe_run, save_schedule
from framework.plan.shape import make_shape
from framework.plan.state_bytes import COMMUNICATOR_BYTES, CONTEXT_BYTES, MESSAGES_BYTES
from framework.plan.time import TimeModel
from framework.recipe.compose import compose, compose_for_nodes
from framework.recipe.schema import Recipe
from framework.track.summary import read_loads
from tests.families import build_config, family
from tests.grid import IN_TURN

pytestmark = IN_TURN

TINY = ("model=tiny_llama", "data=python_stdlib", "cluster=h100_ib", "batch.sequences_per_step=8")


def test_bytes_do_not_depend_on_what_was_asked_before() -> None:
    """NCCL has a communicator more with cp, whose layouts else have the states of those without."""
    config = build_config(family("llama"))
    recipe = resolve_target(compose(["launch.device=cuda", "cluster=h100_ib"], []).require())
    cluster = ClusterRates.from_recipe(recipe)
    candidates = [Candidate(dp=4, zero=3, shard=4, context=32), Candidate(dp=2, cp=2, zero=3, shard=4, context=32)]
    models = [MemoryModel.of(make_shape(config, recipe), recipe) for _ in range(3)]
    both = [models[0].forecast(each, cluster).fullest.reserved for each in candidates]
    alone = [model.forecast(each, cluster).fullest.reserved for model, each in zip(models[1:], candidates, strict=True)]
    assert both == alone


def test_nodes_on_the_command_line_are_slurms_for_plan_and_search() -> None:
    assert compose_for_nodes(["launch.nodes=4", "batch.sequences_per_step=256"], []).require().launch.kind == "slurm"
    assert compose_for_nodes(["launch.nodes=4", "launch.kind=local"], []).require().launch.kind == "local"
    assert compose_for_nodes([], []).require().launch.kind == Recipe().launch.kind == "local"


def test_a_machine_that_nobody_named_is_called_assumed() -> None:
    memory = MemoryForecast((StageMemory({"parameters": 2**30}, 0, {}),), 2 * 2**30)
    cluster = ClusterRates.from_recipe(resolve_target(compose(list(TINY), []).require()))
    assert describe_verdict(memory, cluster) == "fits the 2.0 GiB of h100_ib with 1.0 GiB to spare"
    assumed = replace(cluster, is_assumed=True)
    assert describe_verdict(memory, assumed).startswith("fits the 2.0 GiB of h100_ib, which is assumed,")


@pytest.mark.parametrize(("cluster", "expected"), [("h100_ib", True), ("laptop", False)])
def test_data_sheets_are_said_to_be_faster_than_runs(cluster: str, expected: bool) -> None:
    device = "cpu" if cluster == "laptop" else "cuda"
    words = [
        "model=tiny_llama",
        "data=python_stdlib",
        f"cluster={cluster}",
        f"launch.device={device}",
        "launch.ranks=2",
    ]
    assert (BY_DATA_SHEETS in forecast_plan(check_layout(compose(words, []).require())).cautions) is expected


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("mine.yaml", "optim: {lr: 1}\n", "was not written by a search"),
        ("layout.txt", None, "end the name in .yaml"),
        ("absent/layout.yaml", None, "there is no folder"),
    ],
)
def test_a_search_writes_over_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, words: str
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    assert main(["search", *TINY, f"--write={file}"]) == 86
    assert words in capsys.readouterr().err
    assert text is None or file.read_text() == text


def test_json_is_one_object_with_all_rejections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "layout.yaml"
    for _ in range(2):  # the second writes over the first
        assert main(["search", *TINY, "launch.ranks=2", "--json", "--best=1", f"--write={file}"]) == 0
    few = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["search", *TINY, "launch.ranks=2", "--json", "--best=1", "--rejections"]) == 0
    full = json.loads(capsys.readouterr().out)
    assert few["best"] == full["best"]
    assert len(full["rejections"]) > len(few["rejections"]) > 0
    assert sum(each["layouts"] for each in full["rejections"]) == full["rejected"]


def test_what_little_spare_memory_may_not_cover_is_called_tight() -> None:
    """Llama 3.1 8B at 8,192 tokens on 8 H100s without activation checkpointing: 3 of 79 GiB."""
    cluster = ClusterRates.from_recipe(resolve_target(compose([*TINY, "launch.device=cuda"], []).require()))
    memory = MemoryForecast((StageMemory({"parameters": 97 * 2**20}, 0, {}),), 100 * 2**20)
    assert describe_verdict(memory, cluster).startswith(
        "tight, it may run out of memory: it fits the 100 MiB of h100_ib with 3"
    )
    roomy = MemoryForecast((StageMemory({"parameters": 94 * 2**20}, 0, {}),), 100 * 2**20)
    assert describe_verdict(roomy, cluster).startswith("fits")


def find_attention_s(*words: str) -> float:
    """Seconds of attention in a step of a tiny Llama with sequences of 8,192 tokens."""
    recipe = resolve_target(compose(["launch.device=cuda", "cluster=h100_ib", *words], []).require())
    model = TimeModel(make_shape(build_config(family("llama")), recipe), recipe, ClusterRates.from_recipe(recipe))
    return model.forecast(Candidate(dp=8, context=8192, sequences=64)).parts["attention"]


def test_attention_takes_the_time_of_the_documents_that_it_keeps_to() -> None:
    # Packed calls are FlashAttention's, and so are transformers'; cuDNN's kernel takes whole sequences, and is faster.
    whole = find_attention_s("data.pack=concat", "model.attention=sdpa")
    assert find_attention_s("data.pack=concat") < 0.8 * whole
    # Of 1,024 tokens in the mean; a token finds itself in one of 2,048.
    assert find_attention_s("data.pack=documents") == pytest.approx(whole / 4, rel=0.01)
    # transformers computes all pairs, both halves, and masks.
    assert find_attention_s("data.pack=documents", "model.attention=sdpa") == pytest.approx(2 * whole, rel=0.01)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], ["compiled (memory.compile=auto)", "Meshwright's"]),
        (
            ["data.pack=documents"],
            ["compiled (memory.compile=auto)", "to documents, which are taken to have 1,024 tokens"],
        ),
        (["model.attention=eager"], ["compiled (memory.compile=auto)", "transformers': model.attention=eager"]),
        (
            ["parallel.tp=2", "parallel.overlap=always", "memory.activation_checkpointing=selective"],
            ["as they are: parallel.overlap=always", "Meshwright's"],
        ),
    ],
)
def test_a_plan_says_whether_layers_are_compiled_and_whose_attention_they_have(
    words: list[str], told: list[str]
) -> None:
    recipe = resolve_target(compose([*TINY, "launch.device=cuda", "launch.ranks=2", *words], []).require())
    lines = {line.split()[0]: line for line in describe_run(make_plan(recipe, build_config(family("llama"))))}
    assert told[0] in lines["layers"]
    assert told[1] in lines["attention"]


def test_recorded_loads_of_experts_slow_the_step(tmp_path: Path) -> None:
    recipe = compose([*TINY, "launch.ranks=2", "launch.device=cuda", "parallel.ep=2"], []).require()
    plan = make_plan(recipe, build_config(family("qwen3_moe")))
    even, uneven = (forecast_plan(plan, {"0": loads, "1": loads}) for loads in ([1, 1, 1, 1, 1, 1], [3, 3, 3, 1, 1, 1]))
    assert (even.imbalance, uneven.imbalance) == (1.0, 1.5)
    assert even.forecast.time.parts["imbalance"] == 0 < uneven.forecast.time.parts["imbalance"]
    for other in ({}, {"0": [1] * 6}, {"0": [1] * 3, "1": [1] * 3}):
        with pytest.raises(RecipeError, match=r"--loads: the run has recorded mixtures of .* this model has those of"):
            forecast_plan(plan, other)
    with pytest.raises(RecipeError, match=r"has no expert_loads\.jsonl"):
        read_loads(tmp_path)
    (tmp_path / "expert_loads.jsonl").write_text(json.dumps({"step": 1, "expert_loads": {"0": [3, 3, 1, 1]}}) + "\n")
    assert read_loads(tmp_path) == {"0": [3, 3, 1, 1]}


def test_the_page_of_a_long_table_draws_its_first_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MOST_ACTIONS", 42)
    words = [*TINY, "launch.device=cuda", "launch.ranks=2", "parallel.pp=2", "batch.sequences_per_microbatch=1"]
    words += ["batch.sequences_per_step=12"]
    table = tmp_path / "mine.csv"
    save_schedule(table, check_layout(compose(words).require()).pipeline, 12, "")
    page = pages.make_page(forecast_plan(check_layout(compose([*words, f"pipeline.table={table}"]).require())))
    assert len(page.rows["timeline"]) == 42
    (words_of_timeline,) = (each.words for each in page.sections if each.id == "timeline")
    assert "Schedule mine.csv, drawn with 11 of a step's 12 microbatches" in words_of_timeline


def test_every_kind_of_bytes_is_in_some_link_of_the_page() -> None:
    words = [*TINY, "launch.device=cuda", "launch.ranks=2", "optim=muon"]
    kinds = [kind for _, _, kinds in pages.LINKS.values() for kind in kinds]
    assert sorted(measure_traffic(check_layout(compose(words).require()), 0)) == sorted(kinds)


@pytest.mark.parametrize(
    "words",
    [
        ("zero.quantize_gather=int8", "zero.secondary_shard=node", "zero.quantize_reduce=int4"),
        ("parallel.pp=2", "pipeline.schedule=zbv", "zero.stage=1"),
    ],
    ids=("second copies and codes in two levels", "both ends of a pipeline on one rank"),
)
def test_buffers_of_nccl_are_those_of_the_groups_that_a_run_makes(words: tuple[str, ...]) -> None:
    nodes = ("model=llama3_2_1b", "launch=slurm", "launch.nodes=4", "launch.ranks=32", "launch.device=cuda")
    shared = ("cluster=h100_ib", "precision=bf16", "zero.stage=3", "batch.sequences_per_step=64")
    plan = check_layout(compose([*nodes, *shared, *words]).require())
    groups = plan_groups(plan.topology.outlines(), choose_backends("cuda", is_debug=False))
    sizes = [MESSAGES_BYTES if each.only_messages else COMMUNICATOR_BYTES for each in groups]
    assert plan.memory(0).outside == CONTEXT_BYTES + sum(sizes)
    assert len(sizes) == len(set(plan_groups(plan.topology.axes(0), choose_backends("cuda", is_debug=False))))
    least = plan.memory_model.pipelines.outside(plan.candidate.changed({"zero": 0, "shard": 1}), True)
    assert least <= plan.memory(0).outside
