"""What layers keep and compute again, by policy: bytes and FLOPs as counted on one rank against the formulas, and what a
recomputation restores."""

import gc
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, compress, product
from math import ceil, isqrt
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.flop_counter import FlopCounterMode

from framework.comm.connect import connect
from framework.errors import RecipeError
from framework.model.experts import ExpertsForm, count_experts, find_experts
from framework.model.kept_outputs import KeptOutputs, LayerCall
from framework.model.load import load_config
from framework.model.matmul import RowGroups, StackedMatmul
from framework.parallel import activation_checkpointing
from framework.parallel.activation_checkpointing import CheckpointedForward, count_groups, group_size
from framework.parallel.experts.dispatch import ExpertDispatch
from framework.plan.plan import GB, Plan, make_plan
from framework.plan.plan_text import describe_run
from framework.plan.policies import POLICIES, uniform
from framework.plan.state_bytes import FRAGMENTATION
from framework.recipe.compose import compose
from framework.recipe.schema import KEPT_OPERATIONS, Memory, Parallel
from framework.train.build import build
from framework.train.stage import RankStage
from framework.train.step import TrainingRun, train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from tests.families import FAMILIES, UNGATED, build_config, family, skip_without_initial_values
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, small_recipe, topology_of

pytestmark = IN_TURN

# Llama-3-8B by a sixteenth, and a context in proportion to 2048; the form of a head stays.
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
CONTEXT = 128
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
aten = torch.ops.aten


def memory_of(policy: str, **values: Any) -> Memory:
    return Memory(activation_checkpointing=policy, compile="never", **values)  # type: ignore[arg-type]


def plan_of(
    memory: Memory,
    num_layers: int,
    widths: Mapping[str, Any],
    precision: str = "bf16",
    name: str = "llama",
    pp: int = 1,
) -> Plan:
    config = build_config(family(name), **widths, num_hidden_layers=num_layers)
    config.use_cache = False
    recipe = small_recipe(precision, pp, 1, pp, parallel=Parallel(pp=pp))
    return make_plan(replace(recipe, memory=memory, batch=replace(recipe.batch, context=CONTEXT)), config)


def prepare(plan: Plan) -> tuple[TrainingRun, list[Any]]:
    """A run of one rank, and a microbatch for its steps."""
    mesh, context = connect(topology_of(plan.recipe, plan.config), CPU), plan.recipe.batch.context
    (batch,) = make_batches(plan.config, 1, 1, context, seed=11)
    tokens = torch.randint(3, 97, (1, context), generator=torch.Generator().manual_seed(1))
    return build(plan, mesh), share(replace(batch, input_ids=tokens, labels=tokens), 1, mesh)


def start(plan: Plan) -> tuple[TrainingRun, list[Any]]:
    """A run of one rank that has made its first step, and a microbatch for the next."""
    run, microbatches = prepare(plan)
    train_step(run, microbatches, 0, 1e-3)
    return run, microbatches


def count_held(run: TrainingRun, microbatches: Sequence[Any], folder: Path) -> int:
    """Bytes that are allocated in a forward and still are when it has ended."""
    gc.collect()  # an earlier run's, whose memory would go meanwhile
    with torch.profiler.profile(profile_memory=True) as profile:
        held = run.stages[0].model((), None, input_ids=microbatches[0].input_ids)
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    del held
    return sum(event["args"]["Bytes"] for event in events if event["name"] == "[memory]")


def attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, of_keys: int, of_values: int) -> int:
    """FLOPs of matmuls over all pairs of tokens, with the features of a key and of a value."""
    return 2 * math.prod(q[:3]) * k[2] * (of_keys * k[3] + of_values * v[3])


# The kernel of CPUs is not among those that torch counts.
CORE = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: attention_flops(q, k, v, 1, 1),
    # Scores again, and the gradients of scores, values, queries and keys.
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, v, *__, **___: attention_flops(
        q, k, v, 3, 2
    ),
}


def count_flops(run: TrainingRun, microbatches: list[Any]) -> int:
    with FlopCounterMode(display=False, custom_mapping=CORE) as counter:
        train_step(run, microbatches, 1, 1e-3)
    return counter.get_total_flops()


