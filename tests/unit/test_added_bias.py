"""A bias is added to routers that weight the k largest of their scores, and others are refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from framework.errors import ModelError
from framework.model.added_bias import RouterForm, add_biases, find_router_form, prepare_mixtures
from framework.model.buffers import build_buffers, set_buffers
from framework.model.load import build_meta
from framework.model.mixtures import ADDED_BIAS, find_mixtures
from framework.model.units import find_units
from framework.parallel.zero.load_parameters import load_pretrained
from framework.plan.page import describe_run
from framework.plan.plan import make_plan
from framework.recipe.schema import Model
from framework.verify.plain_mixtures import PlainMixtures
from tests.families import build_config, family
from tests.ranks.parity import small_recipe

ADDED = Model(router_bias="added", router_bias_rate=0.01)
NORMALISED = RouterForm(0, 1, 2, is_sigmoid=False, is_normalised=True, scale=1.0)
PLAIN = replace(NORMALISED, is_normalised=False)


@pytest.mark.parametrize(
    ("name", "changes", "form"),
    [
        ("mixtral", {}, NORMALISED),
        ("qwen2_moe", {}, PLAIN),
        ("qwen2_moe", {"norm_topk_prob": True}, NORMALISED),
        ("gpt_oss", {}, NORMALISED),  # the softmax of the chosen logits is that of all over the sum of the chosen
        ("granitemoe", {}, NORMALISED),
        ("deepseek_v2", {"topk_method": "greedy", "routed_scaling_factor": 2.5}, replace(PLAIN, scale=2.5)),
    ],
)
def test_how_routers_weight_is_found_by_running_them(name: str, changes: dict[str, object], form: RouterForm) -> None:
    assert find_router_form(build_config(family(name), **changes)) == form


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v3", r"a correction bias of their own \(model\.layers\.1\.mlp\.gate\.e_score_correction_bias\)"),
        ("deepseek_v2", "something else than weight the k largest"),  # chooses groups first
        ("phimoe", "something else than weight the k largest"),  # chooses one expert after another
        ("llama4_text", "something else than weight the k largest"),  # weights inputs of experts, not outputs
        ("longcat_flash", "something else than weight the k largest"),  # some of its experts are the token itself
        ("llama", "it has no stacked experts"),
    ],
)
def test_routers_of_another_form_are_refused_by_name(name: str, reason: str) -> None:
    recipe = replace(small_recipe("fp32", 1), model=ADDED)
    with pytest.raises(ModelError, match=rf"model\.router_bias.*{name}.*{reason}"):
        make_plan(recipe, build_config(family(name)))


def test_a_bias_decides_whom_a_router_chooses_and_not_how_much_they_weigh() -> None:
    model = AutoModelForCausalLM.from_config(build_config(family("mixtral")))
    units, hidden = find_units(model), torch.randn(50, 32)
    router = model.model.layers[0].mlp.gate
    logits, weights, index = router(hidden)
    prepare_mixtures(ADDED, model, units)
    same = router(hidden)
    assert torch.equal(same[2], index)
    torch.testing.assert_close(same[1], weights)
    router.get_buffer(ADDED_BIAS)[:] = torch.tensor([0.0, 9.0, 0.0, 5.0])
    _, weights, index = router(hidden)
    assert torch.equal(index, torch.tensor([1, 3]).expand(50, 2))
    torch.testing.assert_close(weights, logits[:, [1, 3]].softmax(-1))


def test_the_oracle_chooses_between_equal_scores_as_the_stock_router_does() -> None:
    # A padding token's hidden state is zero, and so are all of its logits.
    model = AutoModelForCausalLM.from_config(build_config(family("mixtral"), num_local_experts=8))
    router, hidden = model.model.layers[0].mlp.gate, torch.zeros(3, 32)
    _, _, stock = router(hidden)
    PlainMixtures(model, ADDED, 8)
    assert torch.equal(router(hidden)[2], stock)


def test_pretrained_weights_leave_an_added_bias_at_zero(tmp_path: Path) -> None:
    config = build_config(family("mixtral"))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = build_meta(config)
    add_biases(model, find_mixtures(model, find_units(model)))
    values = build_buffers(config)
    load_pretrained(model, values, [], tmp_path)
    set_buffers(model, values, torch.device("cpu"))
    assert not model.get_buffer(f"model.layers.0.mlp.gate.{ADDED_BIAS}").any()


def test_a_plan_says_that_an_export_has_no_added_bias() -> None:
    recipe = replace(small_recipe("fp32", 1), model=ADDED)
    page = "\n".join(describe_run(make_plan(recipe, build_config(family("mixtral")))))
    assert "an exported model chooses its experts without it" in page
