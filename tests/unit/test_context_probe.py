"""The probe admits a model whose sequences can be divided exactly, and names what is in the way of one whose cannot."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from framework.data.loader import find_sequence_problems
from framework.errors import ModelError, TopologyError
from framework.mesh.token_layout import ContextSlices
from framework.model.load import layer_configs
from framework.parallel.attention import hook, refuse_undivided_context
from framework.parallel.attention.hook import (
    IMPLEMENTATION,
    QUERY_RULES,
    Hook,
    find_attentions,
    hook_attentions,
    refuse_uneven_heads,
)
from framework.parallel.attention.visible_rows import Documents, Scores
from framework.plan.candidate import Candidate
from framework.plan.shape import make_shape
from framework.plan.space import ModelRules
from framework.recipe.compose import compose
from framework.recipe.problem import Problem
from framework.recipe.schema import Parallel
from tests.families import build_config, family, needs_newer_transformers
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

SLICES = ContextSlices(24, ring=2)
WHOLE = Documents(((0,),), 6)
DIVIDED = [
    ("llama", True), ("qwen3", True), ("mistral", True), ("gemma2", True), ("deepseek_v3", True), ("olmo2", True),
    ("glm4", True), ("cohere2", True), ("gpt_oss", True), ("llama4_text", True),
    ("diffllama", True), ("longcat_flash", True), ("gpt_bigcode", True), ("opt", True), ("phi3", True), ("qwen3_next", True),
]  # fmt: skip
# In the older one their attention asks no registry.
NEWER = [pytest.param(name, True, marks=needs_newer_transformers) for name in ("gptj", "codegen")]
SHOWN = ("llama", "gemma2", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_next")


NO_REGISTRY = "asks no registry for its function"
# Families whose attention Hugging Face's registry does not reach.
OWN_ATTENTION = {"bloom": "BloomAttention", "mpt": NO_REGISTRY, "falcon": NO_REGISTRY, "gpt_neo": "GPTNeoAttention"}


def probe(name: str, has_documents: bool = False, slices: ContextSlices = SLICES, **changes: Any) -> None:
    refuse_undivided_context(build_config(family(name), **changes), slices, has_documents)


@pytest.mark.parametrize(("name", "has_documents"), [*few_of(DIVIDED, lambda name, *_: name in SHOWN), *NEWER])
def test_families_whose_attention_can_be_divided_are_admitted(name: str, has_documents: bool) -> None:
    probe(name, has_documents)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (build_config(family("xglm")), "XGLMAttention (model.layers.0.self_attn) mixes tokens outside"),
        *((build_config(family(name)), attention) for name, attention in OWN_ATTENTION.items()),
        (AutoConfig.for_model("bert", hidden_size=32, num_hidden_layers=2, num_attention_heads=2), "BertSelfAttention"),
        (AutoConfig.for_model("rembert", hidden_size=32, num_hidden_layers=2, num_attention_heads=2), "RemBertAttention"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else None,
)  # fmt: skip
def test_a_family_that_cannot_be_divided_is_refused_by_what_is_in_the_way(config: PretrainedConfig, told: str) -> None:
    with pytest.raises(ModelError) as raised:
        refuse_undivided_context(config, SLICES, has_documents=False)
    assert torch.is_grad_enabled(), "the error's frames keep what the probe has open"
    assert told in str(raised.value)
    assert f"parallel.cp=2 cannot divide the sequences of {config.model_type} models" in str(raised.value)


# Stock attention of the older one leaves the cap out, by default.
SOFTCAP = pytest.param("gemma2", "softcap", marks=needs_newer_transformers)


@pytest.mark.parametrize(
    ("name", "lost"),
    [("mistral", "window"), ("gemma2", "window"), ("gpt_oss", "window"), SOFTCAP],
)
def test_an_attention_that_loses_part_of_the_scores_is_found(
    name: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "Scores", lambda *values: replace(Scores(*values), **{lost: None}))
    # Queries and keys of a small model hardly reach a cap of 50.
    changes = {"attn_logit_softcapping": 0.01} if lost == "softcap" else {}
    with pytest.raises(ModelError, match="is not only causal"):
        probe(name, **changes)


def test_documents_that_see_one_another_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_read_documents", lambda module, mask: None)
    with pytest.raises(ModelError, match="is not only causal"):
        probe("llama", has_documents=True)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("llama", {"attention_dropout": 0.1}, "drops 0.1 of its attention's probabilities"),
        ("llama", {"attention_dropout": 0.1}, "Set model.config.attention_dropout=0"),
        ("gpt2", {"attn_pdrop": 0.2, "resid_pdrop": 0.1}, "Set model.config.attn_pdrop=0, or use"),
    ],
)
def test_attention_dropout_is_refused_by_its_key(name: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError) as raised:
        probe(name, **changes)
    assert told in str(raised.value)


def test_other_dropout_is_none_of_attentions() -> None:
    probe("gpt2", resid_pdrop=0.2, embd_pdrop=0.1)


LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "partial_rotary_factor": 1.0,
    }
}  # fmt: skip


def test_longrope_is_refused_where_ranks_would_choose_different_tables() -> None:
    # Two ranks of a ring have rows 0 .. 5, 18 .. 23 and 6 .. 17 of 24: both know of more than 16 positions.
    probe("phi3", **LONGROPE)
    probe("phi3", slices=ContextSlices(16, ring=2), has_documents=True, **LONGROPE)
    with pytest.raises(ModelError, match=r"where batch.context=24 is more, a rank has fewer .*Set batch.context=16"):
        probe("phi3", slices=ContextSlices(24, ulysses=2), **LONGROPE)
    with pytest.raises(ModelError, match="its documents have fewer"):
        probe("phi3", has_documents=True, **LONGROPE)


def test_a_longrope_takes_rows_of_documents_one_by_one() -> None:
    """A short document's logits beside a long one's differ from those alone; the rule refuses what this shows, and no more."""
    config = build_config(family("phi3"), **LONGROPE)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, long, short = torch.randint(0, 90, (2, 24)), torch.arange(24), torch.arange(24) % 8
    with torch.no_grad():
        beside = model(input_ids=ids, position_ids=torch.stack([long, short]), use_cache=False).logits[1]
        alone = model(input_ids=ids[1:], position_ids=short[None], use_cache=False).logits[0]
    assert not torch.allclose(beside, alone, atol=1e-4)

    def ask(*words: str) -> list[Problem]:
        data = ["data=files", "data.sources.files.path=x.jsonl", "data.bpe_vocab=300", "batch.context=24"]
        return list(find_sequence_problems(compose([*data, *words]).require(), config))

    two = "batch.sequences_per_microbatch=2"
    (problem,) = ask("data.pack=documents", two)
    assert (problem.key, problem.value) == ("batch.sequences_per_microbatch", 2)
    assert "more than 16 positions: a row's loss would depend on its neighbours" in problem.message
    assert problem.fix == "batch.sequences_per_microbatch=1; or batch.context=16"
    assert (
        ask("data.pack=documents", two[:-1] + "1")
        == ask("data.pack=documents", two, "batch.context=16")
        == ask(two)
        == []
    )
    recipe = compose(["data.pack=documents", "batch.context=24"]).require()
    rules = ModelRules(make_shape(config, recipe))
    refused = [rules.refuse(Candidate(context=24, sequences=each, ranks_per_node=1)) for each in (1, 2)]
    assert refused[0] is None
    assert "its neighbours" in str(refused[1])


def test_llama4s_temperature_is_that_of_the_rows_in_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    probe("llama4_text", floor_scale=3)
    rule = QUERY_RULES["Llama4TextAttention"]

    def forget_rows(module: Any, query: torch.Tensor, documents: Any, hook: Hook) -> Any:
        return query, rule(module, query, documents, hook)[1]

    monkeypatch.setattr(hook, "QUERY_RULES", {"Llama4TextAttention": forget_rows})
    with pytest.raises(ModelError, match="does not go by position_ids"):
        probe("llama4_text", floor_scale=3)


@pytest.mark.parametrize(
    "name", ["llama", "diffllama", pytest.param("gptj", marks=needs_newer_transformers), "longcat_flash"]
)
def test_every_attention_of_a_model_finds_its_hook(name: str) -> None:
    model = AutoModelForCausalLM.from_config(build_config(family(name), use_cache=False))
    calls: list[tuple[int, ...]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
        calls.append(tuple(q.shape))
        return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    found = len(list(find_attentions(model)))
    hook_attentions(model, lambda: Hook(attend, lambda device: torch.arange(6, device=device), WHOLE))
    model(input_ids=torch.zeros(2, 6, dtype=torch.int64))
    layers = model.config.num_hidden_layers
    assert len(calls) == (2 * layers if name == "diffllama" else layers)
    assert found == layers
    assert model.config._attn_implementation == IMPLEMENTATION


def test_a_mask_that_the_stage_did_not_pass_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(build_config(family("llama"), use_cache=False))
    hook_attentions(model, lambda: Hook(lambda *_: torch.zeros(()), lambda device: torch.arange(6), WHOLE))
    with pytest.raises(ModelError, match=r"LlamaAttention computes an attention mask of its own, bool \[1, 1, 6, 6\]"):
        model(input_ids=torch.zeros(1, 6, dtype=torch.int64), attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))


def test_a_tensor_that_our_attention_does_not_know_is_refused() -> None:
    """MiniMax M3 chooses blocks of keys, of which the small copy's sequences had one: it passed, and trained on all keys."""
    config = build_config(family("llama"), use_cache=False)
    model = AutoModelForCausalLM.from_config(config)
    hook_attentions(model, lambda: Hook(lambda *_: torch.zeros(()), lambda device: torch.arange(6), WHOLE))
    with pytest.raises(ModelError, match="LlamaAttention hands block_indices to its attention function"):
        model(input_ids=torch.zeros(1, 6, dtype=torch.int64), block_indices=torch.zeros(1, 6, dtype=torch.int64))


@pytest.mark.skipif("minimax_m3_vl_text" not in CONFIG_MAPPING, reason="a family of transformers 5.23")
def test_sparse_layers_are_refused_however_long_their_blocks_are() -> None:
    layers = {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]}
    config = AutoConfig.for_model("minimax_m3_vl_text", num_hidden_layers=2, **layers)
    with pytest.raises(ModelError, match="MiniMaxM3VLAttention hands block_indices"):
        refuse_undivided_context(config, ContextSlices(8192, ring=2), has_documents=False)


def test_ulysses_beyond_the_heads_of_a_rank_is_refused_with_the_degrees_that_fit() -> None:
    config = build_config(family("llama"), num_attention_heads=6, hidden_size=48)
    refuse_uneven_heads(layer_configs(config), Parallel(cp=4, context=[2, 2]))
    with pytest.raises(TopologyError) as raised:
        refuse_uneven_heads(layer_configs(config), Parallel(tp=2, cp=4, context=[2, 2]))
    for part in ("Ulysses degree of 2", "3 heads", "num_attention_heads=6 / parallel.tp=2", "parallel.context=[1,4]"):
        assert part in str(raised.value)
