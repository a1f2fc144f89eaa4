"""Sums in two levels on simulated GPUs, four nodes of two ranks: their results, what leaves a node, and how much is launched."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from framework.comm import codec
from framework.comm.codec import BlockCodec, Rounding, Wire
from framework.comm.collectives import start_all_reduce, start_reduce_scatter
from framework.comm.communicator import Communicator, link_levels, read_traffic, subtract_traffic
from framework.comm.connect import Mesh
from framework.comm.transfer import upload
from framework.mesh.topology import Topology
from framework.plan.forecast_plan import _parameter_traffic, measure_leaving
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Offload, Parallel, Precision, Zero
from framework.train.step import train_step
from tests.codec_bound import error_bound
from tests.grid import IN_TURN, few_of
from tests.nccl.gpu import GPU, SimulatedGpu, move_to_host
from tests.nccl.gpu import installed as gpu_installed
from tests.nccl.layouts import Z3, Layout, build_layout, find_error
from tests.nccl.simulator import installed, run_ranks
from tests.ranks.parity import topology_of
from tests.ranks.quantized import arrived

pytestmark = IN_TURN

NODES, ON_NODE = 4, 2
WORLD = NODES * ON_NODE
EIGHT = Topology(dp=WORLD, shard=WORLD, ranks_per_node=ON_NODE, two_levels=True)
WIRES = [
    Rounding(torch.bfloat16),
    BlockCodec("int8", 16),
    BlockCodec("int4", 16),
    BlockCodec("int4", 16, is_rotated=True),
]
ODD = 37
WIDE = (("hidden_size", 64), ("intermediate_size", 128))
LARGE = (("hidden_size", 512), ("intermediate_size", 1408))


def sum_in_levels(terms: list[Tensor], wire: Wire) -> Tensor:
    """What a rank has of all ranks' terms for it."""
    nodes = [sum(arrived(each, wire) for each in terms[at : at + ON_NODE]) for at in range(0, WORLD, ON_NODE)]
    return sum(arrived(each, wire) for each in nodes)  # type: ignore[return-value,arg-type]


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("serial", [False, True])
def test_sums_are_those_of_messages_that_arrive(wire: Wire, serial: bool) -> None:
    """Bitwise: added in the order of ranks and of nodes, the second hop's parts where they belong; and the error is bounded."""
    xs = [torch.randn(WORLD, ODD, generator=torch.Generator().manual_seed(rank)) for rank in range(WORLD)]
    parts = [[x[place] for x in xs] for place in range(WORLD)]
    expected = [sum_in_levels(each, wire) for each in parts]

    def body(mesh: Mesh) -> tuple[list[float], list[float]]:
        axis, x = mesh.axis("shard"), upload(xs[mesh.rank].clone(), GPU)
        part = torch.empty(ODD, device=GPU)
        scattered = start_reduce_scatter(part, x, axis, wire=wire)
        whole = x.clone()
        summed = start_all_reduce(whole, axis, wire=wire)
        scattered.wait()
        summed.wait()
        return part.tolist(), whole.tolist()

    with installed():
        for x in xs:
            move_to_host(x)
        found = run_ranks(EIGHT, body, serial)
    for rank, (part, whole) in enumerate(found):
        assert part == expected[rank].tolist()
        assert torch.equal(torch.tensor(whole), torch.stack([arrived(each, wire) for each in expected]))
    if isinstance(wire, BlockCodec):
        for place, terms in enumerate(parts):
            exact, bound = sum(terms), sum(error_bound(wire, each) for each in terms)
            # A node's sum is coded as it has arrived: as large as the exact one and its error at most.
            nodes = [sum(terms[at : at + ON_NODE]) for at in range(0, WORLD, ON_NODE)]
            errors = [
                sum(error_bound(wire, each) for each in terms[at : at + ON_NODE]) for at in range(0, WORLD, ON_NODE)
            ]
            for node, error in zip(nodes, errors, strict=True):
                bound = bound + error_bound(wire, node.abs() + error)
            assert (expected[place] - exact).abs().le(bound).all()
            assert (expected[place] - exact).abs().max() > 0


# --- launches


class Launches(TorchDispatchMode):
    """Counter of operators that compute or copy something."""

    VIEWS = ("view", "transpose", "slice", "select", "unsqueeze", "unbind", "expand", "detach", "alias", "_unsafe_view")
    MEMORY = ("empty", "new_empty", "lift_fresh", "promote_types")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.overloadpacket.__name__.startswith(self.VIEWS + self.MEMORY)
        return func(*args, **(kwargs or {}))


def count_launches(nodes: int, on_node: int, wire: Wire) -> int:
    """Kernels and collectives of one reduction by one rank, whose messages nobody carries."""
    topology = Topology(dp=nodes * on_node, shard=nodes * on_node, ranks_per_node=on_node, two_levels=True)
    axes = link_levels({name: Communicator(axis, object()) for name, axis in topology.axes(0).items()})
    messages = count()

    def send(out: Tensor, x: Tensor, group: Any, async_op: bool) -> Any:
        next(messages)
        return SimpleNamespace(wait=lambda: None)

    with gpu_installed(), SimulatedGpu(), patch.object(codec, "dist", SimpleNamespace(all_to_all_single=send)):
        x, part = torch.zeros(topology.world * 32, device=GPU), torch.zeros(32, device=GPU)
        with Launches() as launches:
            start_reduce_scatter(part, x, axes["shard"], wire=wire).wait()
    return launches.count + next(messages)


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_a_reduction_launches_as_much_on_any_number_of_ranks(wire: Wire) -> None:
    counts = {count_launches(nodes, on_node, wire) for nodes, on_node in ((2, 2), (4, 2), (2, 8), (16, 8))}
    assert len(counts) == 1, counts
    assert isinstance(wire, BlockCodec) or counts == {6}  # two messages; to round and to add up, twice