def measure_layer(memory: Memory, folder: Path) -> tuple[int, int]:
    """(bytes kept, FLOPs of a step) of one layer: what three have more than two."""
    found = []
    for num_layers in (2, 3):
        run, microbatches = start(plan_of(memory, num_layers, LLAMA))
        found.append((count_held(run, microbatches, folder), count_flops(run, microbatches)))
    return found[1][0] - found[0][0], found[1][1] - found[0][1]


Measured = dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("traces")
    return {policy: measure_layer(memory_of(policy), folder) for policy in ("none", "selective", "full")}


def test_a_layer_keeps_and_computes_again_what_the_formulas_say(measured: Measured) -> None:
    for policy, (kept, flops) in measured.items():
        cost = plan_of(memory_of(policy), 2, LLAMA).activations.cost_of(policy)  # type: ignore[arg-type]
        assert kept == pytest.approx(cost.kept, rel=0.01), policy
        assert flops - measured["none"][1] == pytest.approx(cost.flops * CONTEXT, rel=0.01), policy


def test_full_keeps_the_input_alone(measured: Measured) -> None:
    assert measured["full"][0] == CONTEXT * LLAMA["hidden_size"] * 2


def test_selective_saves_three_fifths_of_the_bytes_for_a_twentieth_more_flops(measured: Measured) -> None:
    (whole, step), (kept, with_more) = measured["none"], measured["selective"]
    assert kept <= 0.4 * whole
    assert step < with_more <= 1.05 * step


LLAMA_2 = ("intermediate_size=11008", "num_key_value_heads=32", "vocab_size=32000", "bos_token_id=1", "eos_token_id=2")
PUBLISHED = {
    "Llama-3.2-1B": ("model=llama3_2_1b",),
    "Llama-3.1-8B": ("model=llama3_1_8b",),
    "Llama-3.1-70B": ("model=llama3_1_70b",),
    "Llama-2-7B": ("model=llama3_1_8b", *(f"model.config.{word}" for word in LLAMA_2)),
}


def plan_published(name: str, context: int) -> Plan:
    """One rank, bf16, selective: what is saved of a layer and added to a step is the same on more ranks."""
    words = ("data=python_stdlib", "launch.device=cuda", "launch.ranks=1", "precision=bf16", "memory.compile=never")
    words += (f"batch.context={context}", "batch.sequences_per_step=1", "batch.sequences_per_microbatch=1")
    recipe = compose([*PUBLISHED[name], *words, "memory.activation_checkpointing=selective"]).require()
    return make_plan(recipe, load_config(recipe.model))


def measure_plan(plan: Plan, kept_operations: Sequence[str]) -> tuple[float, float]:
    """(share of a layer's bytes that is saved, FLOPs added to a step over its own) by the plan's formulas, which the tests above
    hold against what is allocated and counted."""
    memory = replace(plan.activations.memory, kept_operations=list(kept_operations))
    activations = replace(plan.activations, memory=memory)
    none, selective = (activations.cost_of(policy) for policy in ("none", "selective"))
    return 1 - selective.kept / none.kept, selective.flops * plan.config.num_hidden_layers / plan.flops_per_token


