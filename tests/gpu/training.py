"""A tiny model on a device, and what its steps give."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from framework.comm.connect import connect
from framework.data.pack import Microbatch
from framework.model.precision import DTYPES
from framework.plan.plan import make_plan
from framework.recipe.schema import Recipe
from framework.train.build import build
from framework.train.step import TrainingRun, train_step
from framework.verify.evidence import keep_double, make_batches
from framework.verify.layout import share
from tests.families import build_config, family
from tests.ranks.parity import topology_of

LR = 1e-2


@dataclass(frozen=True)
class Training:
    """A run, and this rank's microbatches of each batch."""

    run: TrainingRun
    batches: list[list[Microbatch]]


def start(
    recipe: Recipe,
    device: torch.device,
    num_batches: int = 3,
    rendezvous: str | None = None,
    rank: int | None = None,
    checkpoints: Path | None = None,
    config: PretrainedConfig | None = None,
) -> Training:
    """checkpoints: where the values will be read from, instead of drawing them. config: of another model than the tiny one."""
    config = config or build_config(family("llama"))
    config.use_cache = False
    mesh = connect(topology_of(recipe, config), device, rendezvous, rank)
    batches = make_batches(config, num_batches, recipe.batch.sequences_per_step or 0, recipe.batch.context, seed=11)
    run = build(make_plan(recipe, config), mesh, resumes=checkpoints is not None)
    return Training(run, [share(batch, recipe.batch.sequences_per_microbatch, mesh) for batch in batches])


def train(recipe: Recipe, device: torch.device, rendezvous: str | None = None, rank: int | None = None) -> list[float]:
    """Loss and norm of three steps, one behind the other."""
    training = start(recipe, device, rendezvous=rendezvous, rank=rank)
    found: list[float] = []
    for step, microbatches in enumerate(training.batches):
        with keep_double(DTYPES[recipe.precision.compute]):
            values = train_step(training.run, microbatches, step, LR).read()
        found += [values.loss, values.gradient_norm]
    training.run.mesh.close()
    return found


def train_rank(rank: int, world: int, rendezvous: str, recipe: Recipe) -> list[float]:
    """Body: rank n on GPU n."""
    return train(recipe, torch.device("cuda", rank), rendezvous, rank)
