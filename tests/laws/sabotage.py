"""What the files of sabotage share: bodies that train a case under one sabotage after another.

All runs of a case have one mesh and one oracle: a control that was run again beside each sabotage would say the same each time.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.verify.compare import compare
from framework.verify.evidence import Evidence
from framework.verify.layout import is_followed, run_layout
from tests.ranks.parity import CPU, Case, expect, topology_of
from tests.ranks.pool import RankPool

Sabotage = Callable[[], AbstractContextManager[Any]]
# The worst relative error of each quantity, by sabotage.
Errors = dict[str, dict[str, float]]


def whole() -> AbstractContextManager[Any]:
    """No sabotage."""
    return nullcontext()


def train_each(
    rank: int, world: int, rendezvous: str, sabotages: Sequence[Sabotage], of: Case, around: Sabotage = whole
) -> dict[str, Evidence]:
    """Body: the case's evidence by sabotage, each of which ends with its run, within `around`."""
    (recipe,) = of.layouts.values()
    mesh = connect(topology_of(recipe, of.config), CPU, rendezvous, rank)
    found = {}
    for sabotage in sabotages:
        with around(), sabotage():
            found[sabotage.__name__] = run_layout(make_plan(recipe, of.config), of.batches(), mesh)
    mesh.close()
    return found


def compare_each(
    rank: int, world: int, rendezvous: str, sabotages: Sequence[Sabotage], of: Case, around: Sabotage = whole
) -> Errors:
    """Body: `train_each`, compared with the oracle on rank 0."""
    found = train_each(rank, world, rendezvous, sabotages, of, around)
    if rank > 0:
        return {}
    expected = None if is_followed(of.recipe) else expect(of)
    return {
        name: {row.quantity: row.error for row in compare(each, expected or expect(of, each))}
        for name, each in found.items()
    }


def errors_of(pool: RankPool, sabotages: Sequence[Sabotage], of: Case, around: Sabotage = whole) -> Errors:
    """Errors without any sabotage, as `whole`, and under each."""
    world = of.recipe.launch.ranks
    assert world is not None
    return pool.run(world, compare_each, [whole, *sabotages], of, around)[0]