@pytest.mark.grid
def test_selective_meets_its_bars_in_published_sizes_and_docs_have_the_numbers() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    for name in PUBLISHED:
        plans = [plan_published(name, context) for context in (2048, 4096, 8192)]
        (saved, *_), flops = zip(*(measure_plan(plan, KEPT_OPERATIONS) for plan in plans), strict=True)
        none, kept = (plans[0].activations.cost_of(policy).kept // 2048 for policy in ("none", "selective"))
        cells = (name, f"{none:,}", f"{kept:,}", f"{saved:.1%}", *(f"{each:.1%}" for each in flops))
        assert f"| {' | '.join(cells)} |" in docs
        assert name == "Llama-2-7B" or (saved >= 0.6 and max(flops) <= 0.05)


def test_no_list_of_whole_matmuls_meets_both_with_as_many_key_value_heads_as_heads() -> None:
    """The claim of docs/memory.md, over all lists: each other one saves less than 60% or adds more than 5%."""
    operations = ("attention", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
    for context in (2048, 4096, 8192):
        plan = plan_published("Llama-2-7B", context)
        for chosen in product((False, True), repeat=len(operations)):
            saved, flops = measure_plan(plan, list(compress(operations, chosen)))
            assert saved < 0.6 or flops > 0.05, (context, chosen)


def keep_all() -> AbstractContextManager[Any]:
    """Operations are kept that the recipe does not list."""
    return patch.object(KeptOutputs, "compute", lambda kept, operation, compute: kept.compute_once(compute))


def keep_nothing() -> AbstractContextManager[Any]:
    """Operations that the recipe lists are not kept."""
    return patch.object(KeptOutputs, "compute", lambda kept, operation, compute: compute())


@pytest.mark.grid
@pytest.mark.parametrize("sabotage", [keep_all, keep_nothing])
def test_an_operation_kept_that_is_not_listed_or_listed_and_not_kept_shows(
    sabotage: Callable[[], AbstractContextManager[Any]], measured: Measured, tmp_path: Path
) -> None:
    with sabotage():
        kept, flops = measure_layer(memory_of("selective"), tmp_path)
    assert kept != pytest.approx(measured["selective"][0], rel=0.1)
    assert flops != measured["selective"][1]


def test_the_list_is_what_is_kept(measured: Measured, tmp_path: Path) -> None:
    memory = memory_of("selective", kept_operations=["attention", "o_proj"])
    kept, flops = measure_layer(memory, tmp_path)
    cost = plan_of(memory, 2, LLAMA).activations.cost_of("selective")
    assert kept == pytest.approx(cost.kept, rel=0.01)
    assert flops - measured["none"][1] == pytest.approx(cost.flops * CONTEXT, rel=0.01)


@pytest.mark.parametrize("most", [16, pytest.param(64, marks=pytest.mark.grid)])
def test_sqrt_keeps_as_many_inputs_as_there_are_groups(most: int, tmp_path: Path) -> None:
    held, counts = {}, [num for num in (4, 9, 16, 64) if num <= most]
    for num_layers in counts:
        run, microbatches = start(plan_of(memory_of("sqrt"), num_layers, SMALL, "fp32"))
        held[num_layers] = count_held(run, microbatches, tmp_path)
    an_input = CONTEXT * SMALL["hidden_size"] * 4
    # Two, three, four, eight inputs; what is not the layers' is the same for all.
    assert all(held[num] - held[4] == (isqrt(num) - 2) * an_input for num in counts)


def test_groups_and_their_layers_are_as_few_as_can_be_together() -> None:
    for num_layers in range(1, 130):
        fewest = min(size + -(-num_layers // size) for size in range(1, num_layers + 1))
        assert count_groups(num_layers) + group_size(num_layers) == fewest


# --- what a recomputation restores


def train(memory: Memory, name: str, changes: Mapping[str, Any], precision: str = "fp32") -> dict[str, Tensor]:
    """The parameters after a step."""
    run, _ = start(plan_of(memory, 3, changes, precision, name))
    return {name: parameter.detach() for buffer in run.buffers for name, parameter in buffer.parameters.items()}


@contextmanager
def draw_anew() -> Iterator[None]:
    """The generators' states are not restored."""
    whole = activation_checkpointing.checkpoint

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs | {"preserve_rng_state": False})

    restored = patch.object(activation_checkpointing._RandomState, "restored", lambda state: nullcontext())
    with patch.object(activation_checkpointing, "checkpoint", checkpoint), restored:
        yield


@pytest.mark.parametrize("policy", ["selective", "full", "sqrt"])
def test_without_the_generators_states_dropout_would_be_another(policy: str) -> None:
    changes = {"resid_pdrop": 0.3, "n_positions": CONTEXT}
    expected = train(memory_of("none"), "gpt2", changes)
    found = train(memory_of(policy), "gpt2", changes)
    with draw_anew():
        sabotaged = train(memory_of(policy), "gpt2", changes)
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert not all(torch.equal(sabotaged[name], each) for name, each in expected.items())


def test_a_router_that_draws_lots_among_equal_scores_draws_the_same_again() -> None:
    """phimoe's does whatever its jitter is, and in bf16 scores are often equal: other experts would have got other tokens."""
    expected, found = (train(memory_of(policy), "phimoe", {}, "bf16") for policy in ("none", "full"))
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_validation_in_a_bubble_does_not_take_dropout_from_what_is_computed_again() -> None:
    changes = {"resid_pdrop": 0.3, "n_positions": CONTEXT}
    whole = RankStage.forward

    def forward(stage: RankStage, *args: Any) -> Any:
        outputs = whole(stage, *args)
        stage._set_dropout(is_on=False)  # as `validate` does between a forward and its backward
        return outputs

    expected = train(memory_of("none"), "gpt2", changes)
    with patch.object(RankStage, "forward", forward):
        found = train(memory_of("full"), "gpt2", changes)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


# --- what a router has chosen


def waver(router: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A router's input is another in a recomputation, as sums by a GPU's atomic additions are."""
    is_backward = torch._C._current_graph_task_id() != -1
    return args[0] + is_backward * torch.linspace(-1, 1, args[0].shape[-1]), *args[1:]


def find_routers(mixture: nn.Module, num_experts: int) -> list[nn.Module]:
    """The outermost modules of a mixture, beside its experts, with a row of weights for each expert."""
    rows = range(num_experts, 2 * num_experts)  # longcat_flash has some more, which mean the token itself
    return [
        child
        for name, child in mixture.named_children()
        if name != "experts" and any(len(each) in rows and each.ndim == 2 for each in child.parameters())
    ]


Choices = dict[str, list[list[Tensor]]]


def record_choices(plan: Plan) -> Choices:
    """By mixture what was chosen in its forward, and in each recomputation, by routers that waver: the experts of each token, or
    where they are told none the tokens of each expert; and the pairs that find no room."""
    run, microbatches = prepare(plan)
    model, chosen = run.stages[0].model.model, Choices()
    route = ExpertDispatch._route

    def note(calls: list[list[Tensor]], form: ExpertsForm, experts: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = args[0].view(count_experts(experts), -1, args[0].shape[-1])
        calls.append([rows.any(-1) if form.is_expert_major else args[1].clone()])

    def note_dropped(dispatch: ExpertDispatch, hidden: Tensor, *args: Any) -> Tensor:
        name = next(path for path, module, _ in find_experts(model) if vars(module).get("dispatch") is dispatch)
        chosen[name][-1].append(args[-1].clone())
        return route(dispatch, hidden, *args)

    for path, experts, form in find_experts(model):
        chosen[path] = []
        experts.register_forward_pre_hook(partial(note, chosen[path], form))
        routers = find_routers(model.get_submodule(path.rpartition(".")[0]), count_experts(experts))
        assert len(routers) == 1, path
        routers[0].register_forward_pre_hook(waver)
    with patch.object(ExpertDispatch, "_route", note_dropped):
        train_step(run, microbatches, 0, 1e-3)
    return chosen


def are_restored(choices: Choices) -> bool:
    return all(
        torch.equal(one, other)
        for first, *again in choices.values()
        for each in again
        for one, other in zip(first, each, strict=True)
    )


def plan_mixture(name: str, policy: str, capacity: float | None = None) -> Plan:
    """Of `auto` some layers are computed again."""

    def plan_with(memory: Memory) -> Plan:
        config = build_config(UNGATED if name == UNGATED.name else family(name))
        config.use_cache = False
        recipe = small_recipe("fp32", 1, 1, 1)
        batch, model = replace(recipe.batch, context=48), replace(recipe.model, expert_capacity=capacity)
        return make_plan(replace(recipe, memory=memory, batch=batch, model=model), config)

    if policy != "auto":
        return plan_with(memory_of(policy))
    least, most = (plan_with(memory_of(each)).memory(0).reserved for each in ("full", "none"))
    plan = plan_with(memory_of("auto", budget_gb=(least + most) / 2 / GB))
    assert "none" in plan.policies(0).values()
    return plan


MIXTURES = [each.name for each in (*FAMILIES, UNGATED) if any("expert" in key for key in each.config)]
ROUTED = [
    *(("mixtral", policy, None) for policy in ("selective", "full", "sqrt", "auto")),
    *((name, "full", None) for name in MIXTURES if name != "mixtral"),
    *(("mixtral", policy, 1.0) for policy in ("full", "selective", "sqrt")),
]


def is_shown(name: str, policy: str, capacity: float | None) -> bool:
    return name == "phimoe" or (name == "mixtral" and (not capacity or policy == "full"))


@pytest.mark.parametrize(
    ("name", "policy", "capacity"),
    # phimoe's router chooses by maxima; with a capacity weights say which tokens are dropped.
    few_of(ROUTED, is_shown),
)
def test_a_recomputed_router_chooses_the_same_experts(name: str, policy: str, capacity: float | None) -> None:
    skip_without_initial_values(name)
    plan = plan_mixture(name, policy, capacity)
    choices = record_choices(plan)
    assert any(len(calls) > 1 for calls in choices.values())
    if policy != "auto":
        assert all(len(calls) > 1 for calls in choices.values())
    if capacity:
        assert all(dropped.any() for (_, dropped), *_ in choices.values())
    assert are_restored(choices)
    # Without what restores the choice these routers make others, and where other numbers of rows are computed torch refuses them.
    with patch.object(KeptOutputs, "compute_once", lambda kept, compute: compute()):
        try:
            choices = record_choices(plan)
        except CheckpointError:
            return
    assert not are_restored(choices)


@pytest.mark.parametrize(
    ("choose", "value_of"),
    [
        (lambda x: x.topk(2, -1), lambda x, index: x.gather(-1, index)),
        (lambda x: x.topk(2, 0), lambda x, index: x.gather(0, index)),
        (lambda x: x.max(-1, keepdim=True), lambda x, index: x.gather(-1, index)),
        (lambda x: x.max(dim=0), lambda x, index: x.gather(0, index[None])[0]),
        (lambda x: x.max(1), lambda x, index: x.gather(1, index[:, None])[:, 0]),
    ],
)
def test_of_a_choice_the_indices_are_those_of_forward_and_the_values_those_of_now(
    choose: Callable[[Tensor], tuple[Tensor, Tensor]], value_of: Callable[[Tensor, Tensor], Tensor]
) -> None:
    kept, call, x = KeptOutputs(catches=True), LayerCall(), torch.randn(5, 4)
    with kept.forward(call):
        values, index = choose(x)
    assert torch.equal(values, choose(x)[0])
    with torch.no_grad(), kept.recomputation(call):
        values, again = choose(-x)
    assert torch.equal(again, index)
    assert not torch.equal(again, choose(-x)[1])
    assert torch.equal(values, value_of(-x, index))


def test_of_a_mixture_full_keeps_the_input_and_the_choice_alone(tmp_path: Path) -> None:
    """Operations are caught there, for the choice: one that is not listed is not kept for that."""
    held = []
    for num_layers in (2, 3):
        plan = plan_of(memory_of("full"), num_layers, {}, "fp32", "mixtral")
        held.append(count_held(*start(plan), tmp_path))
    assert held[1] - held[0] == CONTEXT * 4 * (plan.config.hidden_size + plan.config.num_experts_per_tok)


def test_what_a_layer_writes_to_is_not_taken_over() -> None:
    kept, call = KeptOutputs(["matmul"]), LayerCall()
    x = torch.ones(2)
    with kept.forward(call):
        first = kept.compute("matmul", lambda: x + 1)
        second = kept.compute("matmul", lambda: x + 2)
        first.zero_()
    with torch.no_grad(), kept.recomputation(call):
        assert kept.compute("matmul", lambda: x + 1).tolist() == [2, 2]
        assert kept.compute("matmul", pytest.fail).tolist() == [3, 3]
    second.zero_()
    with torch.no_grad(), kept.recomputation(call):
        kept.compute("matmul", lambda: x + 1)
        with pytest.raises(AssertionError, match="written to"):
            kept.compute("matmul", pytest.fail)


def test_what_runs_without_gradients_is_not_saved_by_a_recomputation() -> None:
    """An indexer does, whose weights are trained as far as anyone can tell."""
    layer, kept, x = (
        nn.ParameterDict({"weight": torch.ones(1, 2, 3)}),
        KeptOutputs(),
        torch.ones(4, 3, requires_grad=True),
    )
    chooser = StackedMatmul(layer, "weight", is_transposed=False)
    chooser.keep_outputs(kept, "")

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            chosen = chooser(x[:2], RowGroups.of([2], CPU)).argmax()
        return (x * 2).sin() + chosen

    CheckpointedForward(run, kept, is_random=False)(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((4, 3), 2.0).cos() * 2)


# --- auto


def bytes_by_policy(num_layers: int) -> dict[str, int]:
    return {
        policy: plan_of(memory_of(policy), num_layers, LLAMA).memory(0).reserved
        for policy in ("none", "selective", "full", "sqrt")
    }


def choose(num_layers: int, num_bytes: int) -> Plan:
    return plan_of(memory_of("auto", budget_gb=num_bytes / GB), num_layers, LLAMA)


def test_auto_meets_its_budget_and_is_never_worse_than_a_uniform_policy() -> None:
    fixed, num_layers = bytes_by_policy(12), 12
    low, high = min(fixed.values()), max(fixed.values())
    for step in range(0, 12, 2):
        budget = low + (high - low) * step // 10
        plan = choose(num_layers, budget)
        costs, (counts,) = plan.activations.costs, plan.checkpointing(0).values()
        assert plan.memory(0).reserved <= budget
        feasible = [policy for policy, size in fixed.items() if size <= budget]
        for policy in feasible:
            assert costs.flops(counts) <= costs.flops(uniform(policy, num_layers))  # type: ignore[arg-type]
        # What is left of the budget is less than what the next cheaper choice needs: a layer's.
        if budget < high:
            assert budget - plan.memory(0).reserved <= (1 + FRAGMENTATION) * costs.by_policy["none"].kept


def brute_force(num_layers: int, plan: Plan, budget: int) -> float:
    """The fewest FLOPs of all orders of all policies that fit the budget."""
    choices = (counts for counts in product(range(num_layers + 1), repeat=len(POLICIES)) if sum(counts) == num_layers)
    return min(
        plan.activations.costs.flops(counts)  # type: ignore[arg-type]
        for counts in choices
        if plan.memory_model.stages(plan.candidate, {0: counts})[0].reserved <= budget  # type: ignore[dict-item]
    )


def test_auto_finds_the_cheapest_of_all_choices() -> None:
    num_layers = 7
    plan, fixed = plan_of(memory_of("none"), num_layers, LLAMA), bytes_by_policy(num_layers)
    for part in (0.0, 0.1, 0.35, 0.5, 0.8, 1.0):
        budget = int(min(fixed.values()) * (1 - part) + fixed["none"] * part)
        counts = choose(num_layers, budget).checkpointing(0)[0]
        assert plan.activations.costs.flops(counts) == brute_force(num_layers, plan, budget)


def measure_peak(plan: Plan, folder: Path) -> tuple[int, int]:
    """(the most bytes that a run has at once in its second step, FLOPs of its third), by torch's allocator and counter. The run
    is built within, so that its states are counted as well."""
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profile:
        run, microbatches = start(plan)
        with torch.profiler.record_function("second step"):
            train_step(run, microbatches, 1, 1e-3)
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    (step,) = (event for event in events if event["name"] == "second step")
    sizes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    live = accumulate(size for _, size in sizes)
    during = (
        size for (when, _), size in zip(sizes, live, strict=True) if step["ts"] <= when <= step["ts"] + step["dur"]
    )
    return max(during), count_flops(run, microbatches)


@pytest.mark.grid  # its matmuls in bf16 take half a minute on processors without AVX-512
@pytest.mark.parametrize("part", [0.0, 0.2, 0.4, 0.8, 1.0])
def test_a_run_of_auto_meets_its_budget_in_what_it_allocates_and_adds_the_fewest_flops(
    part: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocated is what is planned, gradients inside of one layer included, of which the plan has the most. Between policies'
    bytes a budget is used but for less than what the choice with the next fewer FLOPs needs."""
    monkeypatch.setitem(globals(), "CONTEXT", 512)  # activations are most of what is held
    num_layers, fixed = 6, bytes_by_policy(6)
    budget = int(min(fixed.values()) * (1 - part) + fixed["none"] * part)
    plan = choose(num_layers, budget)
    peak, flops = measure_peak(plan, tmp_path)
    planned = plan.memory(0)
    assert planned.reserved <= budget
    # Beside it: activations behind the layers, which the plan counts until backward begins, and a step's own numbers.
    behind = plan.activations.of_stage(plan.pipeline.stages[0], plan.checkpointing(0)[0]).head
    assert planned.allocated - plan.activations.backward_temporaries <= peak
    assert peak <= planned.allocated + behind + 65536
    assert peak == pytest.approx(budget, rel=0.05)
    assert planned.reserved == pytest.approx(budget, rel=0.05)
    least, costs = plan.activations.costs.flops(plan.checkpointing(0)[0]), plan.activations.costs
    assert least == brute_force(num_layers, plan, budget), "a choice with fewer FLOPs fits"
    feasible = [policy for policy, size in fixed.items() if size <= budget]
    for policy in feasible:
        assert least <= costs.flops(uniform(policy, num_layers))  # type: ignore[arg-type]
    cheapest = min(feasible, key=lambda policy: costs.flops(uniform(policy, num_layers)))  # type: ignore[arg-type]
    assert flops <= count_flops(*start(plan_of(memory_of(cheapest), num_layers, LLAMA)))


def test_a_run_of_auto_holds_what_is_planned_and_is_bitwise_the_same(tmp_path: Path) -> None:
    fixed = bytes_by_policy(6)
    plan = choose(6, (fixed["full"] + fixed["none"]) // 2)
    assert len(set(plan.policies(0).values())) > 1
    expected, _ = start(plan_of(memory_of("none"), 6, LLAMA))
    run, microbatches = start(plan)
    for buffer, other in zip(run.buffers, expected.buffers, strict=True):
        assert torch.equal(buffer.full, other.full)
    (counts,) = plan.checkpointing(0).values()
    kept = count_held(run, microbatches, tmp_path) - count_held(expected, microbatches, tmp_path)
    costs = plan.activations.costs
    assert kept == pytest.approx(costs.kept(counts) - costs.kept(uniform("none", 6)), rel=0.01)


def test_a_budget_that_no_choice_meets_says_the_least() -> None:
    least = min(bytes_by_policy(6).values())
    with pytest.raises(RecipeError, match=r"memory.budget_gb=.* is less than the") as caught:
        choose(6, least // 2).memory(0)
    enough = find_enough(caught.value)
    assert enough * GB == pytest.approx(least, rel=0.05)
    choose(6, ceil(enough * GB)).memory(0)
    # And it is the least: a thousandth below it is refused.
    with pytest.raises(RecipeError, match="is less than the"):
        choose(6, int(enough * GB * 0.998)).memory(0)


def test_the_least_budget_is_enough_for_the_later_stages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage has the head and its logits: what the first needs would be refused again, by another rank."""
    memory, widths = memory_of("auto", budget_gb=1e-6), {**LLAMA, "vocab_size": 4096}
    monkeypatch.setitem(globals(), "CONTEXT", 512)
    with pytest.raises(RecipeError, match="that rank 1 needs") as caught:
        plan_of(memory, 6, widths, pp=2).memory(0)
    plan = plan_of(memory_of("auto", budget_gb=find_enough(caught.value)), 6, widths, pp=2)
    assert max(plan.memory(0).reserved, plan.memory(1).reserved) <= plan.recipe.memory.budget_gb * GB


def find_enough(error: RecipeError) -> float:
    return float(re.search(r"set memory.budget_gb=([\d.]+) or more", str(error))[1])  # type: ignore[index]


def test_the_page_says_which_layers_are_computed_again_and_what_it_costs() -> None:
    fixed = bytes_by_policy(6)
    page = "\n".join(describe_run(choose(6, (fixed["full"] + fixed["none"]) // 2)))
    line = next(line for line in page.splitlines() if line.startswith("recomputation"))
    assert "none" in line
    assert "more FLOPs" in line
    assert not [line for line in describe_run(plan_of(memory_of("none"), 6, LLAMA)) if "recomputation" in line]


def test_an_operation_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"memory.kept_operations: .*'q_porj'.*q_proj"):
        plan_of(memory_of("selective", kept_operations=["q_porj"]), 2, SMALL)
    # Of the default list each family has some.
    assert "c_attn" in KEPT_OPERATIONS
    plan_of(memory_of("selective"), 2, SMALL)
