"""Bytes that one rank counts of its activations against the closed forms: masks that attention is given, and what a backward
leaves for gradients of weights that come later."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from framework.comm.collectives import Pending
from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.data.pack import Microbatch
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Axis
from framework.model.flops import attention_masks
from framework.model.stage import StageBounds
from framework.parallel.pipeline.lower import live_moments
from framework.parallel.tensor.borders import Border
from framework.parallel.tensor.regions import RegionCall
from framework.parallel.zero.buffers import DeferredGradients
from framework.plan.activation_bytes import MomentTable
from framework.plan.activations import Activations
from framework.plan.cluster import ClusterRates
from framework.plan.forecast_memory import MemoryModel
from framework.plan.plan import Plan, make_plan
from framework.plan.policies import uniform
from framework.plan.shape import make_shape
from framework.recipe.schema import Batch, Launch, Memory, Model, Parallel, Precision, Recipe, Zero
from framework.train.build import build
from framework.train.stage import StepInputs
from scripts.bench.foresight_memory import FAMILIES, WIDTHS, compare, count
from tests.families import build_config, family
from tests.grid import IN_TURN
from tests.planned import held_by_buffers, moments_of
from tests.ranks.parity import CPU, topology_of

pytestmark = IN_TURN

CONTEXT = 96
MISTRAL = {"sliding_window": 48}
# Of four layers the first two have no window.
QWEN3 = {"use_sliding_window": True, "sliding_window": CONTEXT, "max_window_layers": 2}


def recipe_of(
    name: str, policy: str = "none", compute: str = "fp32", *, chunked: bool = False, **config: Any
) -> Recipe:
    model = Model(
        family=name, config=WIDTHS | {"num_hidden_layers": 4, "tie_word_embeddings": False} | FAMILIES[name] | config
    )
    return Recipe(
        batch=Batch(sequences_per_step=2, sequences_per_microbatch=2, context=CONTEXT),
        model=model,
        precision=Precision(compute=compute),  # type: ignore[arg-type]
        memory=Memory(policy, chunked_loss=chunked, compile="never"),  # type: ignore[arg-type]
        launch=Launch(ranks=1, device="cpu", threads_per_rank=1),
    )


@pytest.mark.parametrize(
    ("name", "policy", "compute", "config"),
    [
        # A window no longer than the context is a mask, in each of its layers.
        ("mistral", "none", "bf16", MISTRAL),
        ("qwen3", "none", "fp32", QWEN3),
        # Layers that are computed again keep the model's own.
        ("mistral", "full", "fp32", MISTRAL),
        # One rank sends no rows: transformers' kernels multiply experts, whose outputs nothing keeps.
        ("qwen3_moe", "selective", "fp32", {}),
    ],
)
def test_one_rank_holds_what_the_formulas_say(
    name: str, policy: str, compute: str, config: dict[str, Any], tmp_path: Path
) -> None:
    recipe = recipe_of(name, policy, compute, **config)
    found = compare(recipe, [count(0, 1, str(tmp_path / "rendezvous"), recipe)])
    assert found.ratio == pytest.approx(1, abs=0.01), found


def test_layers_with_a_mask_are_those_with_a_window_and_of_packed_documents_all() -> None:
    config = build_config(family("qwen3"), num_hidden_layers=3, layer_types=None, **QWEN3 | {"max_window_layers": 1})
    windowed = (None, "sliding_attention", "sliding_attention")
    assert attention_masks(config, CONTEXT, packs=False) == windowed
    assert attention_masks(config, CONTEXT - 1, packs=False) == (None,) * 3
    assert attention_masks(config, CONTEXT - 1, packs=True) == ("full_attention", *windowed[1:])


def find_tensors(call: Any) -> Iterator[Tensor]:
    """The tensors that a deferred call holds, by its arguments or in its closure."""
    if isinstance(call, partial):
        held = (*call.args, *call.keywords.values())
    else:
        held = tuple(cell.cell_contents for cell in call.__closure__ or ())
    for each in held:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, partial | FunctionType):
            yield from find_tensors(each)


def count_deferred(plan: Plan) -> int:
    """Bytes that a backward of a rank leaves for the gradients of weights, which come later."""
    mesh = connect(topology_of(plan.recipe, plan.config), CPU)
    run = build(plan, mesh)
    stage, one = run.stages[0], torch.ones((), dtype=torch.int64)
    tokens = torch.randint(plan.vocabulary_size, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    stage.gradients.start_step()
    stage.start_step(StepInputs([Microbatch(tokens, tokens, None)], [(0,)], one, 1, torch.ones(())))
    (loss,) = stage.forward(0, ())
    left: DeferredGradients = stage.backward_input([get_gradient_edge(loss)], ())
    del loss
    storages = [each.untyped_storage() for calls in left.values() for call in calls for each in find_tensors(call)]
    mesh.close()
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def activations_of(name: str) -> Activations:
    recipe = recipe_of(name)
    return make_plan(recipe, build_config(family(name), **recipe.model.config)).activations


def over_two_ranks(whole: Activations, gathered_inputs: str) -> Activations:
    """Those of a rank of two that divide tokens and slice experts."""
    tokens = TokenLayout(2, CONTEXT, replace(whole.tokens.tp, size=2), True)
    memory = replace(whole.memory, gathered_inputs=gathered_inputs)  # type: ignore[arg-type]
    return replace(whole, tokens=tokens, memory=memory, expert_slices=2)


@pytest.mark.parametrize(("name", "regions"), [("llama", 2), ("mixtral", 1)])
def test_a_router_keeps_the_whole_input_that_others_gather_again(name: str, regions: int) -> None:
    keep, regather = (over_two_ranks(activations_of(name), each).layer_bytes for each in ("keep", "regather"))
    assert keep - regather == regions * CONTEXT * WIDTHS["hidden_size"] * 4


def test_messages_of_uneven_stages_are_foretold_in_the_order_in_which_they_leave() -> None:
    recipe = recipe_of("llama", num_hidden_layers=3)
    batch = replace(recipe.batch, sequences_per_step=16)
    recipe = replace(recipe, batch=batch, parallel=Parallel(pp=2), launch=replace(recipe.launch, ranks=2))
    plan = make_plan(recipe, build_config(family("llama"), **recipe.model.config))
    model = MemoryModel.of(make_shape(plan.config, recipe), recipe)
    found = model.forecast(plan.candidate, ClusterRates.from_recipe(recipe))
    stage = plan.activations.of_stage(plan.pipeline.stages[0], uniform("none", 2))
    planned = MomentTable.of(live_moments(plan.pipeline.lowered(8), 0)).find_peaks({0: stage})["forward"].between
    even = MomentTable.of(moments_of("1f1b", 2, 1, 8)[0]).find_peaks({0: stage})["forward"].between
    assert found.stages[0] == plan.memory(0)
    assert found.stages[0].phases["forward"]["communication"] == planned != even


def test_moments_of_few_bits_are_compared_with_what_each_rank_plans() -> None:
    recipe = recipe_of("llama")
    recipe = replace(
        recipe,
        precision=replace(recipe.precision, moments="int8"),
        zero=Zero(stage=1),
        launch=replace(recipe.launch, ranks=5),
        batch=replace(recipe.batch, sequences_per_step=10),
    )
    plan = make_plan(recipe, build_config(family("llama"), **recipe.model.config))
    ranks = [(held_by_buffers(plan, rank), [1]) for rank in range(5)]
    assert ranks[0][0]["optimizer"] != ranks[4][0]["optimizer"]
    assert compare(recipe, ranks).are_states_equal
    assert not compare(recipe, [ranks[0]] * 5).are_states_equal


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_weight_gradients_that_come_later_leave_what_the_formula_says(name: str, chunked: bool) -> None:
    recipe = recipe_of(name, chunked=chunked)
    plan = make_plan(recipe, build_config(family(name), **recipe.model.config))
    (stage,) = plan.pipeline.stages
    left = plan.activations.of_stage(stage, uniform("none", 4)).left
    # Input ids, and gradients of norms and routers, are the rest.
    assert count_deferred(plan) == pytest.approx(left, rel=0.01)


def test_tokens_and_vocabulary_over_tp_leave_whole_rows_and_a_part_of_the_embedding() -> None:
    """A region's inputs are gathered for the gradients of its weights, also those that are not kept so."""
    whole, half = activations_of("llama"), over_two_ranks(activations_of("llama"), "regather")
    stage = StageBounds(0, 1, 0, 4)
    counts, rows, hidden = uniform("none", 4), 2 * CONTEXT * 4, WIDTHS["hidden_size"]
    inside = 4 * (2 * WIDTHS["num_attention_heads"] + 2 * WIDTHS["num_key_value_heads"]) * WIDTHS["head_dim"]
    inside += 4 * 3 * WIDTHS["intermediate_size"] + WIDTHS["vocab_size"]
    bare, of_half = (each.of_stage(stage, counts).left - rows * (4 * 4 + 1) * hidden for each in (whole, half))
    assert bare == rows * (inside + hidden)
    assert of_half == rows * inside // 2 + WIDTHS["vocab_size"] // 2 * hidden * 4


class TwoAlike(Border):
    """Stands for a border of two ranks that have the same tokens."""

    def start_gather(self, x: Tensor) -> tuple[Tensor, Pending]:
        return torch.stack([x, x]), Pending()

    def join(self, gathered: Tensor) -> Tensor:
        return gathered.movedim(0, 1).flatten(1, 2)


def test_what_a_region_gathers_again_is_one_tensor_for_all_of_its_layers() -> None:
    """Layers that leave weight gradients for later hold it until then: a copy for each would be held as often."""
    kept = torch.arange(12.0).view(1, 3, 4)
    call = RegionCall(TwoAlike(Communicator(Axis("tp", 1, 0))), kept)
    found = []
    for _ in range(3):
        call.start_gather(kept)
        found.append(call.gathered())
    assert len({each.data_ptr() for each in found}) == 1
    assert torch.equal(found[0], torch.cat([kept, kept], 1))
    call.end_backward()
    call.start_gather(kept + 1)
    assert torch.equal(call.gathered(), torch.cat([kept, kept], 1) + 1)
