"""The surroundings of a rank with a GPU, which no CPU run has: allocator, cores, communicators in debug mode."""

import os
from dataclasses import replace
from datetime import timedelta
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from framework.comm import connect
from framework.comm.communicator import Communicator
from framework.comm.groups import TOKEN_AXES, plan_groups
from framework.host import find_near_cores
from framework.launch import process
from framework.launch.process import ALLOCATOR_VARIABLES, LEAST_CORES, prepare_gpu_rank
from framework.launch.slurm import CPUS_OF_GPU_RANK, choose_cpus
from framework.mesh.layout import Layout
from framework.mesh.topology import Axis, Topology
from framework.model.load import load_config
from framework.model.units import Unit
from framework.parallel.zero.buffer_plan import lifetimes_of
from framework.parallel.zero.plan_buffers import plan_buffers, shard_over_batch
from framework.plan.candidate import resolve_target
from framework.plan.plan import make_plan
from framework.plan.state_bytes import COMMUNICATOR_BYTES, CONTEXT_BYTES, MESSAGES_BYTES
from framework.recipe.compose import compose
from framework.recipe.schema import Launch, Zero


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*ALLOCATOR_VARIABLES, "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_segments_of_the_allocator_are_expandable_unless_the_user_has_chosen(environment: pytest.MonkeyPatch) -> None:
    prepare_gpu_rank()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    environment.delenv("PYTORCH_ALLOC_CONF")
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    prepare_gpu_rank()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(("num_cores", "rank", "is_told"), [(1, 0, True), (LEAST_CORES, 0, False), (1, 3, False)])
def test_a_rank_with_too_few_cores_says_so_once(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_cores: int, rank: int, is_told: bool
) -> None:
    environment.setattr(process, "count_cores", lambda: num_cores)
    environment.setenv("RANK", str(rank))
    prepare_gpu_rank()
    assert ("WARNING: a rank with a GPU may use 1 of" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (Launch(gres="gpu:h100"), CPUS_OF_GPU_RANK),
        (Launch(gres="gpu", cpus_per_rank=3), 3),
        (Launch(gres=None), None),
        (Launch(gres="gpu", device="cpu"), None),
    ],
)
def test_slurm_gives_a_rank_with_a_gpu_several_cores(launch: Launch, expected: int | None) -> None:
    assert choose_cpus(launch) == expected


@pytest.mark.parametrize("is_debug", [False, True])
def test_ranks_that_compare_what_they_start_can_do_so_over_every_axis(
    monkeypatch: pytest.MonkeyPatch, is_debug: bool
) -> None:
    """By tensors of the CPU, over the group of each axis; second groups of reduce-scatters compare over the first."""
    made: dict[str, str] = {}

    def persist(build: Any, *_: Any) -> object:
        made[build.args[0].name] = build.args[0].backend
        return object()

    monkeypatch.setattr(connect, "persist", persist)
    monkeypatch.setattr(connect, "set_group_timeout", lambda *_: None)
    monkeypatch.setattr(connect.dist, "PrefixStore", lambda name, store: SimpleNamespace())
    topology, backends = Topology(dp=4, ep=2), connect.choose_backends("cuda", is_debug)
    axes = connect.join_axes(topology, 0, backends, None, timedelta(seconds=1))  # type: ignore[arg-type]
    compared = {name: backend for name, backend in made.items() if not name.startswith("scatter ")}
    assert {"world 0", "tokens ep 0"} <= compared.keys()
    assert axes["ep"].group is not axes["world"].group
    on_cpu = {name for name, backend in compared.items() if "cpu:gloo" in backend}
    assert on_cpu == (compared.keys() if is_debug else {"world 0"})


# Parameters of a layer of Qwen3 0.6B and of Llama 70B, and a scalar that would move all that lies behind it.
UNITS = {
    "qwen3_0_6b": {
        "q": (2048, 1024),
        "kv": (2, 1024, 1024),
        "mlp": (3, 3072, 1024),
        "head norms": (2, 128),
        "norms": (2, 1024),
    },
    "llama_70b": {"qo": (2, 8192, 8192), "kv": (2, 1024, 8192), "mlp": (3, 28672, 8192), "norms": (2, 8192)},
    "with a scalar": {"scalar": (1,), "q": (4096, 4096), "norm": (4096,)},
}


