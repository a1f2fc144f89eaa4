"""Runs in stages: equal to the same stages done by hand as branches, also where a run is killed."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from framework.checkpoint.commit import list_checkpoints, locate, newest_checkpoint, step_of
from framework.checkpoint.load import Reader
from framework.checkpoint.staging import Entry
from framework.cli import main
from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER
from framework.launch.directory import RunDirectory
from framework.mesh.layout import Layout
from framework.optim.disk_file import MEMORY_FILE_SYSTEMS, file_system_of
from framework.recipe.compose import load_recipe
from framework.track.jsonl import METRICS_FILE, read_records
from framework.train import rank
from framework.train.saves import Saves
from tests import tiny_run
from tests.faults.test_branches import weights
from tests.grid import IN_TURN, few_of
from tests.unit.test_checkpoint_newest import flip

pytestmark = IN_TURN

RECIPE = (
    *tiny_run.RECIPE,
    "train.steps=9",
    "checkpoint.every_steps=2",
    "checkpoint.keep=9",
    "batch.sequences_per_step=4",
    "batch.sequences_per_microbatch=1",
    "optim.schedule.warmup_steps=1",
    "data.sources.more.path=more",
)
# A longer context with another mixture; then a larger batch, frozen embeddings and a decay of its own.
STAGES = (
    "train.stages.short.until_share=0.34",
    "train.stages.long.until_tokens=576",
    "train.stages.long.batch.context=32",
    "train.stages.long.data.sources.more.weight=3",
    "train.stages.long.model.config.rope_parameters={rope_type: default, rope_theta: 50000.0}",
    "train.stages.long.optim.lr=1e-4",
    "train.stages.decay.data.sources.more.weight=1",
    "train.stages.decay.batch.sequences_per_step=8",
    "train.stages.decay.model.freeze=[embed]",
    "train.stages.decay.optim.schedule={name: wsd, decay_shape: sqrt, decay_steps: 2, warmup_steps: 0}",
)
BY_HAND = (
    ("train.steps=3", "optim.schedule.stop_step=9"),
    (
        *("train.steps=6", "batch.context=32", "data.sources.more.weight=3", "optim.lr=1e-4"),
        "model.config.rope_parameters={rope_type: default, rope_theta: 50000.0}",
    ),
    (
        "train.steps=9",
        "data.sources.more.weight=1",
        "batch.sequences_per_step=8",
        "model.freeze=[embed]",
        "optim.schedule={name: wsd, decay_shape: sqrt, decay_steps: 2, warmup_steps: 0, start_step: 6, stop_step: 9}",
    ),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `runs/staged`."""
    place = tmp_path_factory.mktemp("stages")
    tiny_run.write_corpus(place / "corpus")
    tiny_run.write_corpus(place / "more")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", *RECIPE, *STAGES, "run.id=staged"]) == EXIT_DONE
    return place


def curve(run: str) -> list[tuple[float, ...]]:
    return [
        (each["step"], each["tokens"], each["samples"], each["loss"], each["lr"])
        for each in read_records(Path("runs", run, METRICS_FILE))
    ]


