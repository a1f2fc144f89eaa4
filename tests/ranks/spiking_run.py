"""Runs of the whole program whose data has a bad stretch, and a ledger of the samples that each step was trained on."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from framework.comm.connect import connect
from framework.data.loader import Loader
from framework.data.order import index_samples
from framework.data.pack import Microbatch
from framework.data.prepare import prepare
from framework.errors import MeshwrightError
from framework.lease import Lease
from framework.mesh.topology import Topology
from framework.model.load import load_config
from framework.monitor.watchdog import Watchdog
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.recipe.schema import Recipe
from framework.track.jsonl import Jsonl, read_records
from framework.track.report import Observers, RunInfo
from framework.train import rank as train
from tests import tiny_run

SEQUENCES = 4
STEPS = 70
FIRST_BAD = 61
BAD = (60 * SEQUENCES, 63 * SEQUENCES)  # the samples of steps 61 to 63, unless some were left out before

Patch = Callable[[], AbstractContextManager[Any]]


def compose_run(place: Path, *words: str) -> Recipe:
    """place: a folder with a corpus."""
    recipe = compose(
        [
            *tiny_run.RECIPE,
            f"data.sources.files.path={place}/corpus",
            f"data.root={place}/data",
            "launch.ranks=1",
            "launch.device=cpu",
            f"batch.sequences_per_step={SEQUENCES}",
            "batch.sequences_per_microbatch=1",
            "optim.lr=0.003",
            "optim.schedule.name=constant",
            f"train.steps={STEPS}",
            "checkpoint.keep=20",
            "checkpoint.every_steps=10",
            *words,
        ]
    ).require()
    prepare(recipe)
    return recipe


def spoil(microbatch: Microbatch, seed: int) -> Microbatch:
    """Words in no order."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 300, microbatch.input_ids.shape, generator=generator)
    return replace(microbatch, input_ids=noise, labels=noise.roll(-1, -1))


@dataclass(frozen=True)
class Ended:
    """How a rank's run ended. ledger: for each batch that was asked for, in order, the cursor and this rank's samples."""

    code: int
    message: str
    ledger: list[tuple[int, list[int]]]


def train_body(
    rank: int,
    world: int,
    rendezvous: str,
    recipe: Recipe,
    run_dir: Path,
    bad: Sequence[int] = BAD,
    *patches: Patch,
) -> Ended:
    """bad: samples [first, stop). patches: more of this process."""
    ledger: list[tuple[int, list[int]]] = []
    whole = Loader.batch

    def batch(loader: Loader, cursor: int) -> list[Microbatch]:
        indices = index_samples(cursor + loader._offsets[0], loader._skipped).tolist()
        ledger.append((cursor, indices))
        found = whole(loader, cursor)
        return [
            spoil(rows, index) if bad[0] <= index < bad[1] else rows for rows, index in zip(found, indices, strict=True)
        ]

    def open_observers(_recipe: Recipe, folder: Path, info: RunInfo, lease: Lease, _known: Any) -> Observers:
        observers = Observers([Jsonl(folder, lease=lease)])
        observers.open(info)
        return observers

    tp = recipe.parallel.tp
    mesh = connect(Topology(dp=world // tp, tp=tp), torch.device("cpu"), rendezvous, rank)
    with ExitStack() as stack, Watchdog() as watchdog:
        stack.enter_context(patch.object(Loader, "batch", batch))
        stack.enter_context(patch.object(train, "open_observers", open_observers))
        for each in patches:
            stack.enter_context(each())
        plan, message = make_plan(recipe, load_config(recipe.model)), ""
        try:
            staged = recipe if recipe.train.stages else None
            code = train.train_connected(plan, prepare(recipe), mesh, Lease(run_dir), watchdog, whole=staged)
        except (MeshwrightError, Killed) as error:
            code, message = getattr(error, "exit_code", -9), str(error)
    mesh.close()
    return Ended(code, message, ledger)


class Killed(BaseException):
    """What nothing in a run catches, in place of a kill: the ranks of the pool live on."""


def kill_at(target: str) -> AbstractContextManager[Any]:
    """Ends the run where `target` would be called."""

    def die(*args: Any, **named: Any) -> None:
        raise Killed(target)

    return patch(target, die)


def killing(target: str) -> Patch:
    return partial(kill_at, target)


def losses_of(run_dir: Path) -> dict[int, float]:
    """By step; each was reported once."""
    records = [(record["step"], record["loss"]) for record in read_records(run_dir / "metrics.jsonl")]
    assert len(dict(records)) == len(records)
    return dict(records)


def trained_samples(ended: Sequence[Ended]) -> dict[int, list[int]]:
    """What the steps that count were trained on, by cursor: the last that each cursor gave, of all ranks."""
    return {
        cursor: sorted(index for each in ended for index in dict(each.ledger)[cursor])
        for cursor in dict(ended[0].ledger)
    }
