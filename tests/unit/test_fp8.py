"""fp8 matmuls beside torchao's own layer, kernels beside emulation, and what cannot be in fp8."""

from tests.torchao_folder import FOLDER  # isort: skip  first: what follows imports torchao from there

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.comm.connect import connect
from framework.errors import ModelError
from framework.launch.parts import check_ranks
from framework.model import fp8
from framework.model.fp8 import E4M3, E5M2, Fp8Matmul, Scaling, multiply_factors, quantize
from framework.model.load import build_meta
from framework.parallel.layer_matmuls import find_fp8_linears
from framework.parallel.zero.parameters import ParameterSync
from framework.plan.plan import make_plan
from framework.recipe.check import check_recipe
from framework.recipe.compose import compose
from framework.recipe.schema import Memory, Precision, Recipe
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from framework.verify.plain_rounding import multiply_in_fp8
from framework.verify.prepare import VerifyOptions, prepare
from tests.families import build_config, family, needs_newer_transformers
from tests.ranks.parity import small_recipe, topology_of

SCALINGS: list[Scaling] = ["tensor", "row"]
# Tokens that no multiple of 16 is, and a number far beyond the others, which a scale of the whole factor has to follow.
TOKENS, INPUTS, OUTPUTS = 21, 64, 96


def make_inputs() -> tuple[Tensor, Tensor]:
    """x: [3, 7, 64]; dy: [3, 7, 96]."""
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(3, 7, size, generator=generator) for size in (INPUTS, OUTPUTS))
    x[1, 2, 5] = 300
    return x.bfloat16(), (1e-4 * dy).bfloat16()


def make_linear(is_transposed: bool) -> nn.Module:
    torch.manual_seed(5)
    linear = Conv1D(OUTPUTS, INPUTS) if is_transposed else nn.Linear(INPUTS, OUTPUTS)
    return linear.bfloat16()


def run_torchao(linear: nn.Module, scaling: Scaling, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Y, dX and dW, [N, K], of torchao's layer."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(f"{scaling}wise")
    weight = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
    stock = nn.Linear(*reversed(weight.shape)).bfloat16()
    stock.weight.data, stock.bias.data = weight.data.contiguous(), linear.bias.data
    layer = Float8Linear.from_float(stock, replace(config, emulate=True, round_scales_to_power_of_2=True))
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y, x.grad, layer.weight.grad


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_are_those_of_torchao(scaling: Scaling, is_transposed: bool) -> None:
    linear, (x, dy) = make_linear(is_transposed), make_inputs()
    expected = run_torchao(linear, scaling, x, dy)
    matmul = Fp8Matmul(linear, is_transposed, scaling)
    gradient = matmul.weight_gradient(x, dy)
    found = matmul.forward(x, linear.bias), matmul.input_gradient(dy), gradient.t() if is_transposed else gradient
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    # And it is fp8 that has been multiplied, not what came in.
    exact = nn.functional.linear(x, matmul.matrix, linear.bias)
    assert not torch.allclose(found[0], exact, rtol=2.0**-8)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_computes_what_is_emulated(scaling: Scaling, dtype: torch.dtype) -> None:
    """torch's kernel on CPUs, which has the arguments and the layouts of memory of that on GPUs."""
    (x, dy), matrix = make_inputs(), make_linear(False).weight.data
    # Of each matmul the shapes and strides: rows of tokens, a transposed weight, and both factors transposed.
    for left, right in ((x, matrix), (dy, matrix.t()), (dy.flatten(0, 1).t(), x.flatten(0, 1).t())):
        of_left = quantize(left.reshape(-1, left.shape[-1]), E5M2 if scaling == "tensor" else E4M3, scaling)
        factors = of_left, quantize(right, E4M3, scaling)
        emulated = multiply_factors(*factors, torch.float32)
        with patch.object(fp8, "has_kernel", lambda device, scaling: True):
            computed = multiply_factors(*factors, dtype)
        torch.testing.assert_close(computed.float(), emulated, rtol=2.0**-7, atol=1e-6 * float(emulated.abs().max()))


def test_gradients_are_added_without_a_rounding_to_bf16() -> None:
    (x, dy), linear = make_inputs(), make_linear(False)
    view = torch.full((OUTPUTS, INPUTS), 1.0)
    matmul = Fp8Matmul(linear, False, "tensor")
    compute = partial(matmul._multiply_gradients, None)
    fp8._accumulate(compute, view, dy.flatten(0, 1), x.flatten(0, 1), is_first=False)
    gradient = matmul.weight_gradient(x, dy)
    assert not torch.equal(view, 1.0 + gradient.float())
    torch.testing.assert_close(view, 1.0 + gradient.float(), rtol=0, atol=2.0**-8 * float(gradient.abs().max()))


def test_the_oracle_takes_a_conv1d_for_the_linear_layer_that_it_is() -> None:
    """GPT-2's layers: in bf16 they would be nearer to fp32 than any layout's, and a sound layout would be told wrong."""
    x, dy = make_inputs()
    config = build_config(family("gpt2"), n_embd=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    multiply_in_fp8(model, "tensor", torch.device("cpu"))
    assert [name for name, _ in model.named_parameters()] == names
    assert not [name for name in layers if isinstance(model.get_submodule(name), Conv1D)]
    conv = layers["transformer.h.0.mlp.c_fc"]
    expected, dx, dw = run_torchao(conv, "tensor", x, dy.repeat(1, 1, 3)[..., : conv.nf])
    x = x.clone().requires_grad_()
    found = model.get_submodule("transformer.h.0.mlp.c_fc")(x)
    found.backward(dy.repeat(1, 1, 3)[..., : conv.nf])
    assert torch.equal(found, expected)
    assert torch.equal(x.grad, dx)
    assert torch.equal(conv.weight.grad, dw.t())


def make_fp8_recipe() -> Recipe:
    return replace(small_recipe("bf16", 1, 1, 2), precision=Precision("fp8"))


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda: check_ranks([compose(["experiment=quickstart", "precision=fp8"]).require()]), id="train"),
        pytest.param(
            lambda: prepare(compose(["launch.ranks=2", "parallel.tp=2"]).require(), VerifyOptions(dtype="fp8")),
            id="verify",
        ),
        pytest.param(
            lambda: prepare(compose(["experiment=quickstart", "precision=fp8"]).require(), VerifyOptions(strict=True)),
            id="verify --strict",
        ),
    ],
)
def test_without_torchao_it_is_refused_before_a_device_is_touched(
    use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(FOLDER)])
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        ModelError, match=r"precision.compute=fp8: torchao is not installed: pip install 'meshwright\[fp8\]'"
    ):
        use()


