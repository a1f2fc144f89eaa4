"""What `meshwright plan` says of memory and traffic is what ranks allocate and send."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from weakref import finalize

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from framework.comm.communicator import TrafficReading, read_traffic, subtract_traffic, sum_traffic
from framework.comm.connect import connect
from framework.commands.plan import print_plan
from framework.errors import EXIT_DONE, EXIT_MEMORY
from framework.plan.forecast_plan import measure_traffic
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.recipe.schema import Memory, Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.step import TrainingRun, train_step
from framework.verify.layout import share
from tests.families import build_config, family
from tests.grid import IN_TURN, few_of
from tests.planned import held_by_buffers, kept_activations
from tests.ranks.mixers import Way
from tests.ranks.parity import CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

SEQUENCES = 12
KINDS = ("parameters", "gradients", "master", "optimizer")


def layouts() -> dict[str, Recipe]:
    zeros = [Zero(stage=0), *(Zero(stage, within) for stage, within in product((1, 2, 3), (None, 2)))]
    zeros += [Zero(stage, 2, optimizer_within="all") for stage in (1, 3)]
    wide = {
        f"{precision} {count} microbatches {zero}": small_recipe(precision, 4, count, SEQUENCES, None, zero)
        for precision, count, zero in product(("fp32", "bf16"), (1, 3), zeros)
    }
    narrow = {
        f"{label}, bf16 wire": replace(recipe, precision=replace(recipe.precision, reduce="bf16"))
        for label, recipe in wide.items()
        if "fp32 3 micro" in label and recipe.zero.shard_within is None
    }
    few_bits = {
        f"{label}, moments in {moments}": replace(recipe, precision=replace(recipe.precision, moments=moments))
        for label, recipe in wide.items()
        for moments in ("bf16", "int8")
        if "fp32 1 micro" in label and (recipe.zero.stage == 0 or recipe.zero.optimizer_within == "all")
    }
    return wide | narrow | few_bits


def measure(rank: int, world: int, rendezvous: str, case: Case) -> dict[str, tuple[dict[str, int], int]]:
    """Body: for each layout the bytes that are allocated by kind, before the first step, and those sent in a step."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, case.config), mesh)
        allocated = measure_memory(run)
        before = sum_traffic(read_traffic(mesh.axes))
        train_step(run, share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
        after = sum_traffic(read_traffic(mesh.axes))
        sent = sum(after[axis].get("bytes", 0) - before[axis].get("bytes", 0) for axis in ("shard", "replica"))
        found[label] = allocated, sent
        mesh.close()
    return found


def measure_memory(run: TrainingRun) -> dict[str, int]:
    """Bytes of distinct memory; what two kinds share counts for the first of them."""
    states = [
        tensor
        for shard in run.optimizer.shards
        for tensor in run.optimizer.states_of(shard).memory(shard, 0, shard.value.numel())
    ]
    kinds: dict[str, list[Tensor]] = {
        "parameters": [tensor for buffer in run.buffers for tensor in (buffer.full, buffer.shard)],
        "gradients": [tensor for buffer in run.buffers for tensor in (buffer.gradient, buffer.reduced)],
        "master": [buffer.master for buffer in run.buffers],
        "optimizer": states,
    }
    seen: set[int] = set()
    totals = {}
    for kind, tensors in kinds.items():
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        totals[kind] = sum(num_bytes for place, num_bytes in storages.items() if place not in seen)
        seen |= storages.keys()
    return totals


@pytest.mark.parametrize(
    ("name", "tied", "every"),
    [
        ("gpt2", True, 11),
        *(
            pytest.param(*each, 1, marks=pytest.mark.grid)
            for each in (("gpt2", True), ("llama", True), ("llama", False))
        ),
    ],
)
def test_planned_bytes_are_allocated_and_sent(pool: RankPool, name: str, tied: bool, every: int) -> None:
    """every: 1 for all layouts; with every eleventh, each precision."""
    few = dict([*list(layouts().items())[::every], *list(layouts().items())[-1:]])
    case = Case("", family(name), few, {"tie_word_embeddings": tied})
    by_rank = pool.run(4, measure, case)
    for label, recipe in case.layouts.items():
        for rank, measured in enumerate(by_rank):
            allocated, sent = measured[label]
            plan = make_plan(recipe, case.config)
            planned = held_by_buffers(plan, rank)
            # Full optimizer states leave out the padding that the last rank holds; those of few bits are exact.
            within = 0.02 if recipe.precision.moments == "fp32" else 0
            assert allocated.pop("optimizer") == pytest.approx(planned["optimizer"], rel=within), label
            assert allocated == {kind: planned[kind] for kind in KINDS if kind != "optimizer"}, label
            assert sent == sum(measure_traffic(plan, rank).values()), label


def measure_numbers(rank: int, world: int, rendezvous: str, recipe: Recipe) -> tuple[TrafficReading, int]:
    """Body: what a step sends beside parameters and gradients, and the number of trained parameters."""
    case = Case("", family("llama"), {"": recipe})
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    before = read_traffic(mesh.axes)
    train_step(run, share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
    sent = subtract_traffic(read_traffic(mesh.axes), before)
    mesh.close()
    return {axis: sent[axis] for axis in sent if axis not in ("shard", "replica")}, len(
        list(run.stages[0].model.model.parameters())
    )


@pytest.mark.parametrize("accumulation", [1, 3])
def test_beside_gradients_a_step_sums_a_few_numbers(pool: RankPool, accumulation: int) -> None:
    """The count of loss tokens over the batch axis; over the world loss, norm, three flags, the place of the loss scale, and
    for each parameter whether it was reached, 8 bytes each."""
    for sent, num_parameters in pool.run(2, measure_numbers, small_recipe("fp32", 2, accumulation, SEQUENCES)):
        assert sent == {"batch": {"all_reduce": (1, 8)}, "world": {"all_reduce": (1, 8 * (6 + num_parameters))}}


@pytest.mark.parametrize(
    ("model", "total"),
    few_of(
        [("deepseek_v3", "671,026,404,352"), ("llama3_1_70b", "70,553,706,496"), ("gpt2", "124,439,808")],
        lambda model, _: model != "llama3_1_70b",
    ),
)
def test_large_models_are_planned_without_memory(model: str, total: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = compose(
        [f"model={model}", "zero=stage_3", "launch.ranks=32", "batch.sequences_per_microbatch=1"]
    ).require()
    assert print_plan(recipe) in (EXIT_DONE, EXIT_MEMORY)
    printed = capsys.readouterr().out
    assert f"{total} parameters" in printed
    assert "stage 3: 32 shards, 1 replica" in printed


def test_a_node_holds_all_local_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_plan(compose(["zero=hsdp", "launch.ranks=4"]).require()) == EXIT_DONE
    assert "stage 3: 4 shards, 1 replica" in capsys.readouterr().out


def measure_activations(rank: int, world: int, rendezvous: str, recipe: Recipe) -> list[int]:
    """Body: bytes over `tp` in a step of two layers and of three."""
    sent = []
    for num_layers in (2, 3):
        case = Case("", family("llama"), {"": recipe}, {"num_hidden_layers": num_layers})
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{num_layers}", rank)
        run = build(make_plan(recipe, case.config), mesh)
        before = sum(mesh.axis("tp").traffic.bytes.values())
        train_step(run, share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
        sent.append(sum(mesh.axis("tp").traffic.bytes.values()) - before)
        mesh.close()
    return sent


def test_bytes_of_a_tensor_parallel_layer_are_what_ranks_send(pool: RankPool) -> None:
    recipe = small_recipe("fp32", 2, 3, 12, None, Zero(stage=0), Parallel(tp=2, sequence=False))
    config = Case("", family("llama"), {"": recipe}).config
    planned = 3 * make_plan(recipe, config).tensor_bytes[0]
    for two, three in pool.run(2, measure_activations, recipe):
        assert three - two == planned


def measure_rows(rank: int, world: int, rendezvous: str, recipe: Recipe) -> int:
    """Body: bytes over `ep` in a step."""
    case = Case("", family("mixtral"), {"": recipe}, {"num_hidden_layers": 2})
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    tokens = torch.randint(3, 97, (recipe.batch.sequences_per_step or 0, recipe.batch.context))
    batch = replace(case.batches()[0], input_ids=tokens, labels=tokens)
    train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
    sent = sum(mesh.axis("ep").traffic.bytes.values())
    mesh.close()
    return sent


@pytest.mark.parametrize("checkpointing", few_of(["none", "full"], lambda policy: policy == "none"))
def test_rows_sent_to_experts_are_planned_for_a_uniform_router(pool: RankPool, checkpointing: str) -> None:
    """Between two ranks the mean is uniform whatever the router: what one of them sends, the other keeps."""
    recipe = small_recipe("fp32", 2, 2, 8, None, Zero(stage=0), Parallel(ep=2))
    recipe = replace(recipe, batch=replace(recipe.batch, context=64), memory=Memory(checkpointing, compile="never"))  # type: ignore[arg-type]
    plan = make_plan(recipe, Case("", family("mixtral"), {"": recipe}, {"num_hidden_layers": 2}).config)
    planned = measure_traffic(plan, 0)["ep"]
    hidden, pairs = plan.whole.config.hidden_size, 2 * 2 * 64 * 2
    if checkpointing == "none":
        # Two layers; rows of fp32 there and back, twice; in each microbatch the numbers of 4 experts, int64.
        assert planned == 2 * (4 * pairs * hidden * 4 + 2 * 4 * 8) // 2
    assert sum(pool.run(2, measure_rows, recipe)) / 2 == pytest.approx(planned, rel=0.05)
    assert measure_traffic(make_plan(replace(recipe, parallel=Parallel()), plan.config), 0)["ep"] == 0


def measure_experts(rank: int, world: int, rendezvous: str, case: Case) -> dict[str, tuple[dict[str, int], int, int]]:
    """Body: for each layout the allocated bytes by kind, and of buffers of experts those of parameters and of master weights."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, case.config), mesh)
        buffers = [each for each in run.buffers if each.plan.axes.shard.name == "expert_shard"]
        parameters = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for buffer in buffers
            for each in (buffer.full, buffer.shard)
        }
        masters = sum(buffer.master.untyped_storage().nbytes() for buffer in buffers)
        found[label] = measure_memory(run), sum(parameters.values()), masters
        mesh.close()
    return found


EXPERT_LAYOUTS = {
    f"ep {ep}, stage {stage}": small_recipe("bf16", 4, 1, SEQUENCES, None, Zero(stage=stage), Parallel(ep=ep))
    for ep, stage in ((2, 0), (2, 1), (4, 1), (2, 3))
}


def test_a_rank_holds_its_part_of_the_experts_and_of_that_what_zero_leaves(pool: RankPool) -> None:
    case = Case("", family("mixtral"), EXPERT_LAYOUTS)
    by_rank = pool.run(4, measure_experts, case)
    for label, recipe in EXPERT_LAYOUTS.items():
        plan = make_plan(recipe, case.config)
        experts = sum(each.numel() for name, each in plan.whole.named_parameters() if ".experts." in name)
        ep, stage = recipe.parallel.ep, recipe.zero.stage
        shards = 4 // ep if stage else 1
        for rank, measured in enumerate(by_rank):
            allocated, parameters, masters = measured[label]
            planned = held_by_buffers(plan, rank)
            assert allocated.pop("optimizer") == pytest.approx(planned["optimizer"], rel=0.02), label
            assert allocated == {kind: planned[kind] for kind in KINDS if kind != "optimizer"}, label
            assert parameters == 2 * experts // ep // (shards if stage == 3 else 1), label
            assert masters == 4 * experts // ep // shards, label


# --- pipelines

WIDE = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4}
WIDE |= {"num_hidden_layers": 8, "vocab_size": 1024}


def pipeline_of(precision: str, pp: int, tp: int, schedule: str, memory: Memory) -> Recipe:
    parallel = Parallel(pp=pp, tp=tp)
    recipe = small_recipe(precision, 4, 6, 12, None, Zero(stage=0), parallel)
    memory, batch = replace(memory, compile="never"), replace(recipe.batch, context=64)
    return replace(recipe, memory=memory, batch=batch, pipeline=Pipeline(schedule=schedule))  # type: ignore[arg-type]


PIPELINES = {
    "1f1b": pipeline_of("fp32", 4, 1, "1f1b", Memory()),
    "gpipe": pipeline_of("bf16", 2, 2, "gpipe", Memory()),
    "interleaved": pipeline_of("bf16", 4, 1, "interleaved", Memory()),
    "zbv": pipeline_of("bf16", 2, 2, "zbv", Memory(chunked_loss=True)),
}


@contextmanager
def counting_saved_bytes(parameters: set[int]) -> Iterator[list[int]]:
    """The most bytes of distinct storages at once that autograd keeps; parameters, by address, are left out."""
    counts: Counter[int] = Counter()
    sizes: dict[int, int] = {}
    peak = [0]

    class Kept:
        """Alive as long as autograd keeps the tensor."""

        def __init__(self, tensor: Tensor):
            self.tensor, storage = tensor, tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in parameters:
                counts[address] += 1
                sizes[address] = storage.nbytes()
                peak[0] = max(peak[0], sum(sizes[each] for each, count in counts.items() if count))
                finalize(self, lambda: counts.subtract([address]))

    with saved_tensors_hooks(Kept, lambda each: each.tensor):
        yield peak


def observe_pipelines(rank: int, world: int, rendezvous: str, case: Case) -> dict[str, tuple[int, int]]:
    """Body: of each layout the most bytes that a step kept for backward, and the bytes that it sent over `pp`."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, case.config), mesh)
        tokens = torch.randint(3, 97, (SEQUENCES, recipe.batch.context or 0))
        batch = replace(case.batches()[0], input_ids=tokens, labels=tokens)
        before = sum_traffic(read_traffic(mesh.axes))["pp"].get("bytes", 0)
        with counting_saved_bytes({buffer.full.untyped_storage().data_ptr() for buffer in run.buffers}) as peak:
            train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
        found[label] = peak[0], sum_traffic(read_traffic(mesh.axes))["pp"]["bytes"] - before
        mesh.close()
    return found


def observe_mixers(rank: int, world: int, rendezvous: str, ways: list[Way]) -> list[int]:
    """Body: of each way the most bytes that a step kept for backward."""
    found = []
    for number, way in enumerate(ways):
        case = way.case()
        mesh = connect(topology_of(way.recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(way.recipe, case.config), mesh)
        microbatches = share(case.batches()[0], way.recipe.batch.sequences_per_microbatch, mesh)
        with counting_saved_bytes({buffer.full.untyped_storage().data_ptr() for buffer in run.buffers}) as peak:
            train_step(run, microbatches, 0, 1e-3)
        found.append(peak[0])
        mesh.close()
    return found


def test_recurrent_mixers_keep_what_was_planned(pool: RankPool) -> None:
    """Beside attentions and mixtures whose bytes are estimates."""
    ways = [Way(name, context=128, dp=2) for name in ("qwen3_5_text", "nemotron_h", "lfm2", "kimi_linear")]
    ways += [Way("qwen3_5_text", context=128, tp=2), Way("qwen3_5_text", 2, context=256)]
    for way, kept in zip(ways, pool.run(2, observe_mixers, ways)[0], strict=True):
        planned = kept_activations(make_plan(way.recipe, way.case().config), 0)
        assert kept == pytest.approx(planned, rel=0.15), (way.family, way.tp, way.cp)


@pytest.mark.parametrize("label", few_of(PIPELINES, lambda label: label == "zbv"))
def test_a_pipeline_keeps_and_sends_what_was_planned(pool: RankPool, label: str) -> None:
    """Of each rank. Where weights' gradients wait, a part of what is kept goes before them, so less is saved than planned."""
    case = Case("", family("llama"), {label: PIPELINES[label]}, WIDE)
    by_rank = pool.run(4, observe_pipelines, case)
    plan = make_plan(PIPELINES[label], case.config)
    for rank in plan.topology.ranks("pp", 0):
        kept, sent = by_rank[rank][label]
        assert sent == measure_traffic(plan, rank)["pp"], rank
        planned = kept_activations(plan, rank)
        assert kept == pytest.approx(planned, rel=0.1) or (label == "zbv" and kept < planned), rank


def test_plan_says_of_each_rank_of_a_pipeline_what_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each rank, equal neighbours in one; units of other ranks than the first have their parameters."""
    recipe = compose(["model=llama3_2_1b", "parallel.pp=4", "launch.ranks=4", "pipeline.schedule=gpipe"]).require()
    assert print_plan(recipe, ["ranks", "layouts"]) in (EXIT_DONE, EXIT_MEMORY)
    printed = capsys.readouterr().out
    units = printed.partition("by dtype\n")[2].partition("parameters of one rank")[0]
    assert len(units.splitlines()) > 2
    assert "none" not in units
    table = printed.partition("live\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in table.splitlines()] == ["0", "1", "3"]  # 1 and 2 alike


def test_experts_that_one_rank_alone_has_do_not_come_and_go() -> None:
    """Nothing is gathered where ep is all that divides them: a copy beside the shard would only cost memory."""
    case = family("qwen3_moe")
    recipe = replace(small_recipe("fp32", 2, 1, SEQUENCES, zero=Zero(stage=3)), parallel=Parallel(ep=2))
    plan = make_plan(recipe, build_config(case))
    kept = {
        buffer.axes.shard.name: buffer.lifetimes.resident_parameters
        for buffer in plan.of_rank(0).stages[0].buffers
        if buffer.unit == "layers.1"
    }
    assert kept == {"shard": False, "expert_shard": True}
