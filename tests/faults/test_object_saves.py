"""Ranks that save into an object store and are killed: `meshwright` over S3, as moto serves it, and over a store of files."""

import os
from pathlib import Path

import pytest
import torch

from framework.checkpoint.commit import folder_of, list_checkpoints, locate, step_of
from framework.checkpoint.load import load_newest
from framework.checkpoint.staging import Entry
from framework.mesh.layout import Layout
from framework.object_store import ObjectPath
from tests.faults.meshwright import losses, run_meshwright
from tests.faults.saving_ranks import EVERY, NUMEL, STEPS, Death, state_at
from tests.faults.test_async_saves import ALONE, check_death, deaths, run_ranks
from tests.grid import few_of
from tests.shared_store import register
from tests.tiny_run import RECIPE, write_corpus


@pytest.fixture
def root(tmp_path):
    register()
    return ObjectPath(f"shared://{tmp_path}/store/run", tmp_path)


@pytest.mark.parametrize(
    "death",
    few_of(deaths(), lambda death: death in (Death(0, "manifest", "next due"), Death(1, "writing", "next step"))),
    ids=lambda death: f"rank {death.rank} {death.point} {death.when}",
)
def test_a_rank_that_is_killed_in_an_upload_loses_at_most_one_interval(tmp_path, root, death):
    check_death(tmp_path, death, root=root)
    assert load_whole(root) == STEPS


def test_what_two_ranks_saved_one_loads(tmp_path, root):
    codes, _ = run_ranks(tmp_path, root=root)
    assert codes == [0, 0]
    assert [step_of(path) for path in list_checkpoints(root)] == [STEPS]
    assert load_whole(root) == STEPS


def load_whole(root):
    """The step of the newest checkpoint, every bit of which is seen to be right; loaded by one rank."""
    filled = [Entry(f"{kind}/w", Layout((NUMEL,)), torch.zeros(NUMEL)) for kind in ("weight", "exp_avg")]
    state = load_newest(root, filled, ALONE)
    assert all(map(torch.equal, (each.data for each in filled), state_at(state["step"])))
    return state["step"]


@pytest.mark.grid
@pytest.mark.parametrize("death", [Death(0, "manifest", "at once"), Death(1, "writing", "at once")])
def test_over_s3_as_well(tmp_path, s3, death):
    root = ObjectPath(f"s3://bucket/{tmp_path.name}/run", tmp_path)
    check_death(tmp_path, death, root=root)
    assert load_whole(root) == STEPS
    assert EVERY < STEPS


@pytest.mark.grid
def test_an_upload_of_many_parts_is_whole_or_not_there(tmp_path, s3):
    root = ObjectPath(f"s3://bucket/{tmp_path.name}/run", tmp_path)
    folder, data = folder_of(root), os.urandom(16 << 20)
    with folder.create(root / "step-1" / "whole", 0) as file:
        for _ in range(3):
            file.write(memoryview(data))
        file.sync()
    assert (root / "step-1" / "whole").read_bytes() == 3 * data
    with pytest.raises(TypeError), folder.create(root / "step-1" / "half", 0) as file:
        fail_in(file, data)
    del file
    assert list((root / "step-1").list()) == ["whole"]
    assert not s3.list_multipart_uploads("bucket")


def fail_in(file, data):
    file.write(memoryview(data))
    raise TypeError("of the writer, not of the store")


@pytest.mark.grid
def test_a_run_goes_on_from_a_bucket_and_is_the_run_on_a_disk(tmp_path, s3, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    write_corpus(Path("corpus"))
    common = ("launch.ranks=2", "launch.device=cpu", "zero.stage=1", "checkpoint.every_steps=4", "checkpoint.keep=2")
    for run, more in (("disk", ()), ("bucket", (f"checkpoint.root=s3://bucket/{tmp_path.name}",))):
        recipe = [word for word in RECIPE if not word.startswith("checkpoint")]
        code, said = run_meshwright("train", *recipe, *common, *more, f"run.id={run}", "train.steps=10")
        assert code == 0, said
        code, said = run_meshwright("train", f"run.id={run}", "train.steps=14", "parallel.pp=2", "zero.stage=0")
        assert code == 0, said
    assert losses("runs/disk") == losses("runs/bucket")
    code, said = run_meshwright("inspect", f"s3://bucket/{tmp_path.name}/bucket")
    assert code == 0, said
    assert "every hash fits" in said
    root = ObjectPath(f"s3://bucket/{tmp_path.name}/bucket", Path("runs/bucket"))
    assert [step_of(path) for path in list_checkpoints(root)] == [14, 12]
    assert locate(root, 14).name == "step-00000014.2"
    code, said = run_meshwright("train", "run.id=bucket", "train.steps=20", "checkpoint.root=null")
    assert code == 86
    assert "cannot change within a run" in said
    code, said = run_meshwright("train", *recipe, "run.id=no", "checkpoint.root=s3://nobody/runs")
    assert code == 86
    assert "checkpoint.root=s3://nobody/runs: an object cannot be written" in said
    assert not Path("runs/no").exists()