def test_a_plan_for_other_machines_needs_no_torchao_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(FOLDER)])
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    plan = make_plan(make_fp8_recipe(), build_config(family("llama")))
    assert plan.memory(0).reserved > 0
    assert not [name for name in sys.modules if name.split(".")[0] == "torchao"]


def test_a_family_that_keeps_a_linear_layer_in_fp32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers says it of a family: in bf16, which fp8 is beside its matmuls."""
    monkeypatch.setattr(LlamaPreTrainedModel, "_keep_in_fp32_modules_strict", ["mlp.down_proj"])
    config = build_config(family("llama"), intermediate_size=64)
    with pytest.raises(ModelError, match=r"llama keeps linear layers in fp32 \(model.layers.0.mlp.down_proj,.*bf16"):
        make_plan(make_fp8_recipe(), config).of_rank(0)


def test_what_contradicts_fp8_is_told() -> None:
    row = replace(make_fp8_recipe(), precision=Precision("bf16", fp8_scaling="row"))
    assert "precision.fp8_scaling" in {problem.key for problem in check_recipe(row, {})}


def test_no_token_gives_nothing_and_a_gradient_of_zeros() -> None:
    linear = make_linear(False)
    for scaling in SCALINGS:
        matmul, nothing = Fp8Matmul(linear, False, scaling), torch.zeros(0, INPUTS, dtype=torch.bfloat16)
        assert matmul.forward(nothing, linear.bias).shape == (0, OUTPUTS)
        assert not matmul.weight_gradient(nothing, nothing.new_zeros(0, OUTPUTS)).any()


@needs_newer_transformers  # which calls the classifier
def test_weights_that_are_read_without_a_call_are_not_in_fp8() -> None:
    """mamba's dt_proj and the classifier of longcat's router: rounded on their way, they would be another model's."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "use_cache": False}
    configs = [
        CONFIG_MAPPING["mamba"](time_step_rank=16, state_size=16, **small),
        build_config(family("longcat_flash"), n_routed_experts=16, zero_expert_num=16),
    ]
    for config in configs:
        stage = make_plan(make_fp8_recipe(), config).of_rank(0).stages[0]
        found = find_fp8_linears(build_meta(config), stage.plan)
        assert not [each for each in found if "mixer" in each or "router" in each]


@pytest.mark.parametrize("is_told", [True, False])
def test_what_was_found_of_a_weight_is_forgotten_before_its_update(is_told: bool) -> None:
    """Once for each weight and step, however many microbatches. Sabotage: nobody tells the layers that weights change."""
    config = build_config(family("llama"), hidden_size=64, intermediate_size=96, head_dim=16)
    recipe = replace(make_fp8_recipe(), memory=Memory(compile="never"))
    mesh = connect(topology_of(recipe, config), torch.device("cpu"))
    run = build(make_plan(recipe, config), mesh)
    (batch,) = make_batches(config, 1, recipe.batch.sequences_per_step, recipe.batch.context or 0, seed=11)
    kept: dict[Fp8Matmul, list[Tensor]] = {}
    whole = Fp8Matmul._quantize_weight

    def quantize_weight(matmul: Fp8Matmul, is_turned: bool) -> Any:
        factor = whole(matmul, is_turned)
        kept.setdefault(matmul, []).append(matmul._largest[False])
        return factor

    ignored = nullcontext() if is_told else patch.object(ParameterSync, "invalidate", lambda sync: None)
    with patch.object(Fp8Matmul, "_quantize_weight", quantize_weight), ignored:
        train_step(run, share(batch, recipe.batch.sequences_per_microbatch or 1, mesh), 0, 1e-2)
    assert len(kept) == 7 * config.num_hidden_layers
    assert all(len(found) > 1 and all(each is found[0] for each in found) for found in kept.values())
    assert all((not matmul._largest) is is_told for matmul in kept)
