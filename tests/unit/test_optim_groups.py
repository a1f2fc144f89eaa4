"""Parameter groups: first pattern wins, norms and biases do not decay, a pattern without effect is an error."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from framework.errors import RecipeError
from framework.model.load import build_meta, load_config
from framework.model.mixtures import find_constants
from framework.model.shrink import shrink
from framework.model.units import find_units
from framework.optim.groups import group_parameters, group_parameters_of, is_no_weight
from framework.recipe.compose import compose
from framework.recipe.schema import Optim, ParameterGroup
from framework.verify import plain
from tests.families import needs_newer_transformers

LLAMA = [
    ("model.embed_tokens.weight", (97, 16), True),
    ("model.layers.0.self_attn.q_proj.weight", (16, 16), True),
    ("model.layers.0.self_attn.q_proj.bias", (16,), True),
    ("model.layers.0.input_layernorm.weight", (16,), True),
    ("model.layers.1.self_attn.q_proj.weight", (16, 16), False),
    ("lm_head.weight", (97, 16), True),
]


def grouped(**groups: ParameterGroup):
    return {a.parameter: a for a in group_parameters(LLAMA, Optim(weight_decay=0.1, groups=groups))}


def test_without_groups_all_but_norms_and_biases_decay_and_frozen_parameters_are_absent():
    decay = {name: (a.group, a.lr_ratio, a.weight_decay) for name, a in grouped().items()}
    assert decay == {
        "model.embed_tokens.weight": ("default", 1.0, 0.1),
        "model.layers.0.self_attn.q_proj.weight": ("default", 1.0, 0.1),
        "model.layers.0.self_attn.q_proj.bias": ("default", 1.0, 0.0),
        "model.layers.0.input_layernorm.weight": ("default", 1.0, 0.0),
        "lm_head.weight": ("default", 1.0, 0.1),
    }


def test_the_first_group_that_matches_wins():
    found = grouped(head=ParameterGroup("lm_head", lr_ratio=0.5), weights=ParameterGroup("weight$", lr_ratio=2.0))
    assert found["lm_head.weight"].lr_ratio == 0.5
    assert found["model.embed_tokens.weight"].group == "weights"
    assert found["model.layers.0.self_attn.q_proj.bias"].group == "default"


def test_a_group_keeps_norms_and_biases_from_decay_unless_it_states_its_decay():
    inherits = grouped(layer=ParameterGroup(r"layers\.0", lr_ratio=3.0))
    assert inherits["model.layers.0.self_attn.q_proj.weight"].weight_decay == 0.1
    assert inherits["model.layers.0.self_attn.q_proj.bias"].weight_decay == 0.0
    states = grouped(layer=ParameterGroup(r"layers\.0", weight_decay=0.3))
    assert {a.weight_decay for name, a in states.items() if "layers.0" in name} == {0.3}


def test_patterns_without_effect_are_one_error_naming_key_and_near_names():
    groups = {
        "typo": ParameterGroup("q_porj"),
        "all": ParameterGroup("."),
        "shadowed": ParameterGroup("lm_head"),
        "broken": ParameterGroup("(head"),
    }
    with pytest.raises(RecipeError) as caught:
        group_parameters(LLAMA, Optim(groups=groups))
    typo, shadowed, broken = str(caught.value).split("\n")
    assert "optim.groups.typo.pattern='q_porj'" in typo
    assert "model.layers.*.self_attn.q_proj.weight" in typo
    assert "optim.groups.shadowed.pattern" in shadowed
    assert "optim.groups.all comes first" in shadowed
    assert "optim.groups.broken.pattern" in broken


def test_a_group_of_frozen_parameters_only_is_no_error_and_assigns_nothing():
    assert set(grouped(frozen=ParameterGroup(r"layers\.1"))) == set(grouped())


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 32), True),  # gpt_oss: one bias per expert
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 16, 32), False),
        ("model.layers.0.self_attn.q_norm.weight", (8, 64), True),  # cohere: one scale per head
        ("model.layers.0.mlp.gate.moe_statics.e_score_correction_bias", (1, 64), True),
        ("model.layers.0.input_layernorm.mlp.fc1.weight", (16, 64), False),  # a linear map inside a norm still decays
        ("roberta_prelayernorm.embeddings.word_embeddings.weight", (97, 64), False),
        ("transformer.h.0.ln_1.weight", (64,), True),
        ("transformer.h.0.ln_1.weight", (2, 64), True),
        ("model.layers.0.mamba.A_log", (4, 8, 16), True),
        ("backbone.layers.0.mixer.D", (4, 8), True),
        ("model.layers.0.self_attn.D.weight", (4, 8), False),
        ("weight", (4, 4), False),
    ],
)
def test_norms_and_biases_are_told_by_name_also_when_they_have_two_dims(name, shape, expected):
    assert is_no_weight(name, shape) is expected


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "jamba", "zamba", "kimi_linear"])
def test_rates_of_state_space_layers_do_not_decay(model_type):
    """A_log has two to four dims there, zamba's D has two."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shrink(AutoConfig.for_model(model_type)))
    shapes = [(name, tuple(parameter.shape), True) for name, parameter in model.named_parameters()]
    decays = {a.parameter: a.weight_decay for a in group_parameters(shapes, Optim(weight_decay=0.1))}
    rates = [name for name, _, _ in shapes if name.rpartition(".")[2] in ("A_log", "D")]
    assert rates
    assert not any(decays[name] for name in rates)


