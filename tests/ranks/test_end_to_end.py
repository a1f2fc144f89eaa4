"""Whole runs, by the commands that a user types, beside the reference loop; and faults anywhere on the way are seen."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from framework import cli
from framework.errors import EXIT_USER, RecipeError
from framework.recipe.compose import compose
from framework.verify import end_to_end, reference
from framework.verify.compare import ErrorRow
from framework.verify.end_to_end import TOLERANCE, compare_runs
from framework.verify.evidence import NothingToCompare
from framework.verify.prepare import VerifyOptions, prepare
from tests.families import family

ALONE = ("batch.sequences_per_step=3", "batch.sequences_per_microbatch=1")
LAYOUTS = [
    # Three sequences are for one rank, also in the second part: processes of ranks cost ten CPU seconds.
    # By its hashes alone, seed 1 would hold out none of the twelve documents of `texts`.
    ("llama", "data.pack=documents", "optim.name=sgd", "train.seed=1", *ALONE),
    pytest.param(("gemma2", "launch.ranks=2", "parallel.pp=2", "optim.name=lion"), marks=pytest.mark.grid),
    pytest.param(("gpt_oss", "launch.ranks=2", "parallel.tp=2", "optim.schedule.name=wsd"), marks=pytest.mark.grid),
    pytest.param(
        ("qwen3", "launch.ranks=4", "parallel.cp=2", "zero=hsdp", "zero.shard_within=2"), marks=pytest.mark.grid
    ),
    pytest.param(("mixtral", "launch.ranks=2", "parallel.ep=2", "model.expert_capacity=1.0"), marks=pytest.mark.grid),
]


def run(
    tmp_path: Path,
    words: Sequence[str],
    command: end_to_end.Command = cli.main,
) -> list[ErrorRow]:
    name, *overrides = words
    config = tmp_path / "config.json"
    config.write_text(json.dumps(family(name).config))
    recipe = compose(["experiment=quickstart", "launch.ranks=1", "optim.clip_norm=0.5", *overrides]).require()
    return compare_runs(prepare(recipe, VerifyOptions(config, dtype="fp64", steps=2)).sides, command)


@pytest.mark.parametrize("words", LAYOUTS, ids=lambda words: words[0])
def test_a_run_from_text_to_export_is_the_references(words: Sequence[str], tmp_path: Path) -> None:
    rows = run(tmp_path, words)
    assert {row.quantity: row.where for row in rows if row.error > TOLERANCE} == {}


@pytest.mark.grid
@pytest.mark.parametrize(
    ("fault", "sees"),
    [
        (("train.seed=8",), {"loss"}),
        (("batch.context=13",), {"loss"}),
        (("optim.lr=2e-3",), {"learning rate"}),
        (("data.validation=0.3",), {"validation loss"}),
        (("optim.clip_norm=0.4",), {"exported weight"}),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_another_run_is_seen(fault: Sequence[str], sees: set[str], tmp_path: Path) -> None:
    def other(words: Sequence[str]) -> int:
        changed = [each for each in words if not each.startswith(fault[0].partition("=")[0])]
        return cli.main([*changed, *fault] if words[0] == "train" and "~model" in words else words)

    rows = run(tmp_path, ("llama", *ALONE), other)
    assert sees <= {row.quantity for row in rows if row.error > TOLERANCE}


@pytest.mark.parametrize(
    ("word", "why"), [("precision.moments=int8", "does not know"), ("adapter=lora", "trains a stock model whole")]
)
def test_what_the_reference_does_not_know_is_refused(word: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=why):
        run(tmp_path, ("llama", word))


@pytest.mark.grid
def test_signs_that_rounding_decides_are_told(tmp_path: Path) -> None:
    """Without rope the gradient of a key's bias is zero up to rounding, so that a difference may be rounding's. Here another rate
    makes it."""

    def other(words: Sequence[str]) -> int:
        return cli.main([each for each in words if not each.startswith("optim.lr")])

    with pytest.raises(NothingToCompare, match="rounding decides the sign of"):
        run(tmp_path, ("opt", "optim.name=lion", "optim.lr=1e-2", *ALONE), other)


def test_the_option_reaches_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--end-to-end", "--bf16", "experiment=quickstart"]) == EXIT_USER
    assert "--end-to-end compares on CPUs in fp64" in capsys.readouterr().err


def test_the_blend_gives_each_source_its_share_at_every_point() -> None:
    slots = reference._blend([0.7, 0.3])
    assert (slots.count(0), slots.count(1)) == (7, 3)
    for end in range(1, 11):
        assert abs(slots[:end].count(0) - 0.7 * end) < 1


@pytest.mark.parametrize("size", [1, 2, 7, 64, 100])
def test_an_epoch_is_a_permutation(size: int) -> None:
    assert sorted(reference._permute(index, size, 12345) for index in range(size)) == list(range(size))
