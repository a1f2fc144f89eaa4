"""Ranks in the order of a tree's leaf switches, on a cluster of four nodes that are dealt over two of them."""

import time

import pytest

from tests.slurm.cluster import RECIPE, SLURM
from tests.slurm.conftest import open_desk

LAYOUT = ("parallel.tp=2", "model.config.num_key_value_heads=2", "train.steps=10")


@pytest.mark.grid
def test_groups_of_tp_lie_below_one_switch_and_the_run_is_the_same(tmp_path) -> None:
    with open_desk(tmp_path, 4, MESHWRIGHT_CLUSTER_SWITCHES="2") as desk:
        nodes = ("launch.nodes=4", "launch.tp_across_nodes=true", "launch.switches=2@1", "launch.exclusive=true")
        answer = desk.meshwright("submit", *RECIPE, *SLURM, *nodes, *LAYOUT, "run.id=ordered")
        assert answer.code == 0, answer
        refused = desk.meshwright("submit", *RECIPE, *SLURM, *nodes, *LAYOUT, "launch.segment=2")
        assert refused.code == 86
        assert "launch.segment = 2\n    needs SLURM 23.11 or later, and here is 22.05" in refused.err
        deadline = time.monotonic() + 300
        while ": done" not in desk.log("ordered") and time.monotonic() < deadline:
            time.sleep(0.5)
        assert "nodes by switch, reordered: root.leaf1: n1 n3; root.leaf2: n2 n4\n" in desk.log("ordered")
        desk.train_here("here", *LAYOUT, "launch.ranks=4")
        assert desk.losses("ordered") == desk.losses("here")
        assert len(desk.losses("here")) == 10
