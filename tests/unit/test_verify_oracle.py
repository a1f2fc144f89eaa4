"""The oracle's own definitions beside the product's: equal where the product is right, and each sees a fault of the other."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework.mesh.layout import Box
from framework.model.experts import count_experts, find_experts
from framework.model.load import build_meta, kept_in_fp32
from framework.optim.groups import group_parameters, learning_rate
from framework.optim.low_bit import draw_bits
from framework.recipe.schema import Adapter, LearningRateSchedule, Optim, ParameterGroup
from framework.verify import plain
from framework.verify.compare import compare_initial
from framework.verify.evidence import keep_double, separate
from framework.verify.layout import initial_weights
from framework.verify.oracle import _stock_model
from framework.verify.plain import find_experts as find_plain_experts
from framework.verify.plain_rounding import draw_words
from tests.families import FAMILIES, Family, build_config, family, is_kind, skip_without_initial_values
from tests.grid import few_of
from tests.ranks.parity import CPU, Case, run_cases, small_recipe, worst_error


def _legal(name: str) -> st.SearchStrategy[Any]:
    """Values of a field of the schedule: each of its names, or small whole numbers and shares."""
    of_field = get_type_hints(LearningRateSchedule)[name]
    if get_origin(of_field) is Literal:
        return st.sampled_from(get_args(of_field))
    if of_field is float:
        return st.sampled_from([0.0, 1.0]) | st.floats(0, 1)
    count = st.integers(1 if type(None) in get_args(of_field) else 0, 30)
    return st.none() | count if type(None) in get_args(of_field) else count


@given(st.fixed_dictionaries({each.name: _legal(each.name) for each in fields(LearningRateSchedule)}))
def test_learning_rates_are_those_of_the_definitions(values: dict[str, Any]) -> None:
    """Every key of the schema's schedule takes part, also one that it gets tomorrow."""
    schedule = LearningRateSchedule(**values)
    for step in range(40):
        ours, theirs = (f(step, schedule, 3e-3, 20) for f in (learning_rate, plain.learning_rate))
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-18), step


@pytest.mark.parametrize("each", few_of(FAMILIES, is_kind), ids=lambda each: each.name)
def test_groups_and_what_stays_in_fp32_are_those_of_stock(each: Family) -> None:
    """Norms by their classes and by their names; fp32 by `from_pretrained` and by the family's patterns."""
    config = build_config(each)
    model = build_meta(config)
    optim = Optim(weight_decay=0.3, groups={"slow": ParameterGroup(pattern="embed|wte", lr_ratio=0.5)})
    shapes = [(name, tuple(parameter.shape), True) for name, parameter in model.named_parameters()]
    ours = [(one.parameter, one.lr_ratio, one.weight_decay) for one in group_parameters(shapes, optim)]
    names, undecayed = [name for name, _, _ in shapes], plain.decay_nothing(model)
    assert ours == list(plain.find_groups(names, undecayed, optim, Adapter()))
    zeros = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    stock = _stock_model(small_recipe("bf16", 1), config, zeros, torch.bfloat16, CPU)
    wide = {name for name, p in stock.named_parameters(remove_duplicate=False) if p.dtype == torch.float32}
    assert wide == kept_in_fp32(model, torch.bfloat16)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: 1.3 * x,
        lambda x: x + 0.01,
        lambda x: torch.nn.init.trunc_normal_(torch.empty_like(x), std=0.02, a=-0.04, b=0.04),
        lambda x: torch.empty_like(x).uniform_(-0.035, 0.035),
        torch.zeros_like,
        lambda x: torch.full_like(x, torch.nan),
    ],
    ids=["wider", "shifted", "truncated", "uniform", "zero", "nan"],
)
def test_values_of_another_distribution_are_seen(spoil) -> None:
    config = build_config(family("llama"))
    weights = initial_weights(config, 3)
    weights["lm_head.weight"] = spoil(weights["lm_head.weight"])
    errors = compare_initial(weights, config)
    assert [name for name, error in errors.items() if error > 1] == ["lm_head.weight"]


def test_a_norm_that_does_not_begin_at_one_is_seen() -> None:
    config = build_config(family("llama"))
    weights = initial_weights(config, 3)
    weights["model.norm.weight"] *= 1 + 1e-6
    assert compare_initial(weights, config)["model.norm.weight"] == float("inf")


MIXTURES = ("deepseek_v3", "qwen3_next", "mixtral", "gpt_oss", "llama4_text")


@pytest.mark.parametrize("each", few_of(FAMILIES, lambda each: each.name in MIXTURES), ids=lambda each: each.name)
def test_the_oracle_finds_every_module_of_experts(each: Family) -> None:
    """Also those whose arguments have other names (gpt_oss), else nothing would be dropped or counted there."""
    model = build_meta(build_config(each))
    ours = {name: count_experts(module) for name, module, form in find_experts(model) if not form.is_expert_major}
    assert find_plain_experts(model) == ours


def test_random_words_are_those_of_the_layout() -> None:
    key, words = (5, "moments", 3, "model.norm.weight"), torch.empty(1000, dtype=torch.int32)
    draw_bits(key, [Box((0,), (1000,))], (1000,), words)
    assert torch.equal(draw_words(1000, key), words.long() & 0xFFFFFFFF)


def test_packed_documents_are_rows_of_their_own() -> None:
    ids, labels = torch.arange(12).view(2, 6), torch.arange(100, 112).view(2, 6)
    rows, targets, is_real = separate(ids, labels, torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]))
    assert is_real.sum(1).tolist() == [2, 3, 1, 6]
    assert rows[is_real].tolist() == list(range(12)), "in the order of the packed rows"
    assert targets[is_real].tolist() == list(range(100, 112))
    assert (targets[~is_real] == -100).all()


@pytest.mark.parametrize(
    "each", few_of(FAMILIES, lambda each: each.name in ("gemma", "gemma2")), ids=lambda each: each.name
)
def test_every_family_is_verified_in_fp64(each: Family, tmp_path) -> None:
    """gemma's scale of its embedding is no number of fp32: rounded to it, gradients are off by 1e-8."""
    skip_without_initial_values(each.name)
    recipe = small_recipe("fp64", 1, sequences=6)
    (rows,) = run_cases(0, 1, f"file://{tmp_path}/ranks", [Case(each.name, each, {"one": recipe})]).values()
    assert worst_error(rows) < 1e-9


def test_fp64_is_kept_where_integers_are_widened_beside_it():
    """As rotary tables of transformers 5.17 do with positions."""
    rates, positions = torch.rand(4, 1, dtype=torch.float64), torch.arange(9)[None]
    with keep_double(torch.float64):
        found = rates.float() @ positions.float()
    assert torch.equal(found, rates @ positions.double())
