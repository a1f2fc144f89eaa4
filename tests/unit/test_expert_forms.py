"""Forms in which families hold their experts: known ones are read off the module, others are refused by name."""

from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from framework.errors import ModelError
from framework.model.experts import (
    ExpertsForm,
    count_all_experts,
    find_experts,
    find_stock_experts,
    find_unknown_experts,
)
from framework.model.matmul import RowGroups
from framework.parallel.experts.split import check_experts
from tests.families import STOCK_EXPERTS, UNGATED, Family, build_config, family

ROUTED = ExpertsForm("gate_up_proj", True, True, False)
FORMS = {
    "mixtral": ROUTED,
    "gpt_oss": ExpertsForm("gate_up_proj", True, False, True),
    "longcat_flash": ExpertsForm("gate_up_proj", True, True, False, has_identity=True, has_kernels=False),
}


def on_meta(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_experts_may_have_no_gate() -> None:
    found = {form for _, _, form in find_experts(on_meta(build_config(UNGATED)))}
    assert found == {ExpertsForm("up_proj", False, True, False)}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_read_off_the_module(name: str) -> None:
    model = on_meta(build_config(family(name)))
    assert {form for _, _, form in find_experts(model)} == {FORMS[name]}
    assert find_unknown_experts(model) == []


@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "deepseek_v3", "granitemoe"])
def test_what_every_token_meets_is_no_unknown_expert(name: str) -> None:
    assert find_unknown_experts(on_meta(build_config(family(name)))) == []


@pytest.mark.parametrize("each", STOCK_EXPERTS, ids=attrgetter("name"))
def test_experts_with_code_of_their_own_are_told_by_their_call_and_shapes(each: Family) -> None:
    model = on_meta(build_config(each))
    found = list(find_stock_experts(model))
    # Two of jetmoe's attention and two of its mlp in a layer; its attention's mixture, called `experts`, is none.
    assert [form.is_grouped for _, _, form in found] == ([False] * 3 if each.name == "dbrx" else [True] * 12)
    assert set(count_all_experts(model).values()) == {4}
    assert list(find_experts(model)) == find_unknown_experts(model) == []
    check_experts(model, 4)
    for degree, capacity, words in ((3, None, "does not divide the 4 experts of"), (2, 1.5, "which drops nothing")):
        with pytest.raises(ModelError, match=words):
            check_experts(model, degree, capacity)
    name, experts, _ = found[-1]
    holder, weight = next(
        (module, own) for module in experts.modules() for own, _ in module.named_parameters(recurse=False)
    )
    setattr(holder, weight, nn.Parameter(torch.empty(7, 3, 3, device="meta")))
    with pytest.raises(
        ModelError, match=rf"parallel\.ep=2: {each.name} holds experts in a form .*{name} \({type(experts).__name__}\)"
    ):
        check_experts(model, 2)


def test_a_list_of_mlps_beside_stacked_experts_is_refused() -> None:
    """Found beside a form that is known: dividing one and copying the other would be another model."""
    model = on_meta(build_config(family("mixtral")))
    layer: Any = model.get_submodule("model.layers.1.mlp")
    layer.experts = nn.ModuleList(nn.Linear(32, 32, device="meta") for _ in range(4))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.experts \(ModuleList\)"):
        check_experts(model, 2)


def test_tokens_that_are_routed_to_themselves_have_no_capacity() -> None:
    with pytest.raises(ModelError, match=r"model\.expert_capacity=1\.5: longcat_flash"):
        check_experts(on_meta(build_config(family("longcat_flash"))), 1, 1.5)


def test_groups_are_padded_with_empty_ones() -> None:
    groups = RowGroups.of([2, 0, 3], torch.device("cpu"))
    assert groups.padded(3) is groups
    padded = groups.padded(5)
    assert padded.counts == (2, 0, 3, 0, 0)
    assert padded.offsets.tolist() == [2, 2, 5, 5, 5]
    assert padded.offsets.dtype == torch.int32
