"""Rank 0 alone looks for the prepared data; what any rank cannot open ends all of them with its words."""

import errno
import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from framework.data import loader as loader_module
from framework.data import prepared
from framework.data.loader import open_data
from framework.data.prepare import prepare
from framework.errors import DataError, MeshwrightError, StorageError
from framework.recipe.schema import Data, Recipe, Source
from tests.ranks.test_comm_collectives import connect_world


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Two prepared sources."""
    place = tmp_path_factory.mktemp("data")
    for number in range(2):
        lines = (json.dumps({"text": f"text {number * index}"}) for index in range(50))
        (place / f"{number}.jsonl").write_text("\n".join(lines))
    sources = {f"s{number}": Source(str(place / f"{number}.jsonl")) for number in range(2)}
    recipe = Recipe(data=Data(sources=sources, root=str(place / "tokens"), bpe_vocab=300, validation=0.1))
    prepare(recipe, workers=1, progress=False)
    return recipe


def open_on_ranks(rank, world, rendezvous, recipe, vocab_size=300, failing=()):
    """(calls that look at sources or read stores' metas, what was opened or the words of the error)."""
    axis = (mesh := connect_world(rank, world, rendezvous)).axis("world")
    looked = []

    def watch(module, name):
        work = getattr(module, name)
        patch.setattr(module, name, lambda *args, **more: (looked.append(name), work(*args, **more))[1])

    def refuse(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.MonkeyPatch.context() as patch:
        watch(prepared, "list_files")
        watch(loader_module, "check_data_fits")
        patch.setattr(prepared.StoreMeta, "read", watched_read(looked, prepared.StoreMeta.read))
        if rank in failing:
            patch.setattr(prepared, "open_stream", refuse)
        try:
            data = open_data(recipe, LlamaConfig(vocab_size=vocab_size), axis)
            outcome = data.fingerprint, [source.streams["train"].read(0, 9).tolist() for source in data.sources]
        except MeshwrightError as error:
            outcome = type(error), str(error)
    mesh.close()
    return looked, outcome


def watched_read(looked, read):
    def watched(folder):
        looked.append("read")
        return read(folder)

    return watched


def test_only_rank_0_looks_at_sources_and_stores(pool, recipe):
    (first, opened), *others = pool.run(3, open_on_ranks, recipe)
    assert first == ["list_files"] * 2 + ["read"] * 2 + ["check_data_fits"]
    expected = prepared.open_found(prepared.find_prepared(recipe))
    assert opened == (
        expected.fingerprint,
        [source.streams["train"].read(0, 9).tolist() for source in expected.sources],
    )
    assert others == [([], opened)] * 2


@pytest.mark.parametrize("mistake", ["not prepared", "does not fit"])
def test_what_rank_0_finds_wrong_is_every_ranks_error(pool, recipe, mistake):
    if mistake == "not prepared":
        other = replace(recipe, data=replace(recipe.data, validation=0.2))
        outcomes = pool.run(2, open_on_ranks, other)
    else:
        outcomes = pool.run(2, open_on_ranks, recipe, 299)
    assert outcomes[0][1] == outcomes[1][1]
    kind, words = outcomes[1][1]
    assert kind is DataError
    assert ("not prepared" if mistake == "not prepared" else "model.config.vocab_size=299") in words


def test_a_rank_that_cannot_open_its_files_ends_all_to_be_tried_again(pool, recipe):
    outcomes = pool.run(3, open_on_ranks, recipe, 300, (1,))
    kinds = {outcome for _, outcome in outcomes}
    assert len(kinds) == 1
    kind, words = kinds.pop()
    assert kind is StorageError
    assert "Too many open files" in words
