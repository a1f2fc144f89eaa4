"""No tensor of a step grows with the square of the context: neither a mask nor scores, whatever a layer's attention sees."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from framework.comm.connect import connect
from framework.data.pack import Microbatch, cut_context
from framework.mesh.token_layout import ContextSlices
from framework.parallel.attention import find_stock_attention
from framework.plan.plan import make_plan
from framework.recipe.schema import Model
from framework.train.build import build
from framework.train.step import train_step
from tests.families import build_config, family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, small_recipe, topology_of

pytestmark = IN_TURN

TOKENS = 2**14
# A sixteenth of the square: what a token has of its own, experts' features included, is less.
LARGEST = TOKENS**2 // 16


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(each.numel() for each in tree_leaves(out) if isinstance(each, Tensor))])
        return out


def measure(name: str, packs: bool, attention: str, tokens: int) -> int:
    """Elements of the largest tensor of a step of one layer over one row."""
    layers = {"layer_types": ["sliding_attention"]} if name in ("gemma2", "gpt_oss") else {}
    config = build_config(family(name), num_hidden_layers=1, max_position_embeddings=TOKENS, use_cache=False, **layers)
    recipe = small_recipe("fp32", 1, sequences=1)
    recipe = replace(
        recipe,
        batch=replace(recipe.batch, context=tokens),
        data=replace(recipe.data, pack="documents" if packs else "concat"),
        model=replace(recipe.model, attention=attention),
    )
    mesh = connect(topology_of(recipe, config), CPU)
    run = build(make_plan(recipe, config), mesh)
    ids = torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(1))
    positions = (torch.arange(tokens) % 900)[None] if packs else None
    with Largest() as largest:
        train_step(run, [cut_context(Microbatch(ids, ids, positions), ContextSlices(tokens))], 0, 1e-3)
    return largest.numel


CASES = [("llama", False), ("llama", True), ("gemma2", True), ("gpt_oss", True), ("gpt_oss", False), ("gemma2", False)]


@pytest.mark.parametrize(("name", "packs"), few_of(CASES, lambda name, packs: (name, packs) in CASES[1:4]))
def test_no_tensor_of_a_step_grows_with_the_square_of_the_context(name: str, packs: bool) -> None:
    assert measure(name, packs, "auto", TOKENS) <= LARGEST


def test_transformers_own_attention_would_be_seen() -> None:
    tokens = TOKENS // 16
    assert measure("llama", True, "sdpa", tokens) >= tokens**2
    assert measure("llama", True, "auto", tokens) < tokens**2 / 4


def ask(config: PretrainedConfig, **changes: Any) -> str | None:
    recipe = small_recipe("fp32", 1)
    return find_stock_attention(config, replace(recipe, data=replace(recipe.data, pack="documents"), **changes))


@pytest.mark.parametrize(
    ("name", "attention", "told"),
    [
        ("llama", "auto", None),
        ("gpt_oss", "auto", None),
        ("llama", "eager", "model.attention=eager"),
        ("falcon", "auto", "its attention asks no registry for its function"),
    ],
)
def test_attention_is_transformers_where_it_has_to_be(name: str, attention: str, told: str | None) -> None:
    assert ask(build_config(family(name)), model=Model(attention=attention)) == told


def test_attention_with_dropout_is_transformers() -> None:
    config = build_config(family("llama"), attention_dropout=0.1)
    assert "drops 0.1" in str(ask(config))
