"""What surrounds a step, on a GPU: data, checkpoints, the proof."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from framework.data.pack import Microbatch
from framework.recipe.schema import Zero
from framework.train.state import RunState, read_entries, restore, saved_entries
from framework.train.step import train_step
from tests.gpu.training import LR, start
from tests.ranks.parity import small_recipe
from tests.saving import save_checkpoint
from tests.unit.test_data_loader import make_loader, make_prepared

REPOSITORY = Path(__file__).parents[2]


def test_the_loader_reads_into_pinned_memory(device: torch.device) -> None:
    with make_loader(make_prepared([20]), b=2, microbatches=2, device=device) as loader:
        for cursor in (0, 4):
            for microbatch in loader.batch(cursor):
                assert isinstance(microbatch, Microbatch)
                assert microbatch.input_ids.is_pinned()
                assert microbatch.labels.is_pinned()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_of_gpu_tensors_comes_back_bitwise(device: torch.device, stage: int, tmp_path: Path) -> None:
    recipe = small_recipe("fp32", 1, zero=Zero(stage=stage))  # type: ignore[arg-type]
    saved = start(recipe, device, num_batches=1)
    train_step(saved.run, saved.batches[0], 0, LR)
    state = RunState("run", "data", step=1, num_updates=saved.run.optimizer.num_updates)
    world = saved.run.mesh.axis("world")
    save_checkpoint(tmp_path, 1, saved_entries(saved.run), state.to_json(), world, 1)
    loaded = start(recipe, device, checkpoints=tmp_path)
    assert restore(loaded.run, tmp_path) == state
    expected = {entry.name: entry.data for entry in read_entries(saved.run)}
    found = {entry.name: entry.data for entry in read_entries(loaded.run)}
    assert found.keys() == expected.keys()
    assert all(tensor.is_cuda and torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("precision", [["--fp64"], []])
@pytest.mark.parametrize("layout", [["zero.stage=3"], ["parallel.tp=2"], ["parallel.pp=2"]])
def test_layouts_of_two_ranks_on_the_gpu_equal_stock(
    device: torch.device, layout: list[str], precision: list[str], tmp_path: Path
) -> None:
    """Over gloo where there is one GPU, over NCCL where there are two."""
    command = [sys.executable, "-m", "framework.cli", "verify", "experiment=quickstart", *layout]
    ended = subprocess.run(
        [*command, "--device", "cuda", "--ranks", "2", *precision],
        check=False,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
