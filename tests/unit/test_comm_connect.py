"""Connect: what the launcher started must be what the recipe's topology asks for."""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from framework.comm.connect import connect
from framework.errors import TopologyError
from framework.mesh.topology import AXIS_NAMES, Topology
from framework.plan.plan import make_topology
from framework.recipe.compose import compose
from framework.recipe.derive import derive
from framework.train import rank as train

CPU = torch.device("cpu")


@pytest.fixture
def unlaunched(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unlaunched")
def test_one_rank_needs_no_launcher_and_no_process_group():
    mesh = connect(Topology(), CPU)
    assert not dist.is_initialized()
    assert mesh.rank == 0
    assert {(name, axis.size, axis.rank, axis.ranks, axis.groups) for name, axis in mesh.axes.items()} == {
        (name, 1, 0, (0,), ()) for name in AXIS_NAMES
    }
    mesh.close()


@pytest.mark.usefixtures("unlaunched")
def test_several_ranks_without_a_launcher_are_an_error():
    with pytest.raises(TopologyError, match=r"rank 0 of 1 launched, but .* 1 x 2 x 1 x 2 = 4: launch 4 ranks"):
        connect(Topology(dp=2, tp=2), CPU)


def test_a_launched_world_of_another_size_is_an_error(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for topology in (Topology(), Topology(dp=4)):
        with pytest.raises(TopologyError, match="rank 1 of 2 launched"):
            connect(topology, CPU)


def test_a_rendezvous_needs_a_rank_of_the_world(tmp_path):
    rendezvous = (tmp_path / "rendezvous").as_uri()
    for rank in (None, 2, -1):
        with pytest.raises(TopologyError):
            connect(Topology(dp=2), CPU, rendezvous, rank)


@pytest.mark.parametrize(
    ("here", "nodes", "degree"), [("2", "2", 2), ("4", "1", 4), ("3", "2", None), ("1", "2", None)]
)
def test_hsdp_shards_within_the_recipes_nodes_and_refuses_others_before_anyone_connects(
    monkeypatch, tmp_path, here, nodes, degree
):
    """Four ranks on two nodes; three of them on one node and one on the other is refused on both."""
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": here, "GROUP_WORLD_SIZE": nodes}.items():
        monkeypatch.setenv(name, value)
    launch = ["launch.ranks=4"] if nodes == "1" else ["launch=slurm", "launch.nodes=2", "launch.ranks_per_node=2"]
    words = ["zero=hsdp", "precision=fp32", *launch, "batch.sequences_per_step=32"]
    recipe = compose(words).require()
    if degree is not None:
        train.check_nodes(recipe, derive(recipe))
        assert make_topology(recipe, LlamaConfig()).shard == degree
    else:
        monkeypatch.setattr(train, "connect", lambda *words, **more: pytest.fail("a rank has connected"))
        with pytest.raises(TopologyError, match=r"zero\.shard_within=node needs equally many ranks on every node"):
            train.train_rank(recipe, tmp_path)


@pytest.mark.parametrize(
    ("schedule", "embedding"),
    [
        ("1f1b", (0, 1)),
        ("interleaved", (0, 1)),
        ("zbv", (0,)),
        ("dualpipe_v", (0,)),
        ("0F0,0B0\n1F0,1B0\n", (0, 1)),
        ("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", (0,)),
        ("1F0,2F0,2B0,1B0\n0F0,3F0,3B0,0B0\n", (0,)),
        ("1F0,1B0\n0F0,0B0\n", (0, 1)),
    ],
)
def test_the_schedule_says_which_ranks_share_an_embedding(tmp_path, schedule, embedding):
    """One that goes through the ranks and back has the first and the last stage on one, a table on whichever it likes."""
    words = [f"pipeline.schedule={schedule}", "batch.sequences_per_step=4"]
    if "\n" in schedule:
        table = tmp_path / "mine.csv"
        table.write_text(schedule)
        words = [f"pipeline.table={table}", "batch.sequences_per_step=1"]
    recipe = compose(["parallel.pp=2", "launch.ranks=2", "batch.sequences_per_microbatch=1", *words]).require()
    assert make_topology(recipe, LlamaConfig()).ranks("embedding", 0) == embedding
