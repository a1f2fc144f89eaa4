"""Adapters on one rank: PEFT's folders both ways, merged weights, dropout, initial values, memory, and bad input."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from framework.commands import trained_model
from framework.commands.trained_model import UnitReader
from framework.errors import ModelError
from framework.model.adapters import DROPOUT, A, AdapterDropout, AdapterMatmul, AdapterSwitch, B, is_adapter, merge_all
from framework.model.generate import load_folder
from framework.model.hub import find_base, fingerprint_base
from framework.model.initial import draw_unit, seed_for, seed_rng
from framework.model.load import build_meta
from framework.model.matmul import Matmul, accumulate_matmul
from framework.model.peft import NEUTRAL, WEIGHTS, add_adapters, find_targets, read_adapter, write_adapter
from framework.model.safetensors_files import ADAPTER
from framework.model.shrink import shrink
from framework.model.units import find_units, set_parameter, tied_names
from framework.optim.groups import group_parameters_of
from framework.parallel.tensor.layers import RowLinear
from framework.parallel.tensor.regions import mask_of
from framework.plan.check import check_weights
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.recipe.schema import Adapter, Model, Parallel, Recipe
from framework.verify.layout import initial_weights
from tests.chat_templates import build_tokenizer
from tests.families import build_config, family
from tests.grid import IN_TURN
from tests.ranks.mixers import find
from tests.ranks.parity import CPU, small_recipe

pytestmark = IN_TURN

LORA = Adapter("lora", 3, 5.0)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# (family, our adapter, PEFT's keys)
KINDS: dict[str, tuple[str, Adapter, dict[str, Any]]] = {
    "dora, whole ends": (
        "llama",
        replace(LORA, kind="dora", rank_stabilized=True, train=["lm_head", "embed_tokens"]),
        {"target_modules": "all-linear", "use_dora": True, "use_rslora": True, "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "experts": (
        "qwen3_moe",
        replace(LORA, targets=["q_proj", "experts"]),
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    ),
    "transposed": ("gpt2", replace(LORA, targets=["c_attn"]), {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "transposed experts": (
        "gpt_oss",
        replace(LORA, targets=["experts.down_proj"]),
        {"target_modules": [], "target_parameters": EXPERTS[1:]},
    ),
}  # fmt: skip


def wrap(name: str, keys: Mapping[str, Any]) -> Any:
    """PEFT's model, with B that is not zero."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(build_config(family(name), tie_word_embeddings=False), dtype=torch.float64)
    if name in ("qwen3_moe", "gpt_oss"):
        model.set_experts_implementation("eager")  # there is no grouped matmul in fp64
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **keys), autocast_adapter_dtype=False)
    for each, parameter in wrapped.named_parameters():
        if "lora_B" in each:
            nn.init.normal_(parameter, std=0.1)
    return wrapped.eval()


def adapted(name: str, adapter: Adapter) -> PreTrainedModel:
    model = build_meta(build_config(family(name), tie_word_embeddings=False))
    add_adapters(model, adapter)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_peft_come_and_go_bit_by_bit_and_merge_alike(kind: str, tmp_path: Path) -> None:
    name, adapter, keys = KINDS[kind]
    wrapped, model = wrap(name, keys), adapted(name, adapter)
    wrapped.save_pretrained(tmp_path / "theirs")
    tensors = read_adapter(tmp_path / "theirs", model, adapter)
    (tmp_path / "ours").mkdir()
    write_adapter(tmp_path / "ours", model, adapter, Model(), tensors)
    assert (tmp_path / "ours" / WEIGHTS).read_bytes() == (tmp_path / "theirs" / WEIGHTS).read_bytes()

    base = wrap(name, keys).unload()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = wrapped(ids).logits
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "ours", autocast_adapter_dtype=False)
        assert torch.equal(loaded.eval()(ids).logits, expected)
    stock = wrap(name, keys).unload()
    whole = {each: parameter.detach() for each, parameter in stock.named_parameters()}
    whole |= {each: tensor for each, tensor in tensors.items() if each in whole}
    stock.load_state_dict(merge_all(model, adapter, whole, tensors.__getitem__), strict=False)
    with torch.no_grad():
        assert torch.allclose(stock(ids).logits, expected, rtol=1e-9, atol=1e-9)