# --- layouts

INT8 = replace(Z3, quantize_reduce="int8", quantize_min_elements=0)
INT4 = replace(INT8, quantize_reduce="int4_rotated")
# Two nodes of two ranks, and how far losses and norms are from one rank's.
LAYOUTS = {
    "zero 3, bf16": (Layout(4, zero=Z3, on_node=2, reduce="bf16"), 2e-3),
    "zero 0, bf16": (Layout(4, on_node=2, reduce="bf16"), 2e-3),
    "zero 3, int8": (Layout(4, 3, zero=INT8, on_node=2), 1e-2),
    "zero 2, int4": (Layout(4, zero=replace(INT4, stage=2), on_node=2), 0.1),
    "hsdp, int8": (Layout(4, zero=replace(INT8, shard_within=2), on_node=2), 1e-2),
    "hsdp, divided, int8": (Layout(4, zero=replace(INT8, shard_within=2, optimizer_within="all"), on_node=2), 1e-2),
    "tp 2, int8": (Layout(4, parallel=Parallel(tp=2), zero=INT8, on_node=2), 1e-2),
    "ep 2, int8": (Layout(4, family="mixtral", parallel=Parallel(ep=2), zero=INT8, on_node=2), 1e-2),
    "pp 2, int8": (Layout(4, 3, parallel=Parallel(pp=2), zero=INT8, on_node=1), 1e-2),
    "cp 2, int8": (Layout(4, parallel=Parallel(cp=2), zero=INT8, on_node=2), 1e-2),
    "away from home, int8": (
        Layout(4, zero=INT8, on_node=2, memory=Memory(offload=Offload(parameters=1.0, optimizer=1.0))),
        1e-2,
    ),
}
SHOWN = ("zero 0, bf16", "zero 3, int8")


@pytest.mark.parametrize("serial", few_of([False, True], lambda serial: not serial))
@pytest.mark.parametrize("name", few_of(LAYOUTS, SHOWN.__contains__))
def test_a_layout_on_nodes_is_near_one_rank(name: str, serial: bool) -> None:
    """Under NCCL's rules; the bound is that of the rounding, and the rounding is there."""
    layout, bound = LAYOUTS[name]
    with installed():
        error = find_error(layout, serial)
    assert 1e-6 < error < bound


def count_between_nodes(layout: Layout) -> list[tuple[int, int]]:
    """Of each rank, the bytes of parameters and of gradients that have left its node in a step."""

    def body(mesh: Mesh) -> tuple[int, int]:
        trained, batches = build_layout(layout, mesh)
        before = read_traffic(mesh.axes, between_nodes=True)
        train_step(trained, batches[0], 0, 1e-2)
        sent = subtract_traffic(read_traffic(mesh.axes, between_nodes=True), before)["shard"]
        return sent["all_gather"][1], sent["reduce_scatter"][1]

    with installed():
        return run_ranks(topology_of(layout.recipe, layout.config), body)


ALL_THREE = replace(
    Z3, quantize_gather="int8", secondary_shard="node", quantize_reduce="int4", quantize_min_elements=2000
)
EXACT = Layout(WORLD, sequences=WORLD, zero=Z3, on_node=ON_NODE, reduce="bf16", changes=WIDE)


@pytest.mark.parametrize("zero", [Z3, ALL_THREE], ids=["exact", "codes"])
def test_what_leaves_a_node_is_what_the_plan_says(zero: Zero) -> None:
    """Four nodes of two ranks, to the byte, and without codes by hand: of each unit k-1 parts, in fp32 where they are gathered
    and in bf16 where they are reduced."""
    layout = replace(EXACT, zero=zero)
    plan, found = make_plan(layout.recipe, layout.config), count_between_nodes(layout)
    for rank, (gathered, scattered) in enumerate(found):
        leaving = measure_leaving(plan, rank)
        assert (gathered, scattered) == (leaving["gathers"], leaving["reductions to shards"])
        assert leaving["gathers of copies"] == 0
        if zero is Z3:
            parts = [(each.numel_part, 1 + each.unit.startswith("layers.")) for each in plan.of_rank(rank).buffers]
            assert scattered == sum((NODES - 1) * numel * 2 for numel, _ in parts)
            assert gathered == sum((NODES - 1) * numel * 4 * times for numel, times in parts)


def test_codes_and_second_copies_cut_what_leaves_a_node_to_a_quarter() -> None:
    """In bf16, of layers with large matrices: 0.255 with a scale of 4 bytes for each 256 numbers, 0.25 without."""
    layouts = [replace(EXACT, zero=zero, changes=LARGE) for zero in (Z3, ALL_THREE)]
    leaving = []
    for layout in layouts:
        recipe = replace(layout.recipe, precision=Precision("bf16", "fp32", "bf16"))
        buffers = make_plan(recipe, layout.config).of_rank(0).buffers
        layers = [each for each in buffers if each.unit.startswith("layers.")]
        again = {each.unit: 1 for each in layers}
        leaving.append(sum(_parameter_traffic(layers, 1, torch.bfloat16, Communicator.least_leaving, again).values()))
    assert 0.25 < leaving[1] / leaving[0] < 0.26
