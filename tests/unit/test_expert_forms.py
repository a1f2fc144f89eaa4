"""Forms in which families hold their experts: known ones are read off the module, others are refused by name."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from framework.errors import ModelError
from framework.model.experts import ExpertsForm, find_experts, find_unknown_experts
from framework.model.matmul import RowGroups
from framework.parallel.experts.split import check_experts
from tests.families import LLAMA, UNGATED, build_config, family

ROUTED = ExpertsForm("gate_up_proj", True, True, False)
FORMS = {
    "mixtral": ROUTED,
    "gpt_oss": ExpertsForm("gate_up_proj", True, False, True),
    "longcat_flash": ExpertsForm("gate_up_proj", True, True, False, has_identity=True, has_kernels=False),
}
DBRX: dict[str, Any] = {
    "d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 97,
    "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "ffn_config": {"ffn_hidden_size": 24, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("model_type", "values", "where"),
    [("dbrx", DBRX, r"ffn\.experts \(DbrxExperts\)"), ("jetmoe", LLAMA, r"output_linear \(JetMoeParallelExperts\)")],
)
def test_experts_of_an_unknown_form_are_refused(model_type: str, values: dict[str, Any], where: str) -> None:
    model = on_meta(CONFIG_MAPPING[model_type](**values))
    check_experts(model, 1)
    with pytest.raises(ModelError, match=rf"parallel\.ep=2: {model_type} holds experts in a form .*{where}"):
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