def test_adapters_of_another_form_are_refused(tmp_path: Path) -> None:
    name, adapter, keys = KINDS["experts"]
    wrap(name, keys).save_pretrained(tmp_path)
    for changed, words in (
        (replace(adapter, rank=4), "set adapter.rank=3"),
        (replace(adapter, rank_stabilized=True), "set adapter.rank_stabilized=False"),
        (replace(adapter, targets=["q_proj", "k_proj", "experts"]), "missing"),
    ):
        with pytest.raises(ModelError, match=words):
            read_adapter(tmp_path, adapted(name, changed), changed)
    config = tmp_path / ADAPTER
    config.write_text(config.read_text().replace('"bias": "none"', '"bias": "all"'))
    with pytest.raises(ModelError, match="bias='all' is of a form"):
        read_adapter(tmp_path, adapted(name, adapter), adapter)
    model = build_meta(build_config(family(name), tie_word_embeddings=False, num_experts=5))
    add_adapters(model, adapter)
    config.write_text(config.read_text().replace('"bias": "all"', '"bias": "none"'))
    with pytest.raises(ModelError, match=r"lora_A.weight has the shape .*, for .*proj_lora_A of \[5, 3, "):
        read_adapter(tmp_path, model, adapter)
    with pytest.raises(ModelError, match="no adapter as PEFT's"):
        read_adapter(tmp_path / "absent", adapted(name, adapter), adapter)


@pytest.mark.parametrize(
    ("form", "r"), [("pissa", 3), ("pissa_niter_4", 3), ("olora", 3), ("gaussian", 3), ("orthogonal", 4), ("mica", 3)]
)
def test_an_adapter_is_read_where_pefts_loading_leaves_the_base_as_it_is(form: str, r: int, tmp_path: Path) -> None:
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_config(build_config(family("llama"), tie_word_embeddings=False))
    weight = base.model.layers[0].self_attn.q_proj.weight.detach().clone()
    peft.get_peft_model(base, peft.LoraConfig(r=r, target_modules=["q_proj"], init_lora_weights=form)).save_pretrained(
        tmp_path
    )
    loaded = AutoModelForCausalLM.from_config(base.config)
    loaded.model.layers[0].self_attn.q_proj.weight.data.copy_(weight)
    loaded = peft.PeftModel.from_pretrained(loaded, tmp_path).unload()
    adapter = Adapter("lora", r, 8.0, targets=["q_proj"], weights="FOLDER")
    if torch.equal(loaded.model.layers[0].self_attn.q_proj.weight, weight):
        assert read_adapter(tmp_path, adapted("llama", adapter), adapter)
    else:
        with pytest.raises(ModelError, match=f"init_lora_weights='{form}' has changed the base.*path_initial_model"):
            read_adapter(tmp_path, adapted("llama", adapter), adapter)


def test_every_key_of_pefts_config_that_changes_the_numbers_is_looked_at() -> None:
    variants = {each.name for each in fields(peft.LoraConfig) if each.metadata.get("is_lora_variant")}
    assert variants - {"use_dora"} <= NEUTRAL.keys()


