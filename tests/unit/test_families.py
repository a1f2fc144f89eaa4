"""Each tiny family builds on meta and trains on CPU, tied and untied, as a pure function of its input."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import FAMILIES, VOCABULARY, Family, build_config, is_kind
from tests.grid import few_of


@pytest.mark.parametrize("family", few_of(FAMILIES, is_kind), ids=lambda family: family.name)
def test_family_builds_on_meta_and_trains_deterministically(family: Family) -> None:
    config = build_config(family)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    assert {name: p.shape for name, p in model.named_parameters()} == shapes

    tokens = torch.randint(3, VOCABULARY, (2, 13))
    losses = [model(input_ids=tokens, labels=tokens, use_cache=False).loss for _ in range(2)]
    losses[0].backward()

    assert losses[0].isfinite()
    assert torch.equal(losses[0], losses[1]), "dropout or another random draw is left on"
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    without = [name for name, grad in trained.items() if grad is None or not grad.isfinite().all()]
    assert without == []


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "family", few_of(FAMILIES, lambda family: family.name in ("llama", "gpt2")), ids=lambda family: family.name
)
def test_ties_follow_the_config(family: Family, tied: bool) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_config(family, tie_word_embeddings=tied))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied


def test_names_are_unique() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
