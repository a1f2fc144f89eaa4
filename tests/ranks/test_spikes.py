"""Spikes from end to end: a spike is said, skipped or rewound alike on all ranks, and a resume changes no bit of it."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from framework.checkpoint.commit import list_checkpoints, step_of
from framework.checkpoint.index import read_manifest
from framework.checkpoint.staging import Entry
from framework.errors import EXIT_DONE, EXIT_NUMERICS
from framework.optim.gradient_noise import average_squares
from framework.track.jsonl import METRICS_FILE, read_records
from framework.track.sample_ledger import find_ledger_problems, read_lineage
from framework.train import rank as train
from framework.train import saves
from framework.train.state import RunState
from framework.train.step import TrainingRun
from tests import tiny_run
from tests.grid import IN_TURN, few_of
from tests.ranks.pool import RankPool
from tests.ranks.spiking_run import (
    BAD,
    FIRST_BAD,
    SEQUENCES,
    STEPS,
    Ended,
    compose_run,
    killing,
    losses_of,
    train_body,
    trained_samples,
)
from tests.unit.test_checksums import flip

pytestmark = IN_TURN

NOTHING = (0, 0)
TARGET = 50  # the newest checkpoint that is MARGIN steps older than the first spike
LEFT_OUT = [[TARGET * SEQUENCES, BAD[1]]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("spikes")
    tiny_run.write_corpus(place / "corpus")
    return place


def folder(place: Path, name: str) -> Path:
    (place / name).mkdir(exist_ok=True)
    return place / name


def in_two(pool: RankPool, place: Path, name: str, words: tuple[str, ...], at: int, world: int = 1) -> dict[int, float]:
    """The losses of a run that is stopped behind step `at` and goes on."""
    run_dir = folder(place, name)
    recipe = compose_run(place, *words)
    short = replace(recipe, train=replace(recipe.train, steps=at))
    for part in (short, recipe):
        ended = pool.run(world, train_body, part, run_dir)
        assert [each.code for each in ended] == [EXIT_DONE] * world
    return losses_of(run_dir)


def never_saw(left_out: list[list[int]]) -> AbstractContextManager[Any]:
    """The run leaves samples out from its beginning."""
    return patch.object(train, "RunState", partial(RunState, skipped_samples=left_out))


def forget_the_range() -> AbstractContextManager[Any]:
    """Sabotage: the run goes back, and trains on the same data again."""
    return patch.object(saves, "leave_out", lambda skipped, first, stop: [list(each) for each in skipped])


@pytest.fixture(scope="module")
def spared(pool: RankPool, place: Path) -> dict[int, float]:
    """The losses of a run that never saw what a rewind leaves out."""
    recipe = compose_run(place, "train.on_spike=rewind")
    (ended,) = pool.run(1, train_body, recipe, folder(place, "spared"), BAD, partial(never_saw, LEFT_OUT))
    assert ended.code == EXIT_DONE
    return losses_of(place / "spared")


@pytest.mark.grid
def test_a_spike_is_said_and_counted_and_changes_nothing_by_default(pool: RankPool, place: Path) -> None:
    run_dir = folder(place, "log")
    (ended,) = pool.run(1, train_body, compose_run(place), run_dir)
    assert ended.code == EXIT_DONE
    state = read_manifest(list_checkpoints(run_dir / "checkpoints")[0]).state
    assert (state["spikes"]["count"], state["skipped_steps"], state["num_updates"]) == (3, 0, STEPS)


@pytest.mark.parametrize("world", few_of([1, 2], lambda world: world == 1))
def test_the_update_of_a_spike_is_not_made_and_saves_and_resumes_do_not_matter(
    pool: RankPool, place: Path, world: int
) -> None:
    words = ("train.on_spike=skip", "zero.stage=2", f"launch.ranks={world}")
    whole = folder(place, f"skip-{world}")
    ended = pool.run(world, train_body, compose_run(place, *words), whole)
    assert [each.code for each in ended] == [EXIT_DONE] * world
    state = read_manifest(list_checkpoints(whole / "checkpoints")[0]).state
    assert (state["spikes"]["count"], state["skipped_steps"], state["num_updates"]) == (3, 3, STEPS - 3)
    norms = [each["gradient_norm"] for each in read_records(whole / METRICS_FILE)]
    del norms[FIRST_BAD - 1 : FIRST_BAD + 2]
    squares: float | None = None
    for updates, norm in enumerate(norms):
        squares = average_squares(squares, min(norm, 1.0), 0.9, updates)
    assert state["squared_norms"] == pytest.approx(squares, rel=1e-12)
    # Between the spikes: their own values are in the checkpoint, and in a window of the uninterrupted run one step later.
    assert in_two(pool, place, f"skip-in-two-{world}", words, FIRST_BAD + 1, world) == losses_of(whole)


def check_rewound(run_dir: Path, ended: list[Ended], spared: dict[int, float]) -> None:
    state = read_manifest(list_checkpoints(run_dir / "checkpoints")[0]).state
    assert (state["skipped_samples"], state["samples"]) == (LEFT_OUT, STEPS * SEQUENCES)
    assert losses_of(run_dir) == spared
    trained = [index for _, indices in sorted(trained_samples(ended).items()) for index in indices]
    first, stop = LEFT_OUT[0]
    assert trained == [g for g in range(STEPS * SEQUENCES + stop - first) if not first <= g < stop]


def test_a_rewound_run_is_bitwise_the_run_that_never_saw_the_data(
    pool: RankPool, place: Path, spared: dict[int, float]
) -> None:
    """Its ledger has every sample but those once; the checkpoints behind the rewind have lost their names."""
    run_dir = folder(place, "rewound")
    recipe = compose_run(place, "train.on_spike=rewind", "track.sample_ledger=true")
    ended = pool.run(1, train_body, recipe, run_dir)
    assert [each.code for each in ended] == [EXIT_DONE]
    check_rewound(run_dir, ended, spared)
    lineage = read_lineage(run_dir)
    assert lineage.cursors == (0, TARGET * SEQUENCES)
    assert find_ledger_problems(lineage, STEPS * SEQUENCES, skipped=LEFT_OUT) == []
    assert (run_dir / "checkpoints" / f"step-{FIRST_BAD - 1:08d}.rewound").is_dir()
    assert read_manifest(run_dir / "checkpoints" / f"step-{TARGET:08d}").state["rewinds"] == 1


POINTS = ("framework.train.saves._retire", "framework.train.saves._record", "framework.checkpoint.folder.os.replace")


@pytest.mark.grid
@pytest.mark.parametrize("point", POINTS)
def test_a_rewind_that_is_killed_on_its_way_ends_in_the_same_bits(
    pool: RankPool, place: Path, spared: dict[int, float], point: str
) -> None:
    run_dir, recipe = folder(place, point), compose_run(place, "train.on_spike=rewind")
    (first,) = pool.run(1, train_body, recipe, run_dir, BAD, killing(point))
    assert first.message == point
    (second,) = pool.run(1, train_body, recipe, run_dir)
    assert second.code == EXIT_DONE
    check_rewound(run_dir, [replace(second, ledger=first.ledger + second.ledger)], spared)


@pytest.mark.grid
def test_a_rewound_run_goes_on_on_another_layout_with_the_samples_that_are_left(
    pool: RankPool, place: Path, spared: dict[int, float]
) -> None:
    run_dir, words = folder(place, "two"), ("train.on_spike=rewind", "launch.ranks=2", "zero.stage=3")
    begun = compose_run(place, *words)
    pool.run(2, train_body, replace(begun, train=replace(begun.train, steps=FIRST_BAD + 3)), run_dir)
    ended = pool.run(1, train_body, compose_run(place, "train.on_spike=rewind"), run_dir)
    assert [each.code for each in ended] == [EXIT_DONE]
    assert losses_of(run_dir) == pytest.approx(spared, rel=1e-5)
    state = read_manifest(list_checkpoints(run_dir / "checkpoints")[0]).state
    assert state["skipped_samples"] == LEFT_OUT


@pytest.mark.grid
def test_sabotaged_a_rewind_that_forgets_the_data_range_is_noticed(pool: RankPool, place: Path) -> None:
    """It meets the same spikes until nothing is old enough to go back to."""
    run_dir = folder(place, "forgetful")
    recipe = compose_run(place, "train.on_spike=rewind", "train.max_rewinds=2")
    (ended,) = pool.run(1, train_body, recipe, run_dir, BAD, forget_the_range)
    assert ended.code == EXIT_NUMERICS
    assert "train.max_rewinds=2" in ended.message
    assert read_manifest(list_checkpoints(run_dir / "checkpoints")[-1]).state["skipped_samples"] == []


@pytest.mark.parametrize(
    ("words", "why"),
    few_of(
        [
            (("train.max_rewinds=0",), "train.max_rewinds=0"),
            (("checkpoint.keep=1",), "no checkpoint of step 51 or before"),
        ],
        lambda words, _: words == ("train.max_rewinds=0",),
    ),
)
def test_a_run_that_cannot_go_back_ends_with_88_and_says_why(
    pool: RankPool, place: Path, words: tuple[str, ...], why: str
) -> None:
    run_dir = folder(place, words[0])
    (ended,) = pool.run(1, train_body, compose_run(place, "train.on_spike=rewind", *words), run_dir)
    assert ended.code == EXIT_NUMERICS
    assert why in ended.message
    assert step_of(list_checkpoints(run_dir / "checkpoints")[0]) == FIRST_BAD - 1


@pytest.mark.grid
def test_a_rewind_past_damaged_checkpoints_does_not_go_over_a_border(pool: RankPool, place: Path) -> None:
    run_dir = folder(place, "border")
    stages = ("train.stages.first.until_step=45", "train.stages.second.optim.lr=0.002")
    recipe = compose_run(place, "train.on_spike=rewind", *stages)
    (ended,) = pool.run(1, train_body, replace(recipe, train=replace(recipe.train, steps=60)), run_dir)
    assert ended.code == EXIT_DONE
    [damaged] = [each for each in list_checkpoints(run_dir / "checkpoints") if step_of(each) == TARGET]
    flip(max((each for each in damaged.rglob("*") if each.is_file()), key=lambda file: file.stat().st_size), -100)
    (ended,) = pool.run(1, train_body, recipe, run_dir)
    assert ended.code == EXIT_NUMERICS
    assert "over the border of a stage: step 45 ends the stage before" in ended.message


# --- a checkpoint whose values are finite, and whose losses are not


def save_huge_weights() -> AbstractContextManager[Any]:
    """As where memory was faulty between the update and the hashes of the second save: every value is finite, no loss is."""
    whole, calls = saves.saved_entries, count()

    def huge(run: TrainingRun) -> list[Entry]:
        factor = 1e30 if next(calls) == 1 else 1.0
        entries = list(whole(run))
        return [replace(each, data=each.data * factor) if each.name.startswith("weight/") else each for each in entries]

    return patch.object(saves, "saved_entries", huge)


@pytest.mark.grid
def test_a_checkpoint_that_makes_every_loss_nan_ends_the_run_however_often_it_starts(
    pool: RankPool, place: Path
) -> None:
    run_dir = folder(place, "huge")

    def go_on(steps: int, *patches: Any) -> Ended:
        recipe = compose_run(place, f"train.steps={steps}", "checkpoint.every_steps=5")
        (ended,) = pool.run(1, train_body, recipe, run_dir, NOTHING, *patches)
        return ended

    assert go_on(10, save_huge_weights).code == EXIT_DONE
    assert go_on(18).code == EXIT_DONE  # as where a job is preempted after a few steps
    ended = go_on(70)
    assert ended.code == EXIT_NUMERICS
    assert "in 20 steps in a row, the last one step 30" in ended.message
    assert "move the checkpoints of step 10 and later" in ended.message
    paths = {step_of(path): path for path in list_checkpoints(run_dir / "checkpoints")}
    assert sorted(paths) == [5, 10, 18], "none was saved that could take the place of an older one"
    for step in (10, 18):
        paths[step].rename(place / f"moved-{step}")
    assert go_on(12).code == EXIT_DONE
    assert list(losses_of(run_dir)) == list(range(1, 13))
    assert all(map(isfinite, losses_of(run_dir).values()))
