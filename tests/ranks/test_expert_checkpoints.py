"""Experts of a rank come from files of all experts, and go into files that any other layout reads."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from framework.checkpoint.folder import committed_name
from framework.checkpoint.load import Reader
from framework.comm.connect import connect
from framework.commands.trained_model import UnitReader
from framework.model.load import build_meta
from framework.model.safetensors_files import LazyFiles
from framework.model.weights import write_weights
from framework.plan.plan import make_plan
from framework.recipe.schema import Model, Parallel, Recipe, Zero
from framework.train.build import build
from framework.train.state import RunState, restore, saved_entries
from framework.verify.evidence import keep_double
from tests.families import family
from tests.grid import IN_TURN
from tests.ranks.parity import CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.test_zero_lifetimes import states_of, train_steps
from tests.saving import save_checkpoint

pytestmark = IN_TURN

SEQUENCES = 12
MIXTRAL = family("mixtral")
# An expert's number in a key of one expert's matrix.
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def recipe_of(world: int, parallel: Parallel, zero: Zero) -> Recipe:
    # A microbatch for each stage of a pipeline; the step's sequences are the same in each layout.
    return small_recipe("fp64", world, parallel.pp, SEQUENCES, 0.05, zero, parallel)


SAVED = recipe_of(2, Parallel(ep=2), Zero(stage=3))
RESUMED = {
    "ep 1": recipe_of(2, Parallel(), Zero(stage=1)),
    "tp 2, slices": recipe_of(2, Parallel(tp=2), Zero(stage=0)),
    "pp 2": recipe_of(2, Parallel(pp=2), Zero(stage=0)),
    "ep 2, tp 2": recipe_of(4, Parallel(tp=2, ep=2), Zero(stage=2)),
    "ep 4": recipe_of(4, Parallel(ep=4), Zero(stage=3)),
}
FEW = ("tp 2, slices", "ep 4")


def train_and_resume(
    rank: int, world: int, rendezvous: str, root: Path, labels: Sequence[str]
) -> dict[str, tuple[dict[str, Tensor], Any]]:
    """Body: by layout, all that the checkpoint keeps as the layout holds it, and losses and norms from there on."""
    found = {}
    for number, (label, recipe) in enumerate({"saved": SAVED, **{label: RESUMED[label] for label in labels}}.items()):
        case = Case(label, MIXTRAL, {label: recipe})
        topology = topology_of(recipe, case.config)
        if rank >= topology.world:
            continue
        mesh = connect(topology, CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, case.config), mesh, resumes=label != "saved")
        # Models cast to fp32 in norms and softmax, where another order of sums is 1e-9 away.
        with keep_double(torch.float64):
            if label == "saved":
                train_steps(run, recipe, case.batches()[:1])
                state = RunState("run", "", step=1, num_updates=run.optimizer.num_updates)
                save_checkpoint(root, 1, saved_entries(run), state.to_json(), mesh.axis("world"), keep=1)
            else:
                restore(run, root)
            held = states_of(run)
            found[label] = held, train_steps(run, recipe, case.batches(), start=1)
        mesh.close()
    return found


@pytest.mark.parametrize("labels", [FEW, pytest.param(tuple(RESUMED), marks=pytest.mark.grid)], ids=["few", "all"])
def test_a_run_of_divided_experts_goes_on_in_any_layout(pool: RankPool, tmp_path: Path, labels: Sequence[str]) -> None:
    found = pool.run(4, train_and_resume, tmp_path, labels, timeout_s=300)[0]
    expected, curve = found.pop("saved")
    assert any(name.startswith("exp_avg") and "experts" in name for name in expected), sorted(expected)[:9]
    assert found.keys() == set(labels)
    for label, (held, losses) in found.items():
        assert held.keys() == expected.keys()
        assert [name for name in held if not torch.equal(held[name], expected[name])] == [], label
        for mine, theirs in zip(losses, curve, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9), label


def read_and_save(rank: int, world: int, rendezvous: str, case: Case, root: Path) -> tuple[list[str], int]:
    """Body: keys whose values this rank reads of `model.weights`, and how many bytes of stacked experts."""
    (recipe,) = case.layouts.values()
    read: list[str] = []
    num_bytes = 0
    plain = LazyFiles.slice

    class Counted:
        def __init__(self, key: str, stored: Any):
            self.key, self.stored = key, stored

        def get_shape(self) -> Any:
            return self.stored.get_shape()

        def __getitem__(self, index: Any) -> Tensor:
            nonlocal num_bytes
            read.append(self.key)
            value = self.stored[index]
            num_bytes += value.nbytes if ".experts." in self.key else 0
            return value

    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    with patch.object(LazyFiles, "slice", lambda self, key: Counted(key, plain(self, key))):
        run = build(make_plan(recipe, case.config), mesh)
    save_checkpoint(root, 0, saved_entries(run), RunState("run", "").to_json(), mesh.axis("world"), keep=1)
    mesh.close()
    return read, num_bytes


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_rank_reads_its_experts_and_the_export_is_the_original(pool: RankPool, name: str, tmp_path: Path) -> None:
    folder, root, out = tmp_path / "hub", tmp_path / "run", tmp_path / "out"
    case = Case(name, family(name), {"": small_recipe("fp32", 2, 1, SEQUENCES, parallel=Parallel(ep=2))})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(case.config).save_pretrained(folder)
    original = load_file(folder / "model.safetensors")
    recipe = replace(case.layouts[""], model=Model(family=name, weights=str(folder)), zero=Zero(stage=3))
    read = pool.run(2, read_and_save, replace(case, layouts={"": recipe}), root)

    whole = sum(value.nbytes for key, value in original.items() if ".experts." in key)
    experts = [{int(match[1]) for key in keys if (match := EXPERT.search(key))} for keys, _ in read]
    number = len(experts[0] | experts[1])
    assert experts == [set(range(number // 2)), set(range(number // 2, number))]
    assert [num_bytes for _, num_bytes in read] == [whole // 2] * 2

    model = build_meta(case.config)
    units = UnitReader(recipe, model, Reader(committed_name(root, 0)))
    write_weights(out, model, units.read_all(), torch.float32)
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == original.keys()
    assert [key for key in original if not torch.equal(exported[key], original[key])] == []
