"""`meshwright train` from end to end, on a tiny model and a tiny corpus: stopped, resumed, damaged, misused, exported."""

import gzip
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from framework.checkpoint.commit import list_checkpoints, newest_checkpoint, step_of
from framework.checkpoint.load import Reader
from framework.cli import main
from framework.commands import train as train_module
from framework.commands.status import status_command
from framework.commands.stop import save_command, stop_command
from framework.commands.trained_model import _read, export_model, load_model
from framework.errors import EXIT_DONE, EXIT_RESUME, EXIT_USER, ModelError, RunError, StorageError
from framework.launch import settle
from framework.launch.directory import RunDirectory
from framework.launch.parts import begin
from framework.optim.disk_file import MEMORY_FILE_SYSTEMS, file_system_of
from framework.recipe import layout_rules
from framework.recipe.compose import compose, load_recipe, save_recipe
from framework.track.goodput import TimePart, read_account
from framework.track.jsonl import METRICS_FILE, read_records
from tests import tiny_run
from tests.hostile_folder import refuse_imported, write_hostile_modules

STEPS = 100
RECIPE = (
    *tiny_run.RECIPE,
    f"train.steps={STEPS}",
    "batch.sequences_per_step=4",
    "batch.sequences_per_microbatch=2",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a corpus and, in `runs/whole`, a run that nothing disturbed."""
    place = tmp_path_factory.mktemp("train")
    tiny_run.write_corpus(place / "corpus")
    write_hostile_modules(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert train("run.id=whole") == EXIT_DONE
    return place


@pytest.fixture(scope="module")
def piped(place):
    """`runs/piped`: a pipeline of two ranks that was interrupted behind step 5, of which step 3 was drawn and step 2 profiled on
    rank 1. Rank 0, which reports, is not the last stage, which has the loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        interrupt_after("piped", 5)
        layout = ("parallel.pp=2", "launch.ranks=2", "pipeline.schedule=zb_h1", "batch.sequences_per_microbatch=1")
        watched = ("track.timeline_step=3", "track.profile_steps=[2,2]", "track.profile_ranks=[1]", "zero.stage=3")
        assert train("run.id=piped", *layout, *watched) == EXIT_RESUME
    return Path("runs/piped")


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    yield
    refuse_imported(place)


def train(*overrides):
    return main(["train", *RECIPE, *overrides])


def resume(run_id, *overrides):
    return main(["train", f"run.id={run_id}", *overrides])


def interrupt_after(run_id, steps, number=signal.SIGINT):
    """Ctrl-C, or another signal, once the run has reported so many steps."""

    def send():
        metrics = Path("runs", run_id, "metrics.jsonl").absolute()
        while not metrics.exists() or metrics.read_text().count("\n") < steps:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def losses(run_id):
    """By step, the newest word on each."""
    lines = map(json.loads, Path("runs", run_id, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def newest(run_id):
    path = newest_checkpoint(RunDirectory(Path("runs", run_id)).checkpoints)
    assert path is not None
    return Reader(path)


def weights(run_id):
    reader = newest(run_id)
    names = [name.removeprefix("weight/") for name in reader.manifest.entries if name.startswith("weight/")]
    return _read(reader, "weight/", names)


def assert_same_weights(run_id, other):
    mine, theirs = weights(run_id), weights(other)
    assert list(mine) == list(theirs)
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


def test_interrupted_run_goes_on_bitwise_as_if_it_had_not_been(capsys):
    interrupt_after("stopped", 5)
    assert train("run.id=stopped") == EXIT_RESUME
    stopped_at = newest("stopped").manifest.step
    assert 5 <= stopped_at < STEPS
    printed = capsys.readouterr()
    assert f"saved at step {stopped_at}" in printed.out
    assert (printed.out + printed.err).count("meshwright train run.id=stopped") == 1
    assert resume("stopped") == EXIT_DONE
    assert losses("stopped") == losses("whole")
    assert_same_weights("stopped", "whole")


def in_child(program, *overrides):
    """The exit code of a run in a process of its own, which runs `program` first. It is forked and has imported torch."""

    def work():
        exec(program, {})
        raise SystemExit(train(*overrides))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(120)
    return process.exitcode


# A ring that is killed half through a write of some step.
KILL_IN_A_WRITE = """
import os, signal, threading
pwritev, writes = os.pwritev, []
def write_and_die(fd, views, offset):
    if threading.current_thread().name.startswith("disk-write"):
        writes.append(offset)
        if len(writes) == 60:
            pwritev(fd, [views[0][: len(views[0]) // 2 // 4096 * 4096]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
    return pwritev(fd, views, offset)
os.pwritev = write_and_die
"""


@pytest.mark.grid
def test_a_run_that_is_killed_in_a_step_on_the_disk_goes_on_bitwise_as_one_in_memory(tmp_path):
    """What the killed rank has left on the disk is half of a step: the checkpoint is the truth, and the file is replaced."""
    if file_system_of(tmp_path) in MEMORY_FILE_SYSTEMS:
        pytest.skip(f"{tmp_path} is memory: such a folder is refused")
    disk = tmp_path / "disk"
    disk.mkdir()
    offload = ("memory.offload.optimizer=1", "memory.offload.home=disk", f"memory.offload.disk_path={disk}")
    began = time.monotonic()
    ended = in_child(KILL_IN_A_WRITE, "run.id=offloaded", *offload, "checkpoint.every_steps=3")
    assert ended == -signal.SIGKILL
    assert len(list(disk.glob("offloaded/*/rank-0"))) == 1, "a killed process removes nothing"
    assert 0 < newest("offloaded").manifest.step < STEPS
    time.sleep(0.5)  # nobody runs it, and nobody has stopped it
    assert resume("offloaded") == EXIT_DONE
    assert_adds_up("offloaded", time.monotonic() - began)
    assert losses("offloaded") == losses("whole")
    assert_same_weights("offloaded", "whole")
    assert not list(disk.iterdir())


# A host that is killed between two units of its twelfth update: some masters and moments are of the next step, others are not.
KILL_IN_AN_UPDATE = """
import os, signal
from framework.train.update import UpdatedTogether
update, units = UpdatedTogether.update, []
def update_and_die(self, *args):
    update(self, *args)
    units.extend(buffer.unit for buffer in self.buffers if buffer.is_updated_on_host)
    if units and units.count(units[0]) == 12 and units[-1] != units[0]:
        os.kill(os.getpid(), signal.SIGKILL)
UpdatedTogether.update = update_and_die
"""


@pytest.mark.grid
def test_a_run_that_is_killed_in_a_step_on_the_host_goes_on_bitwise_as_one_without_offload(monkeypatch):
    """Ranks compute on CPUs here, for which a recipe refuses this home: that rule alone is lifted."""
    for module in (layout_rules, settle):
        monkeypatch.setattr(module, "find_offload_to_device", lambda recipe: iter(()))
    offload = ("memory.offload.optimizer=1", "memory.offload.home=host")
    ended = in_child(KILL_IN_AN_UPDATE, "run.id=on-host", *offload, "checkpoint.every_steps=3")
    assert ended == -signal.SIGKILL
    assert 0 < newest("on-host").manifest.step < 12
    assert resume("on-host") == EXIT_DONE
    assert losses("on-host") == losses("whole")
    assert_same_weights("on-host", "whole")


# A disk on which each read and write takes so long, and one of whose files is removed, or cut short, behind some step's writes.
BAD_DISK = """
import os, pathlib, threading, time
pwritev, preadv, writes = os.pwritev, os.preadv, []
def slow(call):
    def move(fd, views, offset):
        if threading.current_thread().name.startswith("disk-"):
            time.sleep({delay_s})
        return call(fd, views, offset)
    return move
def write(fd, views, offset):
    if threading.current_thread().name.startswith("disk-write"):
        writes.append(offset)
        if len(writes) == 60:
            path = pathlib.Path(os.readlink(f"/proc/self/fd/{{fd}}"))
            {harm}
    return pwritev(fd, views, offset)
os.pwritev, os.preadv = slow(write), slow(preadv)
"""


def read_files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB, on a disk, that nobody else uses."""
    image, mount = tmp_path / "image", tmp_path / "small disk"
    mount.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 4 << 20)
    made = f"mkfs.ext4 -q -m 0 -O ^has_journal {image} 2> /dev/null && mount -o loop {image} '{mount}' 2> /dev/null"
    if os.system(made):
        pytest.skip("mounting a small file system needs root and a loop device")
    yield mount
    os.system(f"umount '{mount}'")


@pytest.mark.grid
def test_a_run_whose_disk_is_full_says_so_and_goes_on_bitwise_when_there_is_room(small_disk, capfd):
    """Room is asked for at each start. The checkpoint of a run that is refused has not changed in a byte."""
    offload = ("memory.offload.optimizer=1", "memory.offload.home=disk", f"memory.offload.disk_path={small_disk}")
    interrupt_after("crowded", 5)
    assert train("run.id=crowded", *offload) == EXIT_RESUME
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - (64 << 10)))
    checkpoints = RunDirectory(Path("runs/crowded")).checkpoints
    before = read_files(checkpoints)
    assert before
    capfd.readouterr()
    for attempt in (resume, lambda run_id: train(f"run.id={run_id}-from-new", *offload)):
        assert attempt("crowded") == EXIT_USER
        said = capfd.readouterr().err
        assert re.search(rf"memory\.offload\.disk_path: no room in {small_disk}/crowded\S* .*GiB are free", said), said
    assert read_files(checkpoints) == before
    assert sorted(os.listdir(small_disk)) == ["ballast", "lost+found"]
    ballast.unlink()
    assert resume("crowded") == EXIT_DONE
    assert losses("crowded") == losses("whole")
    assert_same_weights("crowded", "whole")


@pytest.mark.grid
@pytest.mark.parametrize(
    ("delay_s", "harm"), [(0, "path.unlink()"), (0.001, "pass")], ids=["its file is deleted", "it is slow"]
)
def test_a_run_goes_on_bitwise_where_its_disk_is_slow_or_its_file_deleted(delay_s, harm, tmp_path):
    ended = run_on_bad_disk("bad", tmp_path, delay_s, harm)
    assert ended == EXIT_DONE
    assert losses("bad") == losses("whole")
    assert_same_weights("bad", "whole")
    shutil.rmtree("runs/bad")


@pytest.mark.grid
def test_a_run_whose_file_is_cut_short_ends_with_its_name_and_goes_on_bitwise(tmp_path, capfd):
    ended = run_on_bad_disk("cut", tmp_path, 0, "os.truncate(path, 4096)")
    assert ended == StorageError.exit_code
    said = capfd.readouterr().err
    assert f"{tmp_path}/disk/cut/" in said
    assert "was changed from outside" in said
    assert "memory.offload.disk_path" in said
    assert 0 < newest("cut").manifest.step < STEPS
    assert resume("cut") == EXIT_DONE
    assert losses("cut") == losses("whole")
    assert_same_weights("cut", "whole")
    assert not list((tmp_path / "disk").iterdir())


def run_on_bad_disk(run_id, tmp_path, delay_s, harm):
    """The exit code of a run with states on such a disk."""
    if file_system_of(tmp_path) in MEMORY_FILE_SYSTEMS:
        pytest.skip(f"{tmp_path} is memory: such a folder is refused")
    (tmp_path / "disk").mkdir()
    offload = (
        "memory.offload.optimizer=1",
        "memory.offload.home=disk",
        f"memory.offload.disk_path={tmp_path / 'disk'}",
    )
    program = BAD_DISK.format(delay_s=delay_s, harm=harm)
    return in_child(program, f"run.id={run_id}", *offload, "checkpoint.every_steps=3")


def assert_adds_up(run_id, wall_s):
    """Goodput of a run that was killed and resumed at once, of which the caller has measured the wall time."""
    account = read_account(Path("runs", run_id))
    assert account is not None
    assert account.wall_s == pytest.approx(
        wall_s, rel=0.02, abs=0.3
    )  # a process that begins and one that prints its end
    assert min(account.seconds.values()) >= 0
    assert len(account.rows) == 2
    assert account.seconds[TimePart.RECOVERY] >= 0.5
    assert account.seconds[TimePart.STEP] > 0
    assert account.seconds[TimePart.OFF] == account.seconds[TimePart.QUEUE] == 0
    shares = list(read_records(Path("runs", run_id, METRICS_FILE)))[-1]["goodput"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["recovery"] == pytest.approx(account.shares[TimePart.RECOVERY], rel=0.7)  # the end came later
    assert Path("runs", run_id, "goodput.png").stat().st_size > 0


# The same in the thread that saves, at an fsync of one of the first saves.
KILL_IN_A_SAVE = """
import os, signal, threading
fsync, syncs = os.fsync, []
def sync_and_die(descriptor):
    if threading.current_thread().name.startswith("save"):
        syncs.append(descriptor)
        if len(syncs) == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
    return fsync(descriptor)
os.fsync = sync_and_die
"""


@pytest.mark.grid
@pytest.mark.parametrize("number", [18, 20, 22, 24])
def test_a_run_that_is_killed_in_a_save_behind_training_goes_on_bitwise(number):
    run_id = f"killed-{number}"
    ended = in_child(KILL_IN_A_SAVE.format(number=number), f"run.id={run_id}", "checkpoint.every_steps=3")
    assert ended == -signal.SIGKILL
    assert newest(run_id).manifest.step in (6, 9)
    assert resume(run_id) == EXIT_DONE
    assert losses(run_id) == losses("whole")
    assert_same_weights(run_id, "whole")


@pytest.mark.grid
def test_run_goes_on_with_another_number_of_ranks(capfd):
    interrupt_after("moved", 5)
    assert train("run.id=moved") == EXIT_RESUME
    assert resume("moved", "launch.ranks=2", "batch.sequences_per_microbatch=1") == EXIT_DONE
    assert "changed  launch.ranks: 1 -> 2" in capfd.readouterr().out
    assert losses("moved") == pytest.approx(losses("whole"), rel=1e-5)
    for name, weight in weights("moved").items():
        assert torch.allclose(weight, weights("whole")[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_a_run_saves_and_stops_as_it_is_asked_from_outside(ranks, capfd):
    """Two ranks that agree on a stop: test_launch_agent.py."""
    run_id = f"asked-{ranks}"
    codes, run = [], RunDirectory(Path("runs", run_id))

    def ask():
        while not (run.path / "metrics.jsonl").exists():
            time.sleep(0.01)
        codes.append(save_command(run.path))
        codes.append(stop_command(run.path))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    words = ("train.steps=100000", "checkpoint.every_steps=null", f"launch.ranks={ranks}")
    assert train(f"run.id={run_id}", *words) == EXIT_RESUME
    asking.join()
    assert codes == [EXIT_DONE, EXIT_DONE]
    saved = [int(path.name.removeprefix("step-")) for path in sorted(run.checkpoints.glob("step-*"))]
    assert len(saved) == 2
    out = capfd.readouterr().out
    assert f"saved    step {saved[0]:,}\n" in out
    assert f"stopped  step {saved[1]:,}\nresume   meshwright train run.id={run_id}" in out
    assert not list(run.path.glob("request-*"))


def test_a_run_goes_on_where_nobody_reads_it_and_its_code_is_its_own():
    unread = (
        "import os, sys\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)\nos.dup2(write, 2)\n"
        "sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__\n"
        "from framework.output import keep_streams\nkeep_streams()"
    )
    assert in_child(unread, "run.id=unread", "train.steps=3", "data.root=unread-tokens") == EXIT_DONE
    assert list(losses("unread")) == [1, 2, 3]
    stops = f"{unread}\nimport os, signal, threading\nfrom tests.faults.test_launch_train import interrupt_after\n"
    assert in_child(f"{stops}interrupt_after('hung-up', 2, signal.SIGHUP)", "run.id=hung-up") == EXIT_RESUME
    assert newest("hung-up").manifest.step >= 2


@pytest.mark.grid
def test_the_best_checkpoint_is_saved_at_once_and_kept(tmp_path, capfd):
    """A rate at which the model soon forgets what it has not seen for long."""
    words = ("train.validate_every_steps=5", "data.validation=0.3", "optim.lr=0.1", "optim.schedule.name=constant")
    keeps = ("checkpoint.keep_best=true", "checkpoint.keep=1", "checkpoint.every_steps=20")
    assert train("run.id=best", "train.steps=40", *words, *keeps) == EXIT_DONE
    lines = map(json.loads, Path("runs/best/metrics.jsonl").read_text().splitlines())
    validated = {line["step"]: line["validation_loss"] for line in lines if line["validation_loss"] is not None}
    best = min(validated, key=validated.__getitem__)
    assert best not in (20, 40)
    assert [step_of(path) for path in list_checkpoints(Path("runs/best/checkpoints"))] == [40, best]
    assert newest("best").manifest.state["best_step"] == best
    export_model(Path("runs/best"), tmp_path / "best", best=True)
    assert f"exported step {best} of" in capfd.readouterr().out
    with pytest.raises(RunError, match="kept no best checkpoint"):
        export_model(Path("runs/whole"), tmp_path / "none", best=True)


@pytest.mark.grid
def test_a_step_of_a_pipeline_is_drawn(piped):
    events = json.loads((piped / "timeline.json").read_text())["traceEvents"]
    expected = {f"{stage}{kind}{number}" for stage in (0, 1) for kind in "FIW" for number in range(4)}
    assert {each["name"] for each in events} == expected
    assert {each["tid"] for each in events} == {0, 1}
    assert (piped / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.grid
def test_a_step_of_a_rank_is_profiled(piped):
    """Step 2 of rank 1, which has the second stage, and of no other."""
    folder = piped / "profile"
    assert sorted(os.listdir(folder)) == ["rank-1.json.gz", "rank-1.txt"]
    events = json.loads(gzip.decompress((folder / "rank-1.json.gz").read_bytes()))["traceEvents"]
    found = Counter(each["name"] for each in events if each.get("cat") == "user_annotation")
    assert {f"action 1{kind}{number}" for kind in "FIW" for number in range(4)} <= set(found)
    assert found["action 1F0"] == 1
    assert found["forward of layers.1"] == found["backward of layers.1"] == 4
    assert "forward of layers.0" not in found
    assert found["send and receive over pp"] > 0
    assert found["all_reduce sums of the step"] == 1


@pytest.mark.grid
def test_a_pipeline_is_exported_and_goes_on_as_one_stage_also_where_it_cannot_be_drawn(piped, tmp_path, capfd, caplog):
    export_model(piped, tmp_path / "out")
    exported, saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), weights("piped")
    assert saved.keys() < exported.keys()  # the tied head
    for name, weight in saved.items():
        assert torch.equal(exported[name], weight), name
    (piped / "timeline.json").unlink()
    (piped / "timeline.json").mkdir()
    one_stage = (
        "parallel.pp=1",
        "launch.ranks=1",
        "pipeline.schedule=1f1b",
        f"track.timeline_step={STEPS - 1}",
        "track.profile_ranks=[0]",
    )
    assert resume("piped", *one_stage) == EXIT_DONE
    assert "changed  pipeline.schedule: zb_h1 -> 1f1b" in capfd.readouterr().out
    assert "timeline failed, training goes on: IsADirectoryError" in caplog.text
    assert losses("piped") == pytest.approx(losses("whole"), rel=1e-5)


@pytest.mark.grid
def test_a_run_goes_on_in_the_dtype_that_its_beginning_settled(capfd):
    """bf16 was chosen on GPUs, say; CPUs go on in it. A recipe that an older version saved still says auto."""
    assert train("run.id=narrow", "precision=bf16", "train.steps=2") == EXIT_DONE
    assert "device   cpu, bf16" in capfd.readouterr().out
    saved = Path("runs/narrow/recipe.yaml")
    settled = saved.read_text()
    assert "device: cpu" in settled
    saved.write_text(settled.replace("device: cpu", "device: auto"))
    record = Path("runs/narrow/run.json")
    record.write_text(record.read_text().replace('"launch.device": "cpu"', '"launch.device": "auto"'))
    assert resume("narrow", "precision.compute=auto", "train.steps=4") == EXIT_DONE
    assert saved.read_text() == settled.replace("  steps: 2\n", "  steps: 4\n")
    assert list(losses("narrow")) == [1, 2, 3, 4]


def test_damaged_newest_checkpoint_costs_steps_and_nothing_else(capfd):
    interrupt_after("damaged", 25)
    assert train("run.id=damaged") == EXIT_RESUME
    file = newest("damaged").path / "rank-00000.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert resume("damaged") == EXIT_DONE
    assert f"{file.parent}.bad" in capfd.readouterr().err
    assert_same_weights("damaged", "whole")


@pytest.fixture
def lost():
    """A run all of whose checkpoints are damaged, and its files by name."""
    run = RunDirectory(Path("runs/lost"))
    shutil.copytree("runs/whole", run.path)
    for file in run.checkpoints.glob("step-*/rank-00000.bin"):
        os.truncate(file, file.stat().st_size - 1)
    yield run
    shutil.rmtree(run.path)


def list_checkpoint_files(run):
    return sorted((path, path.stat().st_size) for path in run.checkpoints.rglob("*"))


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(lost, capfd):
    before = list_checkpoint_files(lost)
    assert resume("lost", "train.steps=110") == EXIT_USER
    said = capfd.readouterr().err
    assert "all 3 checkpoints in runs/lost/checkpoints are damaged" in said
    assert all(f"step-{step:08d}: " in said for step in (60, 80, 100))
    assert "never starts over by itself" in said
    assert status_command(lost.path) == EXIT_DONE
    assert "saved    all 3 checkpoints" in capfd.readouterr().out
    assert "all 3 checkpoints" in train_module.conclude(lost, load_recipe(lost.recipe), EXIT_USER)
    assert list_checkpoint_files(lost) == before


def test_ranks_that_find_all_checkpoints_damaged_say_so_and_leave_the_run_as_it_was(lost, capfd):
    """The launcher looked before; what is damaged since, the ranks see."""
    recipe = compose([*RECIPE, "run.id=lost", "train.steps=110", "launch.device=cpu"]).require()
    save_recipe(recipe, lost.recipe)
    before, curve = list_checkpoint_files(lost), (lost.path / "metrics.jsonl").read_bytes()
    with lost.lock() as lease:
        assert train_module._run_ranks(lost, lease, recipe, from_step=100) == EXIT_USER
    assert "all 3 checkpoints in" in capfd.readouterr().err
    assert list_checkpoint_files(lost) == before
    assert (lost.path / "metrics.jsonl").read_bytes() == curve


def test_a_run_whose_checkpoints_were_removed_is_not_started_over(lost, capfd):
    shutil.rmtree(lost.checkpoints)
    assert resume("lost", "train.steps=110") == EXIT_USER
    said = capfd.readouterr().err
    assert "has no checkpoint left" in said
    assert "step-00000100: was committed" in said


def test_a_folder_with_checkpoints_and_no_recipe_is_no_place_for_a_new_run(capfd):
    folder = Path("runs/headless")
    shutil.copytree("runs/whole", folder)
    (folder / "recipe.yaml").unlink()
    assert train("run.id=headless", "optim.lr=1") == EXIT_USER
    assert "has checkpoints and no recipe.yaml" in capfd.readouterr().err


def test_a_sweep_writes_over_no_run_that_bears_the_name_of_one_of_its_own(monkeypatch, capfd):
    """As when the folder of an earlier sweep was removed, and not those of its runs."""
    Path("bin").mkdir()
    Path("bin/sbatch").write_text("#!/bin/sh\necho 7\n")
    Path("bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:/usr/bin:/bin")
    shutil.copytree("runs/whole", "runs/twice-sweep-001-1")
    before = Path("runs/twice-sweep-001-1/recipe.yaml").read_text()
    words = ["launch=slurm", "launch.ranks=1", "launch.gres=null", "run.name=twice", "optim.lr=1e-3,3e-4"]
    assert main(["submit", "-m", *RECIPE, *words]) == EXIT_USER
    assert "twice-sweep-001-1 is a run already" in capfd.readouterr().err
    assert Path("runs/twice-sweep-001-1/recipe.yaml").read_text() == before
    assert not Path("runs/twice-sweep-001-0/recipe.yaml").exists()


def test_finished_run_says_so_and_how_to_extend_it(capsys):
    assert resume("whole") == EXIT_USER
    error = capsys.readouterr().err
    assert f"finished: {STEPS} of {STEPS} steps" in error
    assert f"meshwright train run.id=whole train.steps={2 * STEPS}" in error


def test_resume_with_a_changed_model_is_refused_with_the_difference(capsys):
    before = Path("runs/whole/recipe.yaml").read_bytes()
    assert resume("whole", "model.config.hidden_size=32", "train.steps=99") == EXIT_USER
    assert "model.config.hidden_size  16   32" in capsys.readouterr().err
    assert Path("runs/whole/recipe.yaml").read_bytes() == before


def test_run_in_use_is_refused(capsys):
    with RunDirectory(Path("runs/whole")).lock():
        assert resume("whole", "train.steps=99") == EXIT_USER
    assert f"in use by process {os.getpid()} on" in capsys.readouterr().err


def test_run_that_another_process_began_meanwhile_is_left_alone():
    """Also its epoch: the other process may have been frozen, or train where its lock is not seen. Locks say who asked last."""
    whole = Path("runs/whole")
    kept = [path for path in whole.rglob("*") if path.is_file() and path.stem != "lock"]
    before = {path: path.read_bytes() for path in kept}
    recipe = compose([*RECIPE, "run.id=whole", "optim.lr=1"]).require()
    with pytest.raises(RunError, match="begun by another process meanwhile"), begin(recipe):
        pass
    assert sorted(path for path in whole.rglob("*") if path.is_file() and path.stem != "lock") == sorted(kept)
    assert {path: path.read_bytes() for path in kept} == before
    assert not list(whole.rglob(".epoch-*"))


def test_bad_data_leaves_no_run_behind():
    before = sorted(os.listdir("runs"))
    assert train("data.sources.files.path=nowhere/*.txt") == EXIT_USER
    assert sorted(os.listdir("runs")) == before


def test_export_is_what_from_pretrained_loads(tmp_path, capsys):
    export_model(Path("runs/whole"), tmp_path / "out")
    assert f"exported step {STEPS}" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded = model.state_dict()
    for name, weight in weights("whole").items():
        assert torch.equal(loaded[name], weight), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("mesh axis").input_ids) == "mesh axis"
    for place in (model.config, model.generation_config):
        assert (place.bos_token_id, place.eos_token_id, place.pad_token_id) == (None, tokenizer.eos_token_id, None)
    assert load_recipe(Path("runs/whole/recipe.yaml")).model.config["eos_token_id"] == tokenizer.eos_token_id


def test_the_checkpoint_of_each_step_is_exported_by_its_number(tmp_path, capsys):
    kept = list_checkpoints(Path("runs/whole/checkpoints"))
    assert len(kept) > 1
    for checkpoint in kept:
        step, to = step_of(checkpoint), tmp_path / checkpoint.name
        assert main(["export", "whole", "--step", str(step), "--to", str(to)]) == EXIT_DONE
        assert capsys.readouterr().out.startswith(f"exported step {step} of runs/whole to {to}\n")
        saved, exported = Reader(checkpoint), load_file(to / "model.safetensors")
        assert torch.equal(
            exported["model.norm.weight"], _read(saved, "weight/", ["model.norm.weight"])["model.norm.weight"]
        )
    steps = ", ".join(str(step_of(each)) for each in kept)
    assert main(["export", "whole", "--step", "83", "--to", str(tmp_path / "none")]) == EXIT_USER
    assert f"has no checkpoint of step 83; it has those of steps: {steps}\n" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.grid
def test_exports_while_training_are_what_the_command_writes_byte_for_byte(tmp_path, capfd):
    keys = ("run.id=exported", "train.steps=4", "checkpoint.every_steps=2", "checkpoint.export_every_steps=2")
    assert train(*keys) == EXIT_DONE
    said = capfd.readouterr().err
    run = RunDirectory(Path("runs/exported"))
    assert [step_of(path) for path in list_checkpoints(run.checkpoints)] == [4, 2]
    assert (run.exports / "step-00000004").is_dir()
    assert "exported step 4 to" in said
    for folder in run.exports.iterdir():  # step 2 may have been left out: exports go one after another
        step, plain = step_of(folder), tmp_path / folder.name
        assert main(["export", "exported", "--step", str(step), "--to", str(plain)]) == EXIT_DONE
        names = sorted(path.name for path in plain.iterdir())
        assert names == sorted(path.name for path in folder.iterdir())
        assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(names)
        assert all((folder / name).read_bytes() == (plain / name).read_bytes() for name in names)
    model, step = load_model(run.path)
    stock = AutoModelForCausalLM.from_pretrained(run.exports / "step-00000004", dtype=model.dtype)
    ids = AutoTokenizer.from_pretrained(run.exports / "step-00000004")("mesh axis", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(stock.eval()(ids).logits, model.eval()(ids).logits)
    assert step == 4
    with pytest.raises(RunError, match=r"no checkpoint of step 3; it has those of steps: 4, 2"):
        export_model(run.path, tmp_path / "none", step=3)


def test_a_run_generates_with_its_newest_checkpoint_as_its_export_does(tmp_path, capsys):
    export_model(Path("runs/whole"), tmp_path / "out")
    capsys.readouterr()
    texts = []
    for name in ("whole", str(tmp_path / "out")):
        assert main(["generate", name, "--prompt", "mesh", "--max-new-tokens=8", "--temperature=0"]) == EXIT_DONE
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("mesh\n")


def test_export_does_not_touch_a_folder_with_content(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ModelError, match="exists already"):
        export_model(Path("runs/whole"), tmp_path)
    assert os.listdir(tmp_path) == ["mine"]


def test_export_needs_a_run_and_a_checkpoint(tmp_path):
    with pytest.raises(RunError, match="is not a run"):
        export_model(tmp_path, tmp_path / "out")
    empty = RunDirectory.create(tmp_path, "empty", "run")
    empty.recipe.write_bytes(Path("runs/whole/recipe.yaml").read_bytes())
    with pytest.raises(RunError, match="no whole checkpoint"):
        export_model(empty.path, tmp_path / "out")


@pytest.mark.grid
def test_many_shards_are_prepared_and_trained_on_with_256_open_files(place, monkeypatch):
    monkeypatch.setattr("framework.data.records.MIN_SHARD_BYTES", 1)
    files = place / "many-files"
    files.mkdir()
    for number in range(140):  # as many shards, which once were opened all at once, 2 files each
        (files / f"{number}.txt").write_text(f"{number} " + " ".join(tiny_run.WORDS))
    # Elsewhere: workers of a process without -P, as pytest is, look for modules where they are started.
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        code = train("run.id=many", f"data.sources.files.path={files}", "train.steps=3", "data.validation=0.1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert code == EXIT_DONE
    assert losses("many").keys() == {1, 2, 3}
