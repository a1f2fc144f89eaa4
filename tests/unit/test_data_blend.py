"""Shares of sources by weight, by epochs and by temperature."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from framework.commands.check import describe_data
from framework.data.loader import Loader
from framework.data.prepare import prepare
from framework.data.prepared import Prepared
from framework.launch.settle import count_steps
from framework.recipe.check import check_recipe
from framework.recipe.schema import Data, Recipe, Source
from tests.unit.test_data_prepare import make_recipe, make_texts, write_jsonl

TOKENS = {"web": 8_000_000, "code": 1_000_000}


def make_data(temperature: float | None = None, **sources: Any) -> Data:
    return Data({name: Source("p", **values) for name, values in sources.items()}, temperature=temperature)


def test_shares_are_what_was_asked_for() -> None:
    assert make_data(web={}, code={"weight": 0.5}).weigh(TOKENS) == {"web": 1.0, "code": 0.5}
    assert make_data(web={"epochs": 0.5}, code={"epochs": 3}).weigh(TOKENS) == {"web": 4e6, "code": 3e6}
    assert make_data(1.0, web={}, code={}).weigh(TOKENS) == TOKENS
    assert make_data(3.0, web={}, code={"weight": 2}).weigh(TOKENS) == {"web": 200.0, "code": 200.0}
    assert make_data(3.0, web={}, code={"weight": 0}).weigh(TOKENS) == {"web": 200.0}


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (make_data(web={"epochs": 2}, code={}), "data.sources.code.epochs"),
        (make_data(web={"epochs": 2}, code={"epochs": 1, "weight": 3}), "data.sources.code.weight"),
        (make_data(2.0, web={"epochs": 2}, code={"epochs": 1}), "data.temperature"),
    ],
)
def test_what_does_not_go_together_names_the_key(data: Data, key: str) -> None:
    recipe = make_recipe(Path("r"), Path("a"))
    recipe = replace(recipe, batch=replace(recipe.batch, sequences_per_step=4, sequences_per_microbatch=4))
    assert key in [each.key for each in check_recipe(replace(recipe, data=replace(data, bpe_vocab=300)), {})]


def prepare_blend(tmp_path: Path, **changes: Any) -> tuple[Recipe, Prepared]:
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", make_texts(60 * (1 + 3 * n), seed=n)) for n in range(2)]
    recipe = make_recipe(tmp_path / "tokens", *paths)
    named = zip(recipe.data.sources.items(), changes.pop("epochs", (None, None)), strict=True)
    sources = {name: replace(source, epochs=count) for (name, source), count in named}
    recipe = replace(recipe, data=replace(recipe.data, sources=sources, **changes))
    recipe = replace(recipe, batch=replace(recipe.batch, sequences_per_step=4, sequences_per_microbatch=4, context=16))
    return recipe, prepare(recipe, 1, progress=False)


def test_each_source_is_read_as_often_as_its_epochs_say(tmp_path: Path) -> None:
    recipe, prepared = prepare_blend(tmp_path, epochs=(3.0, 1.0))
    recipe = replace(recipe, train=replace(recipe.train, epochs=1.0))
    steps, passes = count_steps(recipe, prepared)
    assert passes == {"s0": pytest.approx(3, rel=0.02), "s1": pytest.approx(1, rel=0.02)}
    assert "s0" in describe_data(recipe) and "%" in describe_data(recipe)  # noqa: PT018
    keys: dict[str, Any] = {
        "seed": 1,
        "context": 16,
        "pack": "concat",
        "sequences_per_microbatch": 4,
        "num_microbatches": 1,
    }
    with Loader(prepared, **keys) as loader, Loader(prepared, **keys) as resumed:
        read = [loader.batch(4 * step)[0] for step in range(steps)]
        again = resumed.batch(4 * (steps // 2))[0]
        size = loader._packer.sizes[0]
    assert sum(int((each.sources == 0).sum()) for each in read) / size == pytest.approx(3, rel=0.02)
    assert again.input_ids.tolist() == read[steps // 2].input_ids.tolist()


def test_temperature_is_of_the_tokens_and_changes_the_fingerprint(tmp_path: Path) -> None:
    recipe, prepared = prepare_blend(tmp_path, temperature=2.0)
    tokens = [source.meta.splits["train"].num_tokens for source in prepared.sources]
    assert [source.weight for source in prepared.sources] == pytest.approx([each**0.5 for each in tokens], rel=1e-5)
    plain = prepare(replace(recipe, data=replace(recipe.data, temperature=None)), 1, progress=False)
    assert [each.folder for each in plain.sources] == [each.folder for each in prepared.sources]
    assert plain.fingerprint != prepared.fingerprint
    assert "prepare" in describe_data(replace(recipe, data=replace(recipe.data, root=str(tmp_path / "none"))))
    assert json.dumps(prepared.sources[0].weight) == repr(prepared.sources[0].weight)
