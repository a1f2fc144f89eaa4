"""Forms of families beside Llama's: where stages are cut, which modules make a region, and which keys a sparse attention sees."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from framework.errors import ModelError
from framework.model.load import build_meta
from framework.model.probe import find_layer_calls
from framework.model.shrink import shrink
from framework.model.stage import PassThrough, refuse_following_starts
from framework.model.units import find_last_module, find_layers, find_units
from framework.parallel.attention import find_whole, probe_causes
from framework.parallel.attention.block_attention import AttentionBlock, BlockAttention
from framework.parallel.attention.hook import GatheredKeys, find_visible
from framework.parallel.attention.kernels import Heads, Result
from framework.parallel.attention.visible_rows import Documents, Scores
from framework.parallel.tensor.find_regions import RegionPlan, find_regions
from framework.parallel.tensor.partition import count_heads
from framework.recipe.schema import Data, Recipe


def small(model_type: str, **values: Any) -> PreTrainedModel:
    return build_meta(shrink(AutoConfig.for_model(model_type, **values)))


def regions_of(model: PreTrainedModel, **user: str) -> list[RegionPlan]:
    return find_regions(model, user, [name for name, _ in model.named_modules()])


def test_a_norm_of_the_embedding_registered_behind_the_layers_is_the_embeddings() -> None:
    embedding, *_, head = find_units(small("bart"))
    assert "model.decoder.layernorm_embedding" in embedding.modules
    assert "model.decoder.layernorm_embedding" not in head.modules


def test_the_final_norm_is_told_by_the_code_where_names_say_otherwise() -> None:
    model = small("bigbird_pegasus", is_decoder=True, is_encoder_decoder=False)
    assert "model.decoder.layernorm_embedding" in find_units(model)[-1].modules
    assert find_last_module(model) is model.get_submodule("model.decoder.layernorm_embedding")


def test_a_head_of_several_modules_is_one_unit_wherever_it_is_registered() -> None:
    head = find_units(small("camembert", is_decoder=True))[-1]
    assert {"lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"} <= set(head.modules)


def test_a_stand_in_has_its_layers_words_and_as_many_values() -> None:
    class Layer(nn.Module):
        kind = "full"

        def __init__(self) -> None:
            super().__init__()
            self.index, self.weight = 3, nn.Parameter(torch.ones(1))

    stand_in = PassThrough(2, Layer())
    assert (stand_in.kind, stand_in.index) == ("full", 3)
    assert not list(stand_in.parameters())
    assert stand_in(7) == (7, None)


@pytest.mark.parametrize(("model_type", "outputs"), [("mamba", 0), ("nemotron_h", 0), ("glm_moe_dsa", 2)])
def test_families_whose_models_look_at_other_stages_modules_are_cut(model_type: str, outputs: int) -> None:
    assert find_layer_calls(AutoConfig.for_model(model_type)).num_outputs == outputs


def test_no_stage_begins_with_a_layer_that_takes_anothers_keys() -> None:
    model = small("glm_moe_dsa")
    found = find_layers(model)
    assert found is not None
    layers: Any = found[1]
    layers[2].self_attn.skip_topk = True
    refuse_following_starts(model.config, model, find_units(model), [1])
    with pytest.raises(ModelError, match=r"cannot begin at layer 2, .*an indexer has chosen.*pipeline\.layers.*\[1\]"):
        refuse_following_starts(model.config, model, find_units(model), [2])


def test_berts_regions_end_in_the_module_that_follows() -> None:
    attention, mlp = regions_of(small("bert", is_decoder=True))[:2]
    assert attention.name == "bert.encoder.layer.0.attention.self"
    assert attention.roles["bert.encoder.layer.0.attention.output.dense"].kind == "row"
    assert mlp.name == "bert.encoder.layer.0.intermediate.dense"
    assert mlp.roles[mlp.name].kind == "column"
    assert mlp.roles["bert.encoder.layer.0.output.dense"].kind == "row"


def test_an_indexer_is_the_same_on_all_ranks() -> None:
    attention = regions_of(small("deepseek_v32"))[0]
    inside = {name: role for name, role in attention.roles.items() if ".indexer." in name}
    assert len(inside) == 4
    assert {role.kind for role in inside.values()} == {"replicated"}


def test_an_indexers_heads_are_none_of_its_attention() -> None:
    model = small("deepseek_v32", index_n_heads=32)
    counts = count_heads(model, regions_of(model)[0])
    assert counts.q == model.config.num_attention_heads < 32


def test_modules_outside_of_regions_are_named_by_the_user_too() -> None:
    model = small("llama")
    assert len(regions_of(model)) == 6
    assert len(regions_of(model, **{"*.mlp": "outside"})) == 3


def test_experts_beside_their_router_are_not_sliced() -> None:
    moe = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704}
    with pytest.raises(ModelError, match=r"layers\.0\.experts: .*use parallel\.expert_tp=1"):
        regions_of(small("gemma4_text", **moe))


def test_a_norm_of_a_mixtures_output_wants_whole_experts() -> None:
    model = small("axk1")
    with pytest.raises(
        ModelError, match=r"mlp: a module of the mixture computes with its output.*parallel\.expert_tp=1"
    ):
        regions_of(model)
    names = [name for name, _ in model.named_modules()]
    assert not any(
        "norm" in role for each in find_regions(model, {}, names, True) for role in each.roles if "mlp" in role
    )


def test_an_indexer_chooses_among_the_keys_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("deepseek_v32")
    assert not probe_causes(config, has_documents=True)
    update = GatheredKeys.update_indexer
    monkeypatch.setattr(GatheredKeys, "update_indexer", lambda self, *given: update(self, *given).roll(1, 1))
    assert probe_causes(config, has_documents=True)


def test_a_model_that_counts_positions_itself_gets_the_tokens_of_all_ranks() -> None:
    config = AutoConfig.for_model("bart")
    assert probe_causes(config, has_documents=False)
    # Nobody tells it where documents begin, either.
    found = {pack: find_whole(config, Recipe(data=Data(pack=pack))) for pack in ("concat", "documents")}
    assert found == {"concat": {"BartAttention"}, "documents": frozenset()}


def test_chosen_keys_are_all_that_queries_see() -> None:
    """Forward and backward beside a softmax over a dense mask, in tiles of which many have no chosen key."""
    torch.manual_seed(0)
    B, H, S, D, k = 2, 3, 40, 8, 5
    q, key, value = (torch.randn(B, H, S, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    documents = Documents(((0, 17),), S)
    visible = find_visible(documents, torch.arange(S))
    chosen = torch.rand(B, S, S).masked_fill(~visible, -1).topk(k).indices.int()
    seen = torch.zeros(B, S, S, dtype=torch.bool).scatter(-1, chosen.long(), True) & visible
    gradient = torch.randn(B, H, S, D, dtype=torch.float64)
    scores = (q @ key.mT * 0.3).masked_fill(~seen[:, None], float("-inf"))
    expected = scores.softmax(-1) @ value
    expected.backward(gradient)

    heads, attention = Heads(q.detach(), key.detach(), value.detach()), BlockAttention(tile=8)
    block = AttentionBlock(heads, (0, S), (0, S), Scores(0.3), documents.choosing(chosen), chosen)
    found = attention.forward(block)
    assert found is not None
    torch.testing.assert_close(found[0], expected.detach(), rtol=0, atol=1e-12)
    gradients = attention.backward(block, Result(*found, gradient))
    assert gradients is not None
    wanted: list[Tensor | None] = [q.grad, key.grad, value.grad]
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