@pytest.mark.parametrize("shapes", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("within", ["shard", "all"])
def test_parts_and_parameters_begin_at_addresses_of_wide_loads(shapes: dict[str, tuple[int, ...]], within: Any) -> None:
    """At 16 bytes, in bf16, on 7 to 1,024 ranks: else NCCL, cuBLAS and fused kernels load a few bytes at a time."""
    unit, sixteen_bytes = Unit("layers.0", ("layers.0",), tuple(shapes)), 8
    layouts = shard_over_batch({name: Layout(shape) for name, shape in shapes.items()})
    groups, dtypes = dict.fromkeys(shapes, "default"), dict.fromkeys(shapes, torch.bfloat16)
    lifetimes = lifetimes_of(Zero(stage=3, optimizer_within=within))
    for world, size in ((7, 7), (24, 8), (56, 56), (256, 256), (1024, 8), (1024, 1024)):
        for rank in (1, world - 1):
            axes = {
                "shard": Communicator(Axis("shard", size, rank % size)),
                "replica": Communicator(Axis("replica", world // size, rank // size)),
            }
            [buffer] = plan_buffers([unit], layouts, groups, dtypes, None, lifetimes, axes)
            starts = {slot.name: slot.start for slot in buffer.slots} | {
                "part": buffer.part_start,
                "owned": buffer.start,
            }
            assert {name for name, start in starts.items() if start % sixteen_bytes} <= {"scalar"}
            assert buffer.numel == sum(prod(shape) for shape in shapes.values())
            assert 0 <= buffer.numel_padded - buffer.numel < 64 * world


@pytest.mark.parametrize(
    "topology",
    [
        Topology(dp=8, shard=8),
        Topology(dp=8, shard=4),
        Topology(pp=2, dp=2, tp=2, shard=2, kv=2),
        Topology(pp=4, dp=4, cp=2, tp=2, ep=4, shard=8, expert_shard=2, ulysses=2),
        Topology(pp=2, dp=8, ep=4, ep_inner=2, shard=8, expert_shard=2, embedding_ranks=(0, 0)),
    ],
)
def test_communicators_are_planned_as_they_are_made(topology: Topology) -> None:
    """On rank 0, from sizes and strides alone; those that carry only messages are started without an all-reduce."""
    backends = connect.choose_backends("cuda", is_debug=False)
    planned, made = (list(plan_groups(axes, backends)) for axes in (topology.outlines(), topology.axes(0)))
    assert [replace(each, ranks=()) for each in planned] == [replace(each, ranks=()) for each in made]
    assert len({each.ranks for each in made if not each.use}) == sum(not each.use for each in made)
    assert {each.axis for each in made if each.only_messages} <= {"pp", *TOKEN_AXES}
    assert any(each.is_urgent for each in made)
    assert not any(each.is_urgent for each in made if each.use == "scatter")


def test_groups_that_carry_only_messages_are_started_without_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []

    class Group:
        def __init__(self, name: str):
            self.name = name

        def _get_backend(self, device: torch.device) -> "Group":
            return self

        def eager_connect_single_device(self, device: torch.device) -> None:
            started.append((self.name, "eagerly"))

    monkeypatch.setattr(connect.dist, "all_reduce", lambda x, group: started.append((group.name, "all_reduce")))
    cpu, groups = torch.device("cpu"), {name: Group(name) for name in ("world", "pp", "scatter", "tokens")}
    axes = [
        Communicator(Axis(name, 2, 0, (0, 1)), groups[group], scatter)
        for name, group, scatter in (
            ("world", "world", None), ("batch", "world", None), ("pp", "pp", None), ("shard", "world", groups["scatter"]),
            ("ep", "tokens", None), ("ep_inner", "tokens", None),
        )
    ]  # fmt: skip
    connect._start_nccl(axes, cpu)
    assert started == [("world", "all_reduce"), ("pp", "eagerly"), ("scatter", "all_reduce"), ("tokens", "eagerly")]


@pytest.mark.parametrize("words", [[], ["parallel.tp=2"], ["parallel.pp=2"], ["parallel.cp=2", "zero.shard_within=4"]])
def test_a_plan_counts_the_communicators_of_its_topology(words: list[str]) -> None:
    base = ["model=llama3_1_8b", "cluster=h100_ib", "launch.device=cuda", "launch.ranks=8", "zero=stage_3"]
    recipe = resolve_target(compose([*base, "batch.sequences_per_step=16", *words], []).require())
    plan = make_plan(recipe, load_config(recipe.model))
    made = plan_groups(plan.topology.axes(0), connect.choose_backends("cuda", is_debug=False))
    num_bytes = sum(MESSAGES_BYTES if each.only_messages else COMMUNICATOR_BYTES for each in made)
    assert plan.memory_model.pipelines.outside(plan.candidate) == CONTEXT_BYTES + num_bytes


@pytest.mark.parametrize(
    ("node", "cpulist", "allowed", "expected"),
    [
        ("1", "4-7,12-15", set(range(16)), {4, 5, 6, 7, 12, 13, 14, 15}),
        ("1", "4-7,12-15", {4, 5, 6, 7, 0, 1}, {4, 5, 6, 7}),  # what the job gives, as far as it is there
        ("1", "4-7,12-15", {0, 1, 2, 4, 5, 6}, {0, 1, 2, 4, 5, 6}),  # three are too few
        ("-1", "0-15", {2, 3}, {2, 3}),  # a machine of one node
        (None, "0-3", {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}),
    ],
)
def test_a_rank_stays_near_its_gpu(
    tmp_path: Path, node: str | None, cpulist: str, allowed: set[int], expected: set[int]
) -> None:
    address = "0000:1b:00.0"
    for folder, name, text in (
        (f"bus/pci/devices/{address}", "numa_node", node), ("devices/system/node/node1", "cpulist", f"{cpulist}\n")
    ):  # fmt: skip
        (tmp_path / folder).mkdir(parents=True)
        if text is not None:
            (tmp_path / folder / name).write_text(text)
    assert find_near_cores(address, allowed, tmp_path) == expected


def test_the_address_of_a_gpu_is_that_of_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9B, pci_device_id=0)
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(connect, "stay_near", asked.append)
    connect.stay_beside(torch.device("cpu"))
    connect.stay_beside(torch.device("cuda", 3))
    assert asked == ["0000:9b:00.0"]
