"""`scripts/verify_random.py`: sound layouts pass, and the first that does not is told as the command that repeats it."""

import re
import shlex
from typing import Any

import pytest

from framework import cli
from framework.errors import EXIT_DONE, EXIT_FAILED, RecipeError
from framework.verify import sides
from framework.verify.layout import run_rank
from framework.verify.pool import RankPool as AnyRankPool
from scripts import verify_random
from scripts.verify_random import Campaign, run_command, verify_draws
from tests.grid import IN_TURN
from tests.laws.test_sabotage import count_tokens_of_the_rank
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

# What takes long, or is refused by most families, is given.
CHEAP = ("launch.ranks=2", "parallel.cp=1", "model.family=qwen3", "parallel.ep=1", "precision=fp64", "optim.name=adamw",
         "data.pack=documents", "batch.context=9", "parallel.tp=1")  # fmt: skip


def run_broken_rank(rank: int, world: int, rendezvous: str, *args: Any) -> Any:
    """Body: the layout counts the loss tokens of its own rank only, which is wrong where dp > 1."""
    with count_tokens_of_the_rank():
        return run_rank(rank, world, rendezvous, *args)


def test_sound_layouts_are_equal(pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_draws(Campaign(2, seed=0, steps=2, overrides=CHEAP), pool) == EXIT_DONE
    printed = capsys.readouterr().out
    assert re.findall(r"(?m)^ +(\d)  equal .* qwen3, fp64, ranks 2", printed) == ["0", "1"]
    assert re.search(r"(?m)^\d+ draws were refused with an explanation", printed)
    assert "equal: 2 draws of seed 0" in printed


@pytest.mark.grid
def test_the_first_failure_is_told_as_a_command_that_repeats_it(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pipelines are sound, layouts with dp=2 are broken: the first of these is told, the ones before it are equal."""
    with monkeypatch.context() as broken:
        broken.setattr(sides, "run_rank", run_broken_rank)
        assert verify_draws(Campaign(9, seed=3, steps=2, overrides=CHEAP), pool) == EXIT_FAILED
        printed = capsys.readouterr().out
        equal = re.findall(r"(?m)^ +\d+  equal .*$", printed)
        assert equal, "else it would not be the first failure that is shown, but the first draw"
        assert all("pp 2" in line for line in equal)
        assert f"Draw {len(equal)} of seed 3 FAILED" in printed
        assert "loss" in printed
        program, *words = shlex.split(next(line for line in printed.splitlines() if line.startswith("meshwright")))
        assert program == "meshwright"
        assert cli.main(words) == EXIT_FAILED
    assert "MISMATCH" in capsys.readouterr().out
    assert cli.main(words) == EXIT_DONE, "the layout is sound as it is"


def test_a_hang_is_a_failure_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_random, "TIMEOUT_S", 0.01)
    forked = AnyRankPool(4, "tests.ranks.preload")  # which is ended; another first rank of `pool` would import all anew
    # Killed ranks would leave their file of states in this folder.
    words = (*CHEAP, "optim.name=lion", "memory.offload.optimizer=0")
    assert verify_draws(Campaign(1, overrides=words), forked) == EXIT_FAILED
    forked.close()
    printed = capsys.readouterr().out
    assert "hung: not ended after 0.01 s" in printed
    assert "meshwright verify --strict '~model' model.family=qwen3" in printed


def test_what_is_given_and_fits_nothing_is_refused(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_random, "MAX_ATTEMPTS", 3)
    with pytest.raises(RecipeError, match=r"nothing that is drawn fits what is given, .*parallel.tp=3"):
        verify_draws(Campaign(1, overrides=(*CHEAP, "parallel.tp=3")), pool)
    assert "3  launch.ranks: tp * pp * cp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draws", "0"], "at least one draw"),
        (["--draws", "1", "model=gpt2"], "give its family"),
    ],
)
def test_mistakes_are_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(words) == RecipeError.exit_code
    assert message in capsys.readouterr().err