def test_a_run_in_stages_is_the_same_stages_by_hand(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert main(["train", *RECIPE, *BY_HAND[0], "run.id=hand-0"]) == EXIT_DONE
    for number, words in enumerate(BY_HAND[1:], 1):
        assert main(["train", f"run.start_from=hand-{number - 1}", f"run.id=hand-{number}", *words]) == EXIT_DONE
    assert weights(Path("runs/hand-2")) == weights(Path("runs/staged"))
    assert len(weights(Path("runs/staged"))) == 2
    assert curve("hand-2") == curve("staged")
    tokens = [each[1] for each in curve("staged")]
    assert tokens == [64, 128, 192, 320, 448, 576, 832, 1088, 1344]
    newest = newest_checkpoint(RunDirectory(Path("runs/staged")).checkpoints)
    assert newest is not None
    # Of the long stage's 12 samples: the stage behind it goes on in each source. The first stage had samples of another length.
    state = Reader(newest).manifest.state
    assert state["read"] == {"files": 3, "more": 9}
    # Losses of other data and norms of another batch do not say what a spike is.
    assert [step for step, *_ in state["spikes"]["seen"]] == [7, 8, 9]
    info = json.loads(Path("runs/staged/run_info.json").read_text())
    assert info["stages"] == {"short": 0, "long": 3, "decay": 6}


# Context, batch, rope and mixture, in three parts of one, two and one step.
ROPE = "model.config.rope_parameters={{rope_type: default, rope_theta: {}.0}}"
RAMP = (
    ROPE.format(10_000),
    "train.stages.short.until_step=2",
    "train.stages.grow={until_step: 6, ramp: 2, batch: {context: 32, sequences_per_step: 8}}",
    f"train.stages.grow.{ROPE.format(50_000)}",
    "train.stages.grow.data.sources.more.weight=2.0",
    "train.stages.rest.optim.lr=1e-4",
)
SPELLED_OUT = (
    ROPE.format(10_000),
    "train.stages.short.until_step=2",
    "train.stages.first={until_step: 5, batch: {context: 24, sequences_per_step: 6}}",
    f"train.stages.first.{ROPE.format(30_000)}",
    "train.stages.first.data.sources.more.weight=1.5",
    "train.stages.second={until_step: 6, batch: {context: 32, sequences_per_step: 8}}",
    f"train.stages.second.{ROPE.format(50_000)}",
    "train.stages.second.data.sources.more.weight=2.0",
    "train.stages.rest.optim.lr=1e-4",
)


@pytest.mark.grid
def test_a_ramp_is_its_stages_by_hand_also_where_it_is_killed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert main(["train", *RECIPE, *SPELLED_OUT, "run.id=spelled"]) == EXIT_DONE
    words = [*RECIPE, *RAMP, "run.id=ramped", "checkpoint.every_steps=1"]
    for mark in ("stage grow_1:", "step 5/", "stage rest:"):
        assert train(*words, until=mark) is None
    assert main(["train", *words]) == EXIT_DONE
    assert weights(Path("runs/ramped")) == weights(Path("runs/spelled"))
    assert curve("ramped") == curve("spelled")


@pytest.mark.grid
def test_borders_are_steps_that_more_steps_do_not_move(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    stages = load_recipe(Path("runs/staged/recipe.yaml")).train.stages
    assert [(each.until_step, each.until_share, each.until_tokens) for each in stages.values()] == [
        (3, None, None),
        (6, None, None),
        (None, None, None),
    ]
    assert main(["train", *RECIPE, *STAGES, "run.id=longer", "train.steps=9"]) == EXIT_DONE
    assert (
        main(["train", *RECIPE, *STAGES, "run.id=longer", "train.steps=9", "train.stages.long.until_step=7"])
        == EXIT_USER
    )
    assert main(["train", "run.id=longer", "train.steps=10"]) == EXIT_DONE
    assert curve("longer")[:9] == curve("staged")
    assert curve("longer")[9][1] == 1344 + 256


@pytest.mark.grid
def test_a_branch_of_a_staged_run_goes_on_within_its_stage(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for step in (4, 6):
        assert main(["train", f"run.start_from=staged@{step}", f"run.id=from-{step}"]) == EXIT_DONE
        assert weights(Path(f"runs/from-{step}")) == weights(Path("runs/staged"))


@pytest.mark.grid
@pytest.mark.parametrize("layout", [["launch.ranks=2", "zero.stage=2"], ["launch.ranks=2", "parallel.tp=2"]])
def test_a_resume_and_a_branch_in_another_layout(
    place: Path, monkeypatch: pytest.MonkeyPatch, layout: list[str]
) -> None:
    monkeypatch.chdir(place)
    run_id = f"run.id={layout[1].replace('=', '-')}"
    in_64 = ("precision.compute=fp64", "precision.master=fp64", "precision.reduce=fp64")
    if not Path("runs/whole").exists():
        assert main(["train", *RECIPE, *STAGES, *in_64, "run.id=whole"]) == EXIT_DONE
    assert train(*RECIPE, *STAGES, *in_64, run_id, until="step 5/") is None
    assert main(["train", run_id, *layout]) == EXIT_DONE
    assert main(["train", "run.start_from=whole@6", f"{run_id}-branch", *layout]) == EXIT_DONE
    for run in (run_id.partition("=")[2], f"{run_id.partition('=')[2]}-branch"):
        for own, other in zip(curve(run), curve("whole"), strict=True):
            assert own == pytest.approx(other, rel=1e-9)


def train(*words: str, until: str) -> int | None:
    """Train in a process of its own, killed at the first line that begins so; the exit code of one that has ended before."""
    command = [sys.executable, "-m", "framework", "train", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    is_met = any(line.startswith(until) for line in process.stdout)
    if is_met:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return None if is_met else process.returncode


@pytest.mark.grid
def test_twenty_kills_across_borders(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills while a stage is built, restored and begun, behind its first step, and as the next one begins."""
    monkeypatch.chdir(place)
    draw, names = random.Random(45), ["short"] * 3 + ["long"] * 3 + ["decay"] * 3
    words, step = [*RECIPE, *STAGES, "run.id=killed", "checkpoint.every_steps=1"], 0
    for _ in range(20):
        # A save ends before the next one begins, so two steps behind it is whole.
        behind = f"stage {names[step + 1]}:" if step in (2, 5) else f"step {step + 3}/"
        marks = [f"stage {names[step]}:", "run killed", *[behind] * 2 * (step < 7)]
        assert train(*words, until=draw.choice(marks)) is None
        newest = newest_checkpoint(RunDirectory(Path("runs/killed")).checkpoints)
        step = Reader(newest).manifest.step if isinstance(newest, Path) else 0
    assert step >= 6
    assert main(["train", *words]) == EXIT_DONE
    assert weights(Path("runs/killed")) == weights(Path("runs/staged"))
    assert curve("killed") == curve("staged")


def test_averages_of_the_rest_outlive_a_thaw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run.write_corpus(tmp_path / "corpus")
    stages = ("train.stages.cold={until_step: 2, model: {freeze: [embed]}}", "train.stages.warm.model.freeze=[]")
    words = (*tiny_run.RECIPE, *stages, "train.steps=3", "train.ema=0.5", "checkpoint.every_steps=1", "optim.lr=0.1")
    assert main(["train", *words, "run.id=thaw"]) == EXIT_DONE

    def read(step: int, name: str) -> torch.Tensor:
        found = locate(RunDirectory(Path("runs/thaw")).checkpoints, step)
        assert found is not None
        reader = Reader(found)
        shape = tuple(reader.manifest.entries[name].shape)
        data = torch.empty(math.prod(shape))
        reader.fill([Entry(name, Layout(shape), data)])
        return data

    for name, before in (("model.norm.weight", "ema"), ("model.embed_tokens.weight", "weight")):
        expected = read(2, f"{before}/{name}").lerp(read(3, f"weight/{name}"), 0.5)
        assert torch.equal(read(3, f"ema/{name}"), expected)
        assert (
            not torch.equal(read(2, f"weight/{name}").lerp(read(3, f"weight/{name}"), 0.5), expected)
            or before == "weight"
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.stages.long.until_step=2", "train.stages.long.until_tokens=null"], "begins behind step 3"),
        (["train.stages.decay.until_step=12"], "ends with step 12 of a run of train.steps=9"),
        (["train.stages.decay.until_step=8"], "trained behind its last step 8"),
        (["train.stages.long.until_tokens=null"], "nothing says when it ends"),
        (["train.stages.long.until_share=0.5"], "stated twice"),
        (["train.stages.long.batch.contexts=8"], "did you mean train.stages.long.batch.context?"),
        (["train.stages.long.model.family=gpt2"], "same in all stages"),
        (["train.stages.long.parallel.tp=2"], "unknown key"),
        (["train.stages.long.batch.sequences_per_step=0"], "train.stages.long.batch.sequences_per_step"),
        (["train.stages.decay.batch.sequences_per_microbatch=3"], "in this stage: not a multiple"),
        (["train.stages.long.model.config.intermediate_size=48"], "a stage keeps the shapes of the run"),
        (["train.stages.long.data.sources.more.weight=0"], "the tokenizer is trained on"),
    ],
)
def test_bad_input(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(place)
    assert main(["train", *RECIPE, *STAGES, "run.id=bad", *words]) == EXIT_USER
    assert said in " ".join(capfd.readouterr().err.split())
    assert not Path("runs/bad").exists()


def test_all_mistakes_of_stages_are_one_list(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    wrong = ["train.stages.long.until_tokens=10", "train.stages.decay.optim.clip=1", "train.stages.short.data.root=x"]
    assert main(["train", *RECIPE, *STAGES, "run.id=bad", *wrong]) == EXIT_USER
    err = capfd.readouterr().err
    for key in ("train.stages.decay.optim.clip", "train.stages.short.data.root"):
        assert key in err
    assert not Path("runs/bad").exists()


def test_a_save_under_way_gets_its_time_whatever_error_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run.write_corpus(tmp_path / "corpus")
    waited: list[Saves] = []

    def abandon(saves: Saves) -> None:
        waited.append(saves)

    monkeypatch.setattr(Saves, "abandon", abandon)
    monkeypatch.setattr(rank, "_train_steps", lambda *arguments: [].pop())  # as a plugin's loss
    assert main(["train", *tiny_run.RECIPE, "train.steps=2", "run.id=failed"]) == EXIT_FAILED
    assert len(waited) == 1


def test_a_thaw_with_states_on_a_disk_is_a_thaw_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if file_system_of(tmp_path) in MEMORY_FILE_SYSTEMS:
        pytest.skip(f"{tmp_path} is memory: such a folder is refused")
    monkeypatch.chdir(tmp_path)
    tiny_run.write_corpus(tmp_path / "corpus")
    stages = ("train.stages.cold={until_step: 1, model: {freeze: [embed]}}", "train.stages.warm.model.freeze=[]")
    words = (*tiny_run.RECIPE, "precision=bf16", *stages, "train.steps=2")
    assert main(["train", *words, "run.id=memory"]) == EXIT_DONE
    (tmp_path / "disk").mkdir()
    away = f"memory.offload={{home: disk, optimizer: 1, disk_path: {tmp_path / 'disk'}}}"
    assert main(["train", *words, away, "run.id=disk"]) == EXIT_DONE
    assert weights(Path("runs/disk")) == weights(Path("runs/memory"))


@pytest.mark.parametrize("newest", few_of((3, 4), lambda newest: newest == 3))
def test_damage_leads_back_over_a_border(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: int) -> None:
    """The newest checkpoint ends a stage, or is of the next one, and the newest whole one has other entries."""
    monkeypatch.chdir(tmp_path)
    tiny_run.write_corpus(tmp_path / "corpus")
    stages = ("train.stages.cold={until_step: 2, model: {freeze: [embed]}}", "train.stages.warm.until_step=3")
    last = ("train.stages.warm.model.freeze=[]", "train.stages.last.optim={name: lion, betas: [0.9, 0.99], lr: 1e-4}")
    words = (*tiny_run.RECIPE, "precision=bf16", *stages, *last, "checkpoint.every_steps=1", "checkpoint.keep=9")
    assert main(["train", *words, "train.steps=5", "run.id=whole"]) == EXIT_DONE
    shutil.copytree("runs/whole", "runs/hurt")
    for path in list_checkpoints(RunDirectory(Path("runs/hurt")).checkpoints):
        assert isinstance(path, Path)
        if step_of(path) > newest:
            shutil.rmtree(path)
        elif step_of(path) > 2:
            flip(path)
    assert main(["train", "run.id=hurt"]) == EXIT_DONE
    assert weights(Path("runs/hurt")) == weights(Path("runs/whole"))
