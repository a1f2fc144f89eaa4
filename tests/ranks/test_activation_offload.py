"""Where activations lie between forward and backward changes no bit of a training run, in any layout."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from framework.comm.connect import connect
from framework.parallel.activation_offload import HostBlock, HostPool
from framework.plan.plan import make_plan
from framework.recipe.schema import Offload, Parallel, Pipeline, Recipe, Zero
from framework.verify.evidence import make_batches
from framework.verify.layout import run_layout
from tests.families import build_config, family
from tests.grid import IN_TURN
from tests.ranks.parity import CONTEXT, CPU, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.recorded import LAYOUTS, SEQUENCES, Layout, describe

pytestmark = IN_TURN

STEPS = 2
MORE = {
    "1f1b": Layout("llama", 2, parallel=Parallel(pp=2), pipeline=Pipeline("1f1b"), accumulation=4),
    "compiled": Layout("llama", 2, rest={"memory": {"compile": "always"}}),
    "ep": Layout("qwen3_moe", 2, parallel=Parallel(ep=2)),
    "ep in halves, zero 3": Layout("mixtral", 2, zero=Zero(3), parallel=Parallel(ep=2, expert_overlap=True)),
    "ep x sp": Layout("qwen3_moe", 4, parallel=Parallel(tp=2, ep=2)),
    "ep x pp": Layout("qwen3_moe", 4, "bf16", parallel=Parallel(pp=2, ep=2), pipeline=Pipeline("zb_h1")),
}
ALL = LAYOUTS | MORE
# What runs each day.
FEW = ("zbv, zero 2, experts",)


# Of a stage's layers those on the host, and the policy of activation checkpointing.
VARIANTS = ((0.5, "none"), (1.0, "full"))
MORE_VARIANTS = (*VARIANTS, (1.0, "none"), (0.5, "full"))


def offload(recipe: Recipe, fraction: float, policy: str) -> Recipe:
    memory = replace(recipe.memory, activation_checkpointing=policy, offload=Offload(activations=fraction))  # type: ignore[arg-type]
    return replace(recipe, memory=memory)


@contextmanager
def counting_host_bytes() -> Iterator[list[int]]:
    taken: list[int] = []
    take = HostPool.take

    def counted(pool: HostPool, num_bytes: int) -> HostBlock:
        taken.append(num_bytes)
        return take(pool, num_bytes)

    with patch.object(HostPool, "take", counted):
        yield taken


def train_variants(
    rank: int, world: int, rendezvous: str, names: Sequence[str], variants: Sequence[tuple[float, str]]
) -> dict[str, Mapping[str, tuple[dict[str, Any], int]]]:
    """Body: by layout and variant every bit of a short run, and bytes that went to the host."""
    found: dict[str, Mapping[str, tuple[dict[str, Any], int]]] = {}
    for number, name in enumerate(names):
        layout = ALL[name]
        if rank >= layout.world:
            continue
        config = build_config(family(layout.model), **layout.changes)
        config.use_cache = False
        mesh = connect(topology_of(layout.recipe, config), CPU, f"{rendezvous}-{number}", rank)
        batches = make_batches(config, STEPS, SEQUENCES, CONTEXT, seed=11)
        by_variant = {}
        recipes = {"as it is": layout.recipe} | {str(each): offload(layout.recipe, *each) for each in variants}
        for label, recipe in recipes.items():
            with counting_host_bytes() as taken:
                by_variant[label] = describe(run_layout(make_plan(recipe, config), batches, mesh)), sum(taken)
        found[name] = by_variant
        mesh.close()
    return found


def assert_offload_changes_nothing(
    pool: RankPool, names: Sequence[str], variants: Sequence[tuple[float, str]] = VARIANTS
) -> None:
    world = max(ALL[name].world for name in names)
    found = pool.run(world, train_variants, names, variants, timeout_s=600)[0]
    assert found.keys() == set(names)
    for name, by_variant in found.items():
        (_, (expected, on_host)), *others = by_variant.items()
        assert on_host == 0
        for label, (evidence, num_bytes) in others:
            assert num_bytes > 0, (name, label)
            assert evidence == expected, (name, label)


def test_a_run_with_activations_on_the_host_is_the_same_run(pool: RankPool) -> None:
    assert_offload_changes_nothing(pool, FEW)


@pytest.mark.grid
@pytest.mark.parametrize("name", sorted(ALL))
def test_any_layout_with_activations_on_the_host_is_the_same_run(pool: RankPool, name: str) -> None:
    assert_offload_changes_nothing(pool, [name], MORE_VARIANTS)
