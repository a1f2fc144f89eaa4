"""Offload is a home and not an algorithm: whatever lives on the host, every bit of a training run is the same."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.schema import Offload, Recipe
from framework.verify.evidence import Evidence, make_batches
from framework.verify.layout import run_layout
from tests.families import build_config, family
from tests.ranks.parity import CONTEXT, CPU, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.recorded import LAYOUTS, SEQUENCES, digest

STEPS = 3
# What `make test` runs: a copy of parameters on two stages of a rank, replicas that divide the update, all of stage 3.
FEW = ("zero 3", "hsdp, bf16, updates divided", "dualpipe_v, tied")


def offload(recipe: Recipe, optimizer: float, parameters: float) -> Recipe:
    return replace(recipe, memory=replace(recipe.memory, offload=Offload(optimizer, parameters)))


def variants_of(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe, and what of it lives elsewhere."""
    fractions = [
        (0.0, 0.0),
        (0.5, 0.0),
        (1.0, 0.0),
        *([(0.0, 1.0), (0.5, 0.5), (1.0, 1.0)] if recipe.zero.stage == 3 else []),
    ]
    return {f"optimizer {some}, parameters {other}": offload(recipe, some, other) for some, other in fractions}


def describe(evidence: Evidence) -> dict[str, Any]:
    """Every bit of it."""
    return {
        "losses": [each.hex() for each in evidence.losses],
        "norms": [each.hex() for each in evidence.norms],
        "gradients": digest(evidence.gradients),
        "weights": digest(evidence.weights),
    }


def train_variants(rank: int, world: int, rendezvous: str, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Body: by layout and variant, every bit of a short run."""
    found = {}
    for number, name in enumerate(names):
        layout = LAYOUTS[name]
        if rank >= layout.world:
            continue
        config = build_config(family(layout.model), **layout.changes)
        config.use_cache = False
        mesh = connect(topology_of(layout.recipe, config), CPU, f"{rendezvous}-{number}", rank)
        batches = make_batches(config, STEPS, SEQUENCES, CONTEXT, seed=11)
        found[name] = {
            label: describe(run_layout(make_plan(recipe, config), batches, mesh))
            for label, recipe in variants_of(layout.recipe).items()
        }
        mesh.close()
    return found


def assert_homes_change_nothing(pool: RankPool, names: Sequence[str]) -> None:
    found = pool.run(max(LAYOUTS[name].world for name in names), train_variants, names, timeout_s=600)[0]
    assert found.keys() == set(names)
    for name, by_variant in found.items():
        first, *others = by_variant.items()
        for label, evidence in others:
            assert evidence == first[1], (name, label)


def test_a_run_with_states_on_the_host_is_the_same_run(pool: RankPool) -> None:
    assert_homes_change_nothing(pool, FEW)


@pytest.mark.grid
@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - set(FEW)))
def test_any_layout_with_states_on_the_host_is_the_same_run(pool: RankPool, name: str) -> None:
    assert_homes_change_nothing(pool, [name])
