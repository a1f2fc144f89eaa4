"""States on a disk: every bit of a training run is the same, and so are its checkpoints."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.comm.connect import Mesh, connect
from framework.optim import disk_ring
from framework.plan.plan import Plan, make_plan
from framework.recipe.schema import Offload, Recipe
from framework.train.build import build
from framework.train.state import RunState, restore, saved_entries
from framework.train.step import TrainingRun, train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import owned_weights, run_layout, share
from tests.families import build_config, family
from tests.grid import IN_TURN
from tests.ranks.parity import CONTEXT, CPU, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.recorded import LAYOUTS, SEQUENCES, describe, digest
from tests.saving import save_checkpoint

pytestmark = IN_TURN

STEPS = 3
# What runs each day: parameters in shards, replicas that divide the update, a copy of parameters on two stages of a rank.
FEW = ("hsdp, bf16, updates divided",)


def on_disk(recipe: Recipe, fraction: float, folder: Path) -> Recipe:
    offload = Offload(optimizer=fraction, home="disk", disk_path=str(folder))
    return replace(recipe, memory=replace(recipe.memory, offload=offload))


def train_from_disk(rank: int, world: int, rendezvous: str, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Body: by layout, every bit of a short run with all, half and none of its units' states on the disk, in small chunks."""
    found: dict[str, Any] = {}
    chunk_bytes, disk_ring.CHUNK_BYTES = disk_ring.CHUNK_BYTES, 1 << 16
    for number, name in enumerate(names):
        layout = LAYOUTS[name]
        if rank >= layout.world:
            continue
        config = build_config(family(layout.model), **layout.changes)
        config.use_cache = False
        mesh = connect(topology_of(layout.recipe, config), CPU, f"{rendezvous}-{number}", rank)
        batches = make_batches(config, STEPS, SEQUENCES, CONTEXT, seed=11)
        variants = [layout.recipe, on_disk(layout.recipe, 1.0, folder), on_disk(layout.recipe, 0.5, folder)]
        found[name] = [describe(run_layout(make_plan(each, config), batches, mesh)) for each in variants]
        mesh.close()
    disk_ring.CHUNK_BYTES = chunk_bytes
    return found


def assert_the_same(pool: RankPool, names: Sequence[str], folder: Path) -> None:
    found = pool.run(max(LAYOUTS[name].world for name in names), train_from_disk, names, folder, timeout_s=600)[0]
    assert found.keys() == set(names)
    for name, (in_memory, *others) in found.items():
        for other in others:
            assert other == in_memory, name
    assert not list(folder.iterdir()), "runs that are over leave no file"


def test_a_run_with_states_on_a_disk_is_the_same_run(pool: RankPool, tmp_path: Path) -> None:
    assert_the_same(pool, FEW, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - set(FEW)))
def test_any_layout_with_states_on_a_disk_is_the_same_run(pool: RankPool, name: str, tmp_path: Path) -> None:
    assert_the_same(pool, [name], tmp_path)


def resume_across_homes(rank: int, world: int, rendezvous: str, folder: Path) -> tuple[Any, ...]:
    """Body: two steps, a checkpoint, one step more; and the last step again from the checkpoint, with the states elsewhere.
    Returns the weights' digests, and the bytes of the two checkpoints' files."""
    layout = LAYOUTS["hsdp, bf16, updates divided"]
    config = build_config(family(layout.model), **layout.changes)
    config.use_cache = False
    mesh = connect(topology_of(layout.recipe, config), CPU, rendezvous, rank)
    batches = make_batches(config, STEPS, SEQUENCES, CONTEXT, seed=11)
    plans = [make_plan(each, config) for each in (layout.recipe, on_disk(layout.recipe, 1.0, folder / "disk"))]
    found = []
    for number, plan in enumerate(plans):
        run, root = build(plan, mesh), folder / f"checkpoints-{number}"
        step_through(run, plan, mesh, batches[:2], 0)
        state = RunState("run", "data", step=2, num_updates=run.optimizer.num_updates)
        save_checkpoint(root, 2, saved_entries(run), state.to_json(), mesh.axis("world"), keep=1)
        check_bytes(run, plan)
        resumed = build(plans[1 - number], mesh, resumes=True, run_id="resumed")
        restore(resumed, root)
        for each in (run, resumed):
            step_through(each, plan, mesh, batches[2:], 2)
            found.append(digest({name: values for name, (_, values) in owned_weights(each).items()}))
            each.close()
    mesh.close()
    return found, run.optimizer.num_updates


def check_bytes(run: TrainingRun, plan: Plan) -> None:
    """Of what is offloaded the host has the ring, and the disk the rest: as the plan says, byte for byte."""
    planned = plan.memory(run.mesh.rank)
    if run.disk is None:
        assert planned.disk == planned.host == 0
        return
    assert planned.disk == run.disk.file.num_bytes == run.disk.file.path.stat().st_size
    assert planned.host == run.disk.host_bytes
    assert not sum(buffer.master.nbytes for buffer in run.buffers if buffer.is_trained)
    assert planned.held["master"] == planned.held["optimizer"] == 0


def step_through(run: TrainingRun, plan: Plan, mesh: Mesh, batches: Any, first: int) -> None:
    for step, batch in enumerate(batches, first):
        train_step(run, share(batch, plan.recipe.batch.sequences_per_microbatch, mesh), step, 1e-2)


@pytest.mark.grid  # as of states on the host: test_offload.py
def test_a_checkpoint_does_not_know_where_states_lived(pool: RankPool, tmp_path: Path) -> None:
    """Bitwise, from memory to disk and from disk to memory, and byte for byte the same files. Replicas read a share each."""
    (tmp_path / "disk").mkdir()
    for digests, num_updates in pool.run(4, resume_across_homes, tmp_path):
        assert len(set(map(str, digests))) == 1
        assert num_updates == STEPS
    first, second = (sorted((tmp_path / f"checkpoints-{number}").glob("*/rank-*.bin")) for number in (0, 1))
    assert len(first) == 4
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert torch.cuda.is_available() or not list((tmp_path / "disk").iterdir())
