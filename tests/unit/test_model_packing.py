"""Packed documents train as they would alone, in every family that is said to keep them apart, and in no other."""

from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from framework.comm.connect import connect
from framework.data.pack import Microbatch, cut_context
from framework.data.prepare import prepare
from framework.errors import ModelError, RecipeError
from framework.mesh.token_layout import ContextSlices
from framework.mesh.topology import Topology
from framework.model.loss import IGNORE
from framework.model.probe import keeps_documents_apart
from framework.parallel.attention import find_stock_attention
from framework.plan.plan import make_plan
from framework.recipe.schema import Data, Model, Recipe, Source
from framework.train.build import build
from framework.train.rank import train_rank
from framework.train.step import train_step
from framework.verify.compare import compare
from framework.verify.evidence import Evidence, keep_double
from framework.verify.layout import gather_full, owned_gradients
from tests.families import FAMILIES, VOCABULARY, Family, build_config, is_kind, skip_without_initial_values
from tests.families import family as find_family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, small_recipe, worst_error

pytestmark = IN_TURN

# One longer than a sliding window of 5, one not longer than it.
LENGTHS = (5, 9, 3)
PLAIN = small_recipe("fp64", world=1)
RECIPE = replace(PLAIN, batch=replace(PLAIN.batch, context=sum(LENGTHS)), data=replace(PLAIN.data, pack="documents"))


def draw_documents() -> list[Microbatch]:
    """Random documents, a microbatch each, padded to the length of all of them; nothing is predicted from a document's last
    token, nor from padding."""
    generator = torch.Generator().manual_seed(3)
    documents = []
    for length in LENGTHS:
        tokens, labels = torch.randint(3, VOCABULARY, (2, 1, sum(LENGTHS)), generator=generator).unbind()
        labels[0, length - 1 :] = IGNORE
        documents.append(Microbatch(tokens, labels, None))
    return documents


def pack(documents: list[Microbatch]) -> Microbatch:
    alone = list(zip(documents, LENGTHS, strict=True))
    packed = Microbatch(
        torch.cat([each.input_ids[:, :length] for each, length in alone], dim=1),
        torch.cat([each.labels[:, :length] for each, length in alone], dim=1),
        torch.cat([torch.arange(length)[None] for length in LENGTHS], dim=1),
    )
    return cut_context(packed, ContextSlices(sum(LENGTHS)))


def train_once(family: Family, microbatches: list[Microbatch]) -> Evidence:
    """Loss, norm and gradients of one step in fp64."""
    mesh = connect(Topology(), CPU)
    run = build(make_plan(RECIPE, build_config(family, use_cache=False)), mesh)
    with keep_double(torch.float64):
        values = train_step(run, microbatches, step=0, lr=0.0).read()
    loss, norm = values.loss, values.gradient_norm
    return Evidence((loss,), (norm,), gather_full(owned_gradients(run), mesh.axis("world")), {"none": torch.zeros(1)})


def packed_recipe(tmp_path: Path, family: Family) -> Recipe:
    """A recipe that packs the documents of a folder, prepared."""
    (tmp_path / "text").mkdir()
    for index in range(40):
        (tmp_path / "text" / f"{index}.txt").write_text(f"document {index} has few words " * 4)
    sources = {"text": Source(path=str(tmp_path / "text"))}
    data = Data(sources, root=str(tmp_path / "tokens"), bpe_vocab=260, pack="documents", validation=0.2)
    values = {name: value for name, value in family.config.items() if name != "model_type"} | {"vocab_size": 260}
    recipe = replace(small_recipe("fp32", world=1), data=data, model=Model(family.config["model_type"], values))
    prepare(recipe, workers=1, progress=False)
    return recipe


def test_a_model_that_mixes_documents_up_is_refused_before_training(tmp_path: Path) -> None:
    recipe = packed_recipe(tmp_path, find_family("gpt_oss"))
    recipe = replace(recipe, model=replace(recipe.model, attention="eager"))
    with pytest.raises(RecipeError, match="documents that share a row see one another"):
        train_rank(recipe, tmp_path / "run")


@pytest.mark.parametrize("family", ["roberta", "reformer"])
def test_a_model_that_runs_on_more_than_token_ids_is_refused(family: str) -> None:
    """roberta counts its positions from tokens that are no padding, and has no padding id here; reformer is not even built."""
    with pytest.raises(
        ModelError, match=f"small {family} model (does not run on token ids and positions alone|cannot be built)"
    ):
        keeps_documents_apart(AutoConfig.for_model(family, pad_token_id=None))


@pytest.mark.parametrize("family", few_of(FAMILIES, is_kind), ids=attrgetter("name"))
def test_packed_documents_train_as_alone_where_they_are_said_to_stay_apart(family: Family) -> None:
    skip_without_initial_values(family.name)
    documents = draw_documents()
    error = worst_error(compare(train_once(family, [pack(documents)]), train_once(family, documents)))
    config = build_config(family)
    if find_stock_attention(config, RECIPE) is None or keeps_documents_apart(config):
        assert error < 1e-9
    else:
        assert error > 1e-3