@pytest.mark.parametrize(
    ("name", "adapter", "words"),
    [
        ("llama", replace(LORA, targets=["q_prj"]), "did you mean q_proj"),
        ("qwen3_moe", replace(LORA, targets=["mlp.gate"]), "train it whole, adapter.train="),
        ("llama", replace(LORA, targets=["lm_head"]), "is the head"),
        ("llama", replace(LORA, targets=["norm"]), "no linear layer"),
        ("qwen3_moe", replace(LORA, kind="dora", targets=["experts"]), "adapter.kind=dora is not for stacked experts"),
        ("qwen3_moe", replace(LORA, dropout=0.1, targets=["experts"]), "adapter.dropout is not for stacked experts"),
    ],
)
def test_targets_that_fit_nothing_name_the_key_and_the_fix(name: str, adapter: Adapter, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        adapted(name, adapter)
    assert "adapter." in str(caught.value)


class ScaledLinear(nn.Linear):
    """A layer that computes something else with its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_layers_with_a_forward_of_their_own_are_refused_unless_it_is_linear() -> None:
    assert find_targets(build_meta(build_config(family("falcon"))), LORA)
    model = build_meta(build_config(family("llama")))
    model.model.layers[0].mlp.up_proj.__class__ = ScaledLinear  # type: ignore[union-attr, index]
    with pytest.raises(ModelError, match=r"mlp.up_proj \(ScaledLinear\) computes more than a linear layer"):
        find_targets(model, LORA)


@pytest.mark.parametrize("train", [["embed_token"], ["q_proj"]])
def test_modules_that_cannot_be_trained_whole_are_refused(train: list[str]) -> None:
    recipe = replace(Recipe(), adapter=replace(LORA, train=train))
    model = adapted("llama", recipe.adapter)
    with pytest.raises(ModelError, match=r"adapter\.train"):
        group_parameters_of(recipe, model, tuple(find_units(model)))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["adapter.rank=4"], "adapter.rank"),
        (["adapter=lora", "model.freeze=[norm]"], "model.freeze"),
        (["adapter=lora", "precision=fp8"], "precision.compute"),
        (["adapter=lora", "adapter.targets=[]"], "adapter.targets"),
        (["adapter=dora", "adapter.dropout=0.1"], "adapter.dropout"),
        (["adapter=lora", "adapter.dropout=0.1", "memory.compile=always"], "memory.compile"),
        (["adapter=lora", "adapter.alpha=0"], "adapter.alpha"),
    ],
)
def test_keys_that_contradict_an_adapter_are_refused(overrides: list[str], key: str) -> None:
    assert key in {problem.key for problem in compose(overrides).problems}


def test_initial_values_belong_to_the_unit_and_are_pefts() -> None:
    model = adapted("llama", replace(LORA, kind="dora"))
    unit = next(each for each in find_units(model) if each.name == "layers.1")
    drawn, again = draw_unit(model, unit, 5, CPU), draw_unit(adapted("llama", LORA), unit_of(LORA), 5, CPU)
    for name, values in drawn.items():
        if name.endswith(A):
            bound = values.shape[1] ** -0.5
            assert 0.8 * bound < float(values.abs().max()) <= bound
            assert torch.equal(values, again[name])
        elif name.endswith(B):
            assert not values.any()
        elif not is_adapter(name):
            assert torch.equal(values, again[name])
    name = "model.layers.1.mlp.up_proj"
    assert torch.allclose(drawn[f"{name}.lora_magnitude_vector"], drawn[f"{name}.weight"].norm(dim=1))


def unit_of(adapter: Adapter) -> Any:
    return next(each for each in find_units(adapted("llama", adapter)) if each.name == "layers.1")


class Sum:
    """A main gradient that is a tensor."""

    is_deferred = False

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.total = parameter, torch.zeros_like(parameter)

    def add(self, gradient: Tensor) -> None:
        self.total += gradient

    def add_matmul(self, left: Tensor, right: Tensor, accumulate: Any = accumulate_matmul) -> None:
        accumulate(self.total, left, right, False)


def test_dropout_is_of_the_low_rank_path_in_forward_and_backward() -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(6, 5, dtype=torch.float64)
    for name, shape in ((A, (2, 6)), (B, (5, 2))):
        layer.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
    layer.add_module(DROPOUT, AdapterDropout(0.4))
    views: Any = {part: Sum(layer.get_parameter(part)) for part in (A, B)}
    matmul = AdapterMatmul(Matmul(layer, False), layer, 1.5, views, AdapterSwitch())
    x, dy = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True), torch.randn(3, 4, 5, dtype=torch.float64)
    passage = matmul.begin(x)
    mask = passage._dropped(torch.ones_like(x)) * 0.6
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    # Computed again, in a stream that has gone on meanwhile, it drops the same; in the next microbatch others.
    torch.rand(5)
    assert torch.equal(mask, matmul.begin(x)._dropped(torch.ones_like(x)) * 0.6)
    torch.manual_seed(1)
    assert not torch.equal(mask, matmul.begin(x)._dropped(torch.ones_like(x)) * 0.6)
    # Nothing of the size of x is kept: neither checkpointing nor the plan would know of it.
    held = [each for each in vars(passage).values() if isinstance(each, Tensor)]
    assert max((each.numel() for each in held), default=0) < x.numel()
    a, b = (layer.get_parameter(part).detach().requires_grad_() for part in (A, B))
    expected = F.linear(x, layer.weight, layer.bias) + 1.5 * (x * mask / 0.6) @ a.t() @ b.t()
    expected.backward(dy)
    assert torch.allclose(passage.forward(x.detach(), layer.bias.detach()), expected)
    assert torch.allclose(passage.input_gradient(dy), x.grad)
    passage.weight_gradient(x.detach(), dy)
    assert torch.allclose(views[A].total, a.grad)
    assert torch.allclose(views[B].total, b.grad)
    layer.eval()
    assert torch.equal(matmul.begin(x)._dropped(x), x)


def test_a_weight_that_a_model_reads_past_its_layer_gets_no_adapter() -> None:
    """An adapter of Mamba's dt_proj would be in no forward, and yet in the merged model. Of bloom a mode alone reads dense."""
    for name, leaf, is_left_out in (("mamba", "dt_proj", True), ("bloom", "dense", False)):
        model = build_meta(build_config(find(name)))
        found = find_targets(model, LORA)
        assert any(each.endswith(f".{leaf}.weight") for each in found) != is_left_out
        if is_left_out:
            with pytest.raises(ModelError, match=r"dt_proj is read by the module around it.*leave it out"):
                find_targets(model, replace(LORA, targets=[leaf]))
    # Clamped, and so read, in training alone.
    model = build_meta(shrink(CONFIG_MAPPING["gemma3n_text"](), 4))
    assert not any("correction_coefs" in each for each in find_targets(model, LORA))


def test_a_weight_that_layers_share_gets_no_adapter() -> None:
    model = build_meta(shrink(CONFIG_MAPPING["zamba"](), 4))
    assert not any("shared_transf" in each for each in find_targets(model, LORA))
    with pytest.raises(ModelError, match=r"layers share the weight of model.layers.2.*q_proj.*leave it out"):
        find_targets(model, replace(LORA, targets=["q_proj"]))


def test_ranks_that_hold_other_inputs_of_an_adapter_drop_others() -> None:
    recipe = small_recipe("fp32", 2)
    recipe = replace(recipe, adapter=replace(LORA, dropout=0.1), parallel=replace(recipe.parallel, tp=2))
    plan = make_plan(recipe, build_config(family("llama")))
    masks = [
        {name: module.mask for name, module in stage.model.model.named_modules() if isinstance(module, AdapterDropout)}
        for rank in (0, 1)
        for stage in plan.of_rank(rank).stages
    ]
    assert len(masks) == 2
    equal = {name for name, mask in masks[0].items() if mask == masks[1][name] == 0}
    others = {name for name, mask in masks[0].items() if mask != masks[1][name]}
    assert {name.split(".")[-2] for name in equal} == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert {name.split(".")[-2] for name in others} == {"o_proj", "down_proj"}


# The layers whose inputs are divided.
ROWS = {"gpt_bigcode": {"c_proj"}, "deepseek_v3": {"o_proj", "down_proj"}}


@pytest.mark.parametrize("of", ROWS)
@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_of_tp_drop_the_same_of_an_input_that_they_share_whatever_stream_they_are_in(
    of: str, sequence: bool
) -> None:
    base = small_recipe("fp32", 2)
    recipe = replace(base, adapter=replace(LORA, dropout=0.1), parallel=Parallel(tp=2, sequence=sequence))
    by_rank: list[dict[str, int]] = []
    for rank in (0, 1):
        planned, seeds = make_plan(recipe, build_config(family(of))).of_rank(rank), {}
        model: Any = planned.stages[0].model.model
        adapted = {name: each for name, each in model.named_modules() if hasattr(each, DROPOUT)}
        for name, module in adapted.items():
            around = (model.get_submodule(name[: each.start()]) for each in re.finditer(r"\.|$", name))
            region = next((vars(each)["region_hook"] for each in around if "region_hook" in vars(each)), None)
            seed_rng(7 ^ mask_of(planned.tokens))
            if region is not None:
                region.rng.start_inside(torch.ones(1), region.name, region.differs)
            seeds[name] = module.lora_dropout.find_seed(torch.ones(1))
            # On one rank there is no region, and the same is dropped.
            is_shared = not isinstance(module, RowLinear) and (region is not None or not sequence)
            assert is_shared == (seeds[name] == 7 ^ seed_for("dropout of an adapter", name)), name
        by_rank.append(seeds)
        assert len({*seeds.values()}) == len(seeds) >= 8
    rows = {name for name, seed in by_rank[0].items() if seed != by_rank[1][name]}
    assert {name.rpartition(".")[2] for name in rows} == ROWS[of]


def test_a_rank_holds_its_share_of_the_frozen_model_and_the_adapters_states() -> None:
    recipe = replace(small_recipe("bf16", 2), adapter=LORA)
    recipe = replace(recipe, zero=replace(recipe.zero, stage=3))
    plan = make_plan(recipe, build_config(family("llama"), hidden_size=64, intermediate_size=160))
    frozen = sum(each.numel() for name, each in plan.whole.named_parameters() if not is_adapter(name))
    trained = sum(each.numel() for name, each in plan.whole.named_parameters() if is_adapter(name))
    held: dict[bool, int] = {True: 0, False: 0}
    for buffer in plan.of_rank(0).buffers:
        held[buffer.is_trained] += sum(buffer.held_bytes(2 * buffer.numel_owned).values())
    padding = 2 * len(plan.units) * 16
    assert frozen <= held[False] <= frozen + padding  # bf16 over two ranks: a byte each
    assert 9 * trained <= held[True] <= 9 * trained + 9 * padding  # bf16, gradient, master, moments: 18 over two ranks
    assert plan.memory_model.pipelines.checkpoint_bytes == 12 * trained


def test_a_folder_of_another_rank_is_refused_before_ranks_start(tmp_path: Path) -> None:
    wrap("llama", {"target_modules": "all-linear"}).save_pretrained(tmp_path)
    recipe = small_recipe("fp32", 1)
    for rank in (3, 4):
        adapter = replace(LORA, rank=rank, weights=str(tmp_path))
        plan = make_plan(replace(recipe, adapter=adapter), build_config(family("llama"), tie_word_embeddings=False))
        if rank == 3:
            check_weights(plan)
        else:
            with pytest.raises(ModelError, match=r"another than the recipe's; set adapter.rank=3"):
                check_weights(plan)


def test_a_folder_of_an_adapter_is_loaded_beside_its_base(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(build_config(family("llama"))).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wrapped = peft.get_peft_model(
        base, peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
    ).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    build_tokenizer("chatml").save_pretrained(tmp_path / "adapter")
    loaded, _ = load_folder(tmp_path / "adapter")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded(ids).logits, wrapped(ids).logits)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ModelError, match="an adapter: pip install peft; or export the run with --merged"):
        load_folder(tmp_path / "adapter")


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_run_reads_its_frozen_model_as_it_was_drawn_and_rounded(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(small_recipe("fp32", 1), adapter=replace(LORA, base=base))
    config = build_config(family("llama"), tie_word_embeddings=True)
    model = build_meta(config)
    adapters = build_meta(config)
    add_adapters(adapters, recipe.adapter)

    def read(reader: Any, kind: str, names: Any) -> dict[str, Tensor]:
        return {name: torch.ones(adapters.get_parameter(name).shape) for name in names}

    monkeypatch.setattr(trained_model, "_read", read)
    units = UnitReader(recipe, model, SimpleNamespace(manifest=SimpleNamespace(entries={}, state={})))  # type: ignore[arg-type]
    for unit in units.units:
        for name, weight in units.read(unit).items():
            set_parameter(model, tied_names(model)[name], nn.Parameter(weight, requires_grad=False))
    expected = initial_weights(config, recipe.train.seed, CPU, recipe.adapter)
    q = "model.layers.1.self_attn.q_proj.weight"
    expected[q] = expected[q] + recipe.adapter.scale * LORA.rank
    for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", q):
        assert torch.allclose(model.get_parameter(name), expected[name]), name


def test_other_frozen_weights_are_known_by_their_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {"w": torch.arange(4096.0), "v": torch.ones(3)}
    save_file(tensors, file)
    model = Model(weights=str(tmp_path))
    known = fingerprint_base(model)
    assert find_base(model, known) == tmp_path
    for changed in ({**tensors, "w": tensors["w"] + 1}, {"w": tensors["w"], "x": tensors["v"]}):
        save_file(changed, file)
        with pytest.raises(ModelError, match="beside other weights"):
            find_base(model, known)
    with pytest.raises(ModelError, match="put it back, or a link to it in its place"):
        find_base(replace(model, weights=str(tmp_path / "moved")), known)
    assert find_base(SimpleNamespace(weights=None), "") is None  # type: ignore[arg-type]
    assert load_file(file)
