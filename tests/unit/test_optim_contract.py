"""The table of optimizers: each has its states."""

from typing import get_args, get_type_hints

import pytest
import torch

from framework.optim.optimizers import FlatOptimizer, state_names
from framework.optim.update_rules import OPTIMIZERS, FlatShard, ShardGroup
from framework.recipe.schema import Optim

CPU = torch.device("cpu")


def make_group() -> ShardGroup:
    return ShardGroup("default", (FlatShard((), torch.ones(5), torch.ones(5)),), 1.0, 0.0)


def test_the_table_has_what_a_recipe_may_name() -> None:
    assert set(OPTIMIZERS) == set(get_args(get_type_hints(Optim)["name"]))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"muon"}))  # whose rule moves the momentum only
def test_an_update_moves_values_and_keeps_its_states(name: str) -> None:
    optim, group = Optim(name=name), make_group()  # type: ignore[arg-type]
    optimizer = FlatOptimizer(optim.name, optim, [group], CPU)
    optimizer.step(1e-2, torch.ones((), dtype=torch.float64), torch.tensor(False), step=0)
    (shard,) = optimizer.shards
    assert (shard.value < 1).all()
    assert [optimizer.state(shard, each).shape for each in state_names(optim)] == [(5,)] * len(state_names(optim))
