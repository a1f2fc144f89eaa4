"""Buffers of every causal family are bitwise those of the stock model, whole, in pipeline stages, and with weights from files."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from framework.errors import ModelError
from framework.model.initial import build_buffers, persistent_buffers, set_buffers
from framework.model.load import build_meta
from framework.model.shrink import shrink
from framework.parallel.zero.parameters import load_pretrained
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from scripts.sweep_families import build_config as build_default_config
from tests.families import FAMILIES, LLAMA, build_config, family, needs_newer_transformers
from tests.grid import few_of

CPU = torch.device("cpu")
# Stock models that transformers does not build from a small copy of the default config.
NOT_BUILT = {
    "cohere_compass_text", "dory", "dots3_note", "gemma3n", "gemma4_assistant", "hunyuan_v1_dense", "ministral", "musicgen",
    "musicgen_melody", "nemotron", "qwen4_exp", "qwen4_exp_text", "reformer",
    *(("dbrx", "gemma4_unified_assistant") if needs_newer_transformers.args[0] else ()),
}  # fmt: skip
# Families whose buffers are written in other ways: by a parent's initialiser, by a constructor alone, for each kind of layer, as
# masks, as sinusoids, as a router's bias, from a part of the config.
VARIED = {
    "falcon_h1", "apertus", "apertus1p5_text", "gemma3_text", "gpt_neo", "gptj", "deepseek_v3", "emu3", "qwen3_next", "minimax",
}  # fmt: skip
# Values of `rope_parameters` of each kind, on Llama's head width of 8.
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 16, "short_factor": [1.0, 1.1, 1.2, 1.3],
                 "long_factor": [1.0, 2.0, 3.0, 4.0]},
}  # fmt: skip


def stock_buffers(config: PretrainedConfig) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)
    return dict(model.named_buffers(remove_duplicate=False))


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, buffer in expected.items():
        assert found[name].dtype == buffer.dtype, name
        assert torch.equal(found[name], buffer), name


def assert_as_stock(config: PretrainedConfig) -> None:
    """Values, and those of a model that was on meta."""
    expected, values, model = stock_buffers(config), build_buffers(config), build_meta(deepcopy(config))
    set_buffers(model, values, CPU)
    assert_same(values, expected)
    assert_same(dict(model.named_buffers(remove_duplicate=False)), expected)


def small(model_type: str) -> PretrainedConfig:
    return shrink(build_default_config(model_type))


@pytest.mark.parametrize("model_type", few_of(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, VARIED.__contains__))
def test_buffers_of_a_family_are_stock(model_type: str) -> None:
    try:
        config = small(model_type)
        stock_buffers(config)
    except Exception:
        if model_type in NOT_BUILT:
            pytest.skip("transformers does not build it")
        raise
    assert_as_stock(config)


@pytest.mark.parametrize("name", few_of([each.name for each in FAMILIES], lambda name: name == "nemotron"))
def test_buffers_of_a_tiny_family_are_stock(name: str) -> None:
    assert_as_stock(build_config(family(name)))


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_tables_of_every_kind_are_stock(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    config = AutoConfig.for_model("llama", **LLAMA, rope_parameters=rope)
    assert_as_stock(config)
    if kind not in ("default", "dynamic"):  # which begins as the default
        assert not torch.equal(build_buffers(config)["model.rotary_emb.inv_freq"], default_table())


def default_table() -> Tensor:
    return build_buffers(AutoConfig.for_model("llama", **LLAMA))["model.rotary_emb.inv_freq"]


def stages_of(config: PretrainedConfig, *options: str) -> Iterator[nn.Module]:
    """Stages of a pipeline of two ranks, on meta."""
    options = (
        "~model",
        f"model.family={config.model_type}",
        "data.bpe_vocab=300",
        "batch.sequences_per_step=8",
        *options,
    )
    recipe = compose([*options, "batch.context=16", "launch.ranks=2", "parallel.pp=2", "launch.device=cpu"]).require()
    config.use_cache = config.get_text_config().use_cache = False
    plan = make_plan(recipe, config)
    for rank in range(2):
        yield from (stage.model.model for stage in plan.of_rank(rank).stages)


@pytest.mark.parametrize("model_type", ["falcon_h1", "gemma3_text"])
def test_buffers_of_pipeline_stages_are_stock(model_type: str) -> None:
    config = small(model_type)
    expected, found = stock_buffers(config), dict[str, Tensor]()
    for stage in stages_of(config):
        set_buffers(stage, build_buffers(config), CPU)
        found |= dict(stage.named_buffers(remove_duplicate=False))
    assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))


@pytest.mark.parametrize(
    "model_type", few_of(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, {"apertus", "deepseek_v3"}.__contains__)
)
def test_buffers_from_files_are_those_of_from_pretrained(model_type: str, tmp_path: Path) -> None:
    """Persistent buffers, with other values than at first; the others are tables that no file holds."""
    if model_type in NOT_BUILT:
        pytest.skip("transformers does not build it")
    stock = AutoModelForCausalLM.from_config(small(model_type), dtype=torch.float32)
    names = persistent_buffers(stock).keys()
    if not names:
        pytest.skip("none of its buffers is in a file")
    for name in names:
        stock.get_buffer(name).mul_(3).add_(1).clamp_(min=-1)  # zaya's initialiser writes -1 over what a file holds
    stock.save_pretrained(tmp_path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_buffers())
    meta, values = build_meta(stock.config), build_buffers(stock.config)
    load_pretrained(meta, values, [], tmp_path)
    assert_same({name: values[name] for name in names}, {name: loaded[name] for name in names})


class ForgetfulConfig(PretrainedConfig):
    model_type = "forgetful"
    table_dtype: str = "float32"
    writes: bool = False


class Forgetful(PreTrainedModel, GenerationMixin):
    """Has a buffer that its constructor allocates, which nobody writes unless `writes` says so."""

    config_class = ForgetfulConfig

    def __init__(self, config: ForgetfulConfig) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.empty(3, dtype=getattr(torch, config.table_dtype)), persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self and self.config.writes:
            self.table.copy_(torch.arange(3))


AutoConfig.register("forgetful", ForgetfulConfig)
AutoModelForCausalLM.register(ForgetfulConfig, Forgetful)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "int32", "uint8"])
def test_a_buffer_that_nobody_writes_is_an_error(dtype: str) -> None:
    with pytest.raises(ModelError, match=r"forgetful models cannot be built: transformers gives no values .* table"):
        build_buffers(ForgetfulConfig(table_dtype=dtype))
    written = build_buffers(ForgetfulConfig(table_dtype=dtype, writes=True))
    assert written["table"].tolist() == [0, 1, 2]
