"""The load-balancing loss from sums is Hugging Face's, for every family that has that one; others are refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from framework.errors import ModelError
from framework.model.load import build_meta, choose_experts
from framework.model.probe import find_load_balancing_loss, find_routers_loss
from framework.model.routers import LoadBalancingLoss, Routers
from framework.verify.evidence import keep_double
from tests.families import build_config, family, needs_newer_transformers

KNOWN = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "phimoe", "qwen3_next", "minimax_m2")
# Their loss was at fault.
MENDED = [pytest.param(name, marks=needs_newer_transformers) for name in ("granitemoe", "jamba", "granitemoehybrid")]


@pytest.mark.parametrize("name", [*KNOWN, MENDED[0]])
def test_the_loss_of_sums_is_the_models(name: str) -> None:
    config = build_config(family(name), output_router_logits=True, router_aux_loss_coef=0.3)
    config.use_cache = False
    loss = find_load_balancing_loss(build_meta(config))
    assert loss is not None
    assert loss.weight == 0.3
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    choose_experts(model, "auto", torch.float64)
    tokens = torch.randint(3, 97, (3, 7))
    with keep_double(torch.float64):
        expected = model(input_ids=tokens).aux_loss
        expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    routers = Routers(model, loss, torch.float64, torch.device("cpu"))
    routers.start()
    with keep_double(torch.float64):
        model(input_ids=tokens, output_router_logits=False)
        found = loss.compute(routers.end())
        found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    assert gradients
    for each, parameter in model.named_parameters():
        if each in gradients:
            torch.testing.assert_close(parameter.grad, gradients[each], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", ["ernie4_5_moe", "flex_olmo", *MENDED[1:]])
def test_other_families_have_the_same_loss(name: str) -> None:
    config = AutoConfig.for_model(name)
    config.output_router_logits = True
    assert isinstance(find_load_balancing_loss(build_meta(config)), LoadBalancingLoss)


def test_no_loss_is_asked_for() -> None:
    assert find_load_balancing_loss(build_meta(build_config(family("mixtral")))) is None
    assert find_load_balancing_loss(build_meta(build_config(family("llama")))) is None


@pytest.mark.parametrize(
    ("name", "reason"), [("doge", "not one of the routers' logits|not E sum_e"), ("jetmoe", "coef")]
)
def test_another_loss_is_refused_by_name(name: str, reason: str) -> None:
    config = AutoConfig.for_model(name)
    config.output_router_logits = True
    with pytest.raises(
        ModelError, match=f"output_router_logits=true: the load-balancing loss of {name} models.*({reason})"
    ):
        find_load_balancing_loss(build_meta(config))


def test_a_router_z_loss_without_routers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"train\.router_z_loss=0\.1.*llama"):
        find_routers_loss(build_meta(build_config(family("llama"))), 0.1)
