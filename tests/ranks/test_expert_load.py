"""The load of experts is that of the whole batch, each token once, in whatever layout: counted beside a stock model's."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from framework.comm.connect import connect
from framework.model.load import choose_experts
from framework.model.mixtures import ExpertLoad, Mixture, MixtureLoad, find_mixtures, read_loads
from framework.model.routers import RoutedTokens
from framework.model.units import find_units
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.train.validation import Validation
from framework.verify.evidence import keep_double, make_batches
from framework.verify.layout import initial_weights, share
from tests.families import LLAMA, Family, build_config, family
from tests.grid import IN_TURN
from tests.ranks.parity import CONTEXT, CPU, small_recipe, topology_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

SEQUENCES = 12
SEED = 5

Sabotage = Callable[[], AbstractContextManager[Any]]

# Its experts are not told who chose them.
LLAMA4 = Family(
    "llama4_text",
    {
        **LLAMA, "model_type": "llama4_text", "head_dim": 8, "intermediate_size_mlp": 40, "num_local_experts": 4,
        "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "attention_chunk_size": 16,
    },
)  # fmt: skip


def recipe_of(
    world: int = 2, count: int = 1, zero: int = 0, parallel: Parallel | None = None, **changes: Any
) -> Recipe:
    small = small_recipe("fp64", world, count, SEQUENCES, 0.05, Zero(zero), parallel or Parallel())
    return replace(small, train=replace(small.train, seed=SEED), **changes)


LAYOUTS = {
    "zero 3, recomputed": recipe_of(2, 2, 3, memory=Memory(activation_checkpointing="full", compile="never")),
    "tp": recipe_of(2, 3, parallel=Parallel(tp=2, sequence=False)),
    "dp x sp": recipe_of(4, 1, 1, Parallel(tp=2)),
    "ep, tokens divided": recipe_of(4, 1, 3, Parallel(ep=2, tp=2)),
    "ep, tokens alike": recipe_of(4, 2, parallel=Parallel(ep=2, tp=2, sequence=False)),
    "pp x dp": recipe_of(4, 2, parallel=Parallel(pp=2), pipeline=Pipeline("1f1b")),
}


def config_of(model: Family) -> PretrainedConfig:
    config = build_config(model)
    config.use_cache = False
    return config


def count_stock(model: Family) -> Mapping[str, MixtureLoad]:
    """Loads of the first batch in one process, from what Hugging Face's routers return."""
    config, found = config_of(model), dict[str, MixtureLoad]()
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    stock.double()  # also the parameters that the family keeps in fp32
    choose_experts(stock, "auto", torch.float64)
    for name, weight in initial_weights(config, SEED).items():
        stock.get_parameter(name).data.copy_(weight)
    for each in find_mixtures(stock, find_units(stock)):
        stock.get_submodule(each.router).register_forward_hook(partial(note, found, each))
    with torch.no_grad(), keep_double(torch.float64):
        stock(input_ids=make_batches(config, 1, SEQUENCES, CONTEXT, seed=11)[0].input_ids)
    return found


def note(
    found: dict[str, MixtureLoad], mixture: Mixture, router: nn.Module, args: Any, output: tuple[Tensor, ...]
) -> None:
    logits = output[mixture.logits]
    chosen = logits.topk(2, -1).indices if mixture.form.is_expert_major else output[2]
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    found[mixture.layer] = MixtureLoad(
        tuple(chosen.flatten().bincount(minlength=logits.shape[-1]).tolist()), float(entropy), 0
    )


def count_layouts(
    rank: int,
    world: int,
    rendezvous: str,
    model: Family,
    layouts: Mapping[str, Recipe],
    sabotage: Sabotage = nullcontext,
) -> dict[str, Mapping[str, MixtureLoad]]:
    """Body: the loads of the first step in each layout, during which another batch is validated."""
    config, found = config_of(model), {}
    batch, other = make_batches(config, 2, SEQUENCES, CONTEXT, seed=11)
    for number, (label, recipe) in enumerate(layouts.items()):
        topology = topology_of(recipe, config)
        if rank < topology.world:
            mesh = connect(topology, CPU, f"{rendezvous}-{number}", rank)
            with sabotage(), keep_double(torch.float64):
                run = build(make_plan(recipe, config), mesh)
                rows = recipe.batch.sequences_per_microbatch
                validation = Validation(share(other, rows, mesh))
                result = train_step(run, share(batch, rows, mesh), 0, 1e-3, validation=validation, is_reported=True)
            assert result.loads is not None
            found[label] = read_loads(run.load.mixtures, result.loads.flatten().tolist())
            mesh.close()
    return found


def assert_equal(found: Mapping[str, MixtureLoad], expected: Mapping[str, MixtureLoad]) -> None:
    assert {layer: (load.tokens, load.dropped) for layer, load in found.items()} == {
        layer: (load.tokens, load.dropped) for layer, load in expected.items()
    }
    for layer, load in found.items():
        assert load.entropy == pytest.approx(expected[layer].entropy, rel=1e-6)


# Layers that run twice, tokens divided and padded, stages: the others differ in which ranks see which tokens.
SHOWN = ("zero 3, recomputed", "ep, tokens divided", "pp x dp")


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        pytest.param("deepseek_v3", SHOWN, id="deepseek_v3"),
        *(
            pytest.param(name, tuple(LAYOUTS), marks=pytest.mark.grid, id=f"{name} in all")
            for name in ("deepseek_v3", "qwen3_moe")
        ),
    ],
)
def test_the_load_of_every_layout_is_the_batches(pool: RankPool, name: str, labels: tuple[str, ...]) -> None:
    model = family(name)
    expected = count_stock(model)
    layouts = {label: LAYOUTS[label] for label in labels}
    of_ranks = pool.run(4, count_layouts, model, layouts)
    assert of_ranks[0].keys() == layouts.keys()
    for found in of_ranks:
        for loads in found.values():
            assert_equal(loads, expected)


def test_experts_that_are_not_told_who_chose_them_are_counted(pool: RankPool) -> None:
    layouts = {"": recipe_of(2, 2)}
    (found, _) = pool.run(2, count_layouts, LLAMA4, layouts)
    assert_equal(found[""], count_stock(LLAMA4))


# --- sabotage


def count_copies() -> AbstractContextManager[Any]:
    """Every rank of tp counts the tokens that all of them see."""
    return patch.object(RoutedTokens, "is_counted", True)


def count_again() -> AbstractContextManager[Any]:
    """Layers that are run again for backward count again; so do microbatches of validation."""

    def counting(load: ExpertLoad) -> AbstractContextManager[None]:
        load._is_counting = True
        return nullcontext()

    return patch.object(ExpertLoad, "counting", counting)


def count_padding() -> AbstractContextManager[Any]:
    """Rows that fill up a sequence's last part count as tokens."""
    return patch.object(RoutedTokens, "cut", lambda tokens, x: x)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("sabotage", "label"),
    [
        (count_copies, "tp"),
        (count_copies, "ep, tokens alike"),
        (count_padding, "ep, tokens divided"),
        (count_again, "zero 3, recomputed"),
    ],
)
def test_tokens_that_count_twice_show(pool: RankPool, sabotage: Sabotage, label: str) -> None:
    model = family("qwen3_moe")
    found = pool.run(LAYOUTS[label].launch.ranks or 1, count_layouts, model, {label: LAYOUTS[label]}, sabotage)[0][
        label
    ]
    assert {layer: load.tokens for layer, load in found.items()} != {
        layer: load.tokens for layer, load in count_stock(model).items()
    }