def test_what_the_model_marks_does_not_decay():
    """Unless a group states its decay."""
    recipe = compose(["model=tiny_llama", "launch.ranks=1", "batch.sequences_per_step=8", "batch.context=16"]).require()
    whole = build_meta(load_config(recipe.model))
    name = "model.layers.0.mlp.up_proj.weight"
    whole.get_parameter(name)._no_weight_decay = True
    units = tuple(find_units(whole))
    assert [
        a.parameter
        for a in group_parameters_of(recipe, whole, units)
        if not a.weight_decay and "norm" not in a.parameter
    ] == [name]
    stated = replace(recipe.optim, groups={"up": ParameterGroup("up_proj", weight_decay=0.2)})
    decays = {a.parameter: a.weight_decay for a in group_parameters_of(replace(recipe, optim=stated), whole, units)}
    assert decays[name] == 0.2


def test_what_the_family_freezes_is_not_trained_but_for_biases_of_routers():
    """Roformer's table of sines; afmoe's bias is moved by other means."""
    recipe = compose(["model=tiny_llama", "launch.ranks=1", "batch.sequences_per_step=8", "batch.context=16"]).require()
    for family, table in (("roformer", "roformer.encoder.embed_positions.weight"), ("afmoe", None)):
        whole = build_meta(shrink(AutoConfig.for_model(family)))
        trained = {each.parameter for each in group_parameters_of(recipe, whole, tuple(find_units(whole)))}
        assert {name for name, _ in whole.named_parameters()} - trained == ({table} if table else set())
        assert find_constants(whole) == plain.find_constants(whole) == ({table} if table else set())


@pytest.mark.parametrize("family", ["inkling_text", pytest.param("inkling2_text", marks=needs_newer_transformers)])
def test_the_oracle_and_ranks_agree_on_embeddings_that_hold_a_norm_and_on_scales_of_heads(family):
    whole = build_meta(shrink(AutoConfig.for_model(family)))
    ours = {name for name, each in whole.named_parameters() if is_no_weight(name, tuple(each.shape))}
    assert ours == plain.decay_nothing(whole)
    assert "model.embed_tokens.weight" not in ours


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe", "gpt_oss", "phi3", "gpt_neox", "cohere"])
def test_what_does_not_decay_in_a_real_model_is_exactly_its_norm_modules_and_biases(family):
    config = AutoConfig.for_model(family)
    for key in ("num_hidden_layers", "n_layer"):
        if hasattr(config, key):
            setattr(config, key, 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = set()
    for path, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if "norm" in type(module).__name__.lower() or "bias" in own_name or parameter.ndim < 2:
                expected.add(f"{path}.{own_name}")
    parameters = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    assignments = group_parameters(parameters, replace(Optim(), weight_decay=0.1))
    assert len(assignments) == len(parameters)
    assert {a.parameter for a in assignments if a.weight_decay == 0} == expected & {name for name, _, _ in parameters}
