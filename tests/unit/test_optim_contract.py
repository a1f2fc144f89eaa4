"""The table of optimizers: each has its states, and is refused over shards of another kind than it updates."""

from dataclasses import replace
from typing import get_args, get_type_hints
from unittest.mock import patch

import pytest
import torch

from framework.errors import LayoutError
from framework.optim.optimizers import FlatOptimizer, state_names
from framework.optim.update_rules import OPTIMIZERS, FlatShard, ShardGroup, UpdateKind
from framework.recipe.schema import Optim

CPU = torch.device("cpu")


def make_group(kind: UpdateKind = UpdateKind.PER_ELEMENT) -> ShardGroup:
    return ShardGroup("default", (FlatShard((), torch.ones(5), torch.ones(5)),), 1.0, 0.0, kind)


def test_the_table_has_what_a_recipe_may_name() -> None:
    assert set(OPTIMIZERS) == set(get_args(get_type_hints(Optim)["name"]))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_update_moves_values_and_keeps_its_states(name: str) -> None:
    optim, group = Optim(name=name), make_group()  # type: ignore[arg-type]
    optimizer = FlatOptimizer(optim, [group], CPU)
    optimizer.step(1e-2, torch.ones((), dtype=torch.float64), torch.tensor(False), step=0)
    (shard,) = optimizer.shards
    assert (shard.value < 1).all()
    assert [optimizer.state(shard, each).shape for each in state_names(optim)] == [(5,)] * len(state_names(optim))


def test_an_optimizer_of_whole_matrices_is_refused_over_flat_shards() -> None:
    matrices = replace(OPTIMIZERS["sgd"], kind=UpdateKind.WHOLE_MATRIX)
    with (
        patch.dict(OPTIMIZERS, {"sgd": matrices}),
        pytest.raises(LayoutError, match=r"optim\.name=sgd updates whole matrices"),
    ):
        FlatOptimizer(Optim(name="sgd"), [make_group()], CPU)
    with pytest.raises(LayoutError, match=r"optim\.name=adamw updates single elements"):
        FlatOptimizer(Optim(name="adamw"), [make_group(UpdateKind.WHOLE_MATRIX)], CPU)
