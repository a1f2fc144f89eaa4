"""Runs of the whole program whose data has a bad stretch, and a ledger of the samples that each step was trained on."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from framework.comm.connect import connect
from framework.data.loader import Loader
from framework.data.order import index_samples
from framework.data.pack import Microbatch
from framework.data.prepare import prepare
from framework.launch import train
from framework.mesh.topology import Topology
from framework.model.load import load_config
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.recipe.schema import Recipe
from framework.train.faults import StepWatch, StopRequest
from framework.train.phases import Phases
from tests import tiny_run

SEQUENCES = 4
BAD = (60 * SEQUENCES, 66 * SEQUENCES)  # the samples of steps 61 to 66, unless some were left out before


def compose_run(place: Path, *words: str) -> Recipe:
    """place: a folder with a corpus."""
    recipe = compose(
        [
            *tiny_run.RECIPE,
            f"data.sources.files.path={place}/corpus",
            f"data.root={place}/data",
            "launch.ranks=2",
            "launch.device=cpu",
            f"batch.sequences_per_step={SEQUENCES}",
            "batch.sequences_per_microbatch=1",
            "optim.lr=0.003",
            "optim.schedule.name=constant",
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


def train_body(
    rank: int, world: int, rendezvous: str, recipe: Recipe, run_dir: Path, bad: Sequence[int], *patches: Any
) -> tuple[int, list[tuple[int, list[int]]]]:
    """The exit code, and for each batch that was asked for, in order: the cursor and this rank's samples. bad: [first, stop).
    patches: more of this process, made here."""
    ledger: list[tuple[int, list[int]]] = []
    whole = Loader.batch

    def batch(loader: Loader, cursor: int) -> list[Microbatch]:
        indices = index_samples(cursor + loader._offsets[0], loader._skipped).tolist()
        ledger.append((cursor, indices))
        found = whole(loader, cursor)
        each = len(indices) // len(found)
        return [
            spoil(rows, indices[n * each]) if bad[0] <= indices[n * each] < bad[1] else rows
            for n, rows in enumerate(found)
        ]

    tp, pp = recipe.parallel.tp, recipe.parallel.pp
    mesh = connect(Topology(dp=world // (tp * pp), tp=tp, pp=pp), torch.device("cpu"), rendezvous, rank)
    with ExitStack() as stack, StopRequest() as stop, StepWatch(stop) as watch:
        stack.enter_context(patch.object(Loader, "batch", batch))
        for each in patches:
            stack.enter_context(each())
        plan = make_plan(recipe, load_config(recipe.model))
        code = train._train(plan, prepare(recipe), mesh, run_dir, stop, watch, Phases())
    mesh.close()
    return code, ledger
