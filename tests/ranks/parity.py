"""Layouts beside the oracle: cases as values, and the body that runs many of them on one set of ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from framework.comm.connect import connect
from framework.mesh.topology import Topology
from framework.model.load import for_training
from framework.model.precision import DTYPES
from framework.plan.plan import make_plan, make_topology
from framework.recipe.derive import derive
from framework.recipe.schema import Batch, Launch, Memory, Optim, Parallel, Precision, Recipe, Train, Zero
from framework.verify.compare import TOLERANCES, ErrorRow, compare, render
from framework.verify.evidence import Evidence, TokenBatch, make_batches
from framework.verify.layout import initial_weights, is_followed, run_layout
from framework.verify.oracle import run_oracle
from tests.families import Family, build_config
from tests.ranks.pool import RankPool

STEPS = 3
CONTEXT = 9
# Divides into any of 1 to 4 ranks x 1 or 3 microbatches.
SEQUENCES = 36
STAGE_0 = Zero(stage=0)
DATA_PARALLEL = Parallel()
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A training run of a tiny model, and recipes by which it is laid out; they differ in nothing that may matter.

    `changes`: config values on top of the family's. `by_microbatch`: the oracle accumulates over the recipe's microbatches;
    else it takes each batch at once. A router's load-balancing loss is no sum over tokens, so there the microbatches do matter.
    """

    name: str
    family: Family
    layouts: Mapping[str, Recipe]
    changes: Mapping[str, Any] = field(default_factory=dict)
    by_microbatch: bool = False

    @property
    def config(self) -> PretrainedConfig:
        return for_training(build_config(self.family, **self.changes))

    @property
    def recipe(self) -> Recipe:
        """The oracle's."""
        recipe = next(iter(self.layouts.values()))
        rows = recipe.batch.sequences_per_microbatch if self.by_microbatch else recipe.batch.sequences_per_step
        return replace(recipe, batch=replace(recipe.batch, sequences_per_microbatch=rows))

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.recipe.precision.compute]

    def batches(self) -> list[TokenBatch]:
        recipe = self.recipe
        sequences, packs_documents = recipe.batch.sequences_per_step, recipe.data.isolates
        assert sequences is not None
        return make_batches(self.config, STEPS, sequences, recipe.batch.context, 11, packs_documents)


def small_recipe(
    precision: str,
    world: int,
    accumulation: int = 1,
    sequences: int = SEQUENCES,
    clip_norm: float | None = None,
    zero: Zero = STAGE_0,
    parallel: Parallel = DATA_PARALLEL,
) -> Recipe:
    """A recipe whose global batch does not depend on the layout.

    In fp32 Adam's eps is 1e-3, as in `meshwright verify`: at 1e-8 it divides rounding noise by itself.
    """
    master = "fp32" if precision == "bf16" else precision
    dp = world // (parallel.tp * parallel.pp * parallel.cp)
    return Recipe(
        train=Train(steps=STEPS, seed=5),
        batch=Batch(
            sequences_per_step=sequences,
            sequences_per_microbatch=sequences // (dp * accumulation),
            context=CONTEXT,
        ),
        memory=Memory(compile="never"),
        precision=Precision(precision, master, master),  # type: ignore[arg-type]
        optim=Optim(lr=1e-2, eps=1e-8 if precision == "fp64" else 1e-3, clip_norm=clip_norm),
        parallel=parallel,
        zero=zero,
        launch=Launch(ranks=world, device="cpu"),
    )


def topology_of(recipe: Recipe, config: PretrainedConfig) -> Topology:
    return make_topology(recipe, config)


def run_cases(rank: int, world: int, rendezvous: str, cases: Sequence[Case]) -> dict[str, list[ErrorRow]]:
    """Body: every layout, on the first so many ranks as it asks for; then the ranks that were in all of them share the
    cases and compare each with its oracle."""
    found = train_layouts(rank, world, rendezvous, cases)
    everywhere = min(derive(recipe).world for case in cases for recipe in case.layouts.values())
    rows = {}
    for case in cases[rank::everywhere] if rank < everywhere else ():
        expected = None if is_followed(case.recipe) else expect(case)
        for label in case.layouts:
            layout = found[case.name, label]
            rows[f"{case.name}, {label}"] = compare(layout, expected or expect(case, layout))
    return rows


def train_layouts(rank: int, world: int, rendezvous: str, cases: Sequence[Case]) -> dict[tuple[str, str], Evidence]:
    """Body: the evidence of each case's layouts, by case and label, on the ranks that were in it."""
    by_topology: dict[Topology, list[tuple[Case, str]]] = {}
    for case in cases:
        for label, recipe in case.layouts.items():
            by_topology.setdefault(topology_of(recipe, case.config), []).append((case, label))
    found = {}
    for number, (topology, layouts) in enumerate(by_topology.items()):
        if rank < topology.world:
            mesh = connect(topology, CPU, f"{rendezvous}-{number}", rank)
            for case, label in layouts:
                found[case.name, label] = run_layout(make_plan(case.layouts[label], case.config), case.batches(), mesh)
            mesh.close()
    return found


def expect(case: Case, layout: Evidence | None = None) -> Evidence:
    """The oracle's evidence; it follows the layout's if one is given. A recipe that clips must do so in each step, or it would
    test nothing."""
    weights = initial_weights(case.config, case.recipe.train.seed, adapter=case.recipe.adapter)
    dtype = DTYPES[case.recipe.precision.compute]
    evidence = run_oracle(case.recipe, case.config, weights, case.batches(), dtype, CPU, layout)
    limit = case.recipe.optim.clip_norm
    assert limit is None or min(evidence.norms) > limit, (
        f"{case.name}: norms {evidence.norms} are not clipped at {limit}"
    )
    return evidence


def assert_equal(pool: RankPool, world: int, cases: Sequence[Case], body: Callable[..., Any] = run_cases) -> None:
    """All layouts, of at most `world` ranks, equal their oracles within the tolerance of their precision."""
    rows: dict[str, list[ErrorRow]] = {}
    for of_rank in pool.run(world, body, cases, timeout_s=300):
        rows |= of_rank
    tolerances = {f"{case.name}, {label}": case.tolerance for case in cases for label in case.layouts}
    assert rows.keys() == tolerances.keys()
    failed = {name: each for name, each in rows.items() if worst_error(each) > tolerances[name]}
    assert not failed, "\n\n".join(f"{name}\n{render(each, tolerances[name])}" for name, each in failed.items())


def worst_error(rows: Iterable[ErrorRow]) -> float:
    return max(row.error for row in rows)
