"""Host waits of a step on GPUs, in each rank of a layout: none, but for rows that come to experts.

`tests/unit/test_step_waits.py` counts calls of one rank that would wait; here each tensor says where it is.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import framework
from framework.comm.connect import Mesh
from framework.comm.transfer import upload
from framework.mesh.topology import Topology
from framework.model.matmul import StackedMatmul
from framework.parallel.experts.route import ExpertRoute
from framework.recipe.schema import Parallel
from framework.train.step import train_step
from tests.grid import IN_TURN, few_of
from tests.nccl.gpu import CountReads, here
from tests.nccl.layouts import LAYOUTS, LR, Layout, build_layout
from tests.nccl.simulator import installed, run_ranks
from tests.ranks.parity import topology_of

pytestmark = IN_TURN

PACKAGE = Path(framework.__file__).parent
# Nothing of the step's own, by name of the layout.
NEVER = (
    "dp 2, zero 2", "dp 2, zero 3", "dp 2, zero 3, full", "dp 2, zero 3, sqrt", "dp 4, hsdp, divided update", "tp 2, overlap",
    "tp 2, regather", "cp 2, ring", "cp 2, ulysses", "cp 4, both", "pp 2, zb_h1", "pp 2, tied",
)  # fmt: skip


def count_waits(layout: Layout) -> list[Counter[str]]:
    """Waits of our own in a second step, of each rank by file."""

    def body(mesh: Mesh) -> Counter[str]:
        run, batches = build_layout(layout, mesh)
        train_step(run, batches[0], 0, LR)
        before = len(here().waits)
        with CountReads():
            train_step(run, batches[1], 1, LR)
        ours = [Path(each.rpartition(":")[0]) for each in here().waits[before:] if each.startswith(str(PACKAGE))]
        return Counter(str(each.relative_to(PACKAGE)) for each in ours)

    with installed():
        return run_ranks(topology_of(layout.recipe, layout.config), body)


@pytest.mark.parametrize("name", few_of(NEVER, lambda name: name != "cp 4, both"))
def test_no_host_waits_in_a_step(name: str) -> None:
    assert count_waits(LAYOUTS[name]) == [Counter()] * LAYOUTS[name].world


DOCUMENTS = ("dp 2, zero 3", "dp 2, zero 3, full", "cp 2, ring", "cp 2, ulysses", "cp 2, gather")


@pytest.mark.parametrize("name", few_of(DOCUMENTS, lambda name: name == "dp 2, zero 3, full"))
def test_documents_make_no_host_wait(name: str) -> None:
    assert count_waits(replace(LAYOUTS[name], pack="documents")) == [Counter()] * 2


def test_experts_multiplied_one_by_one_wait_for_the_numbers_of_padded_rows() -> None:
    """In fp32 no kernel multiplies all of them: once in each layer."""
    layout = replace(LAYOUTS["ep 2"], parallel=Parallel(ep=2, expert_padding=2.0))
    assert count_waits(layout) == [Counter({"model/matmul.py": layout.config.num_hidden_layers})] * 2


def send_rows(mesh: Mesh, is_padded: bool) -> tuple[list[Tensor], int]:
    """Eight bf16 experts of four ranks on two nodes: their outputs, and the gradients of tokens and of weights; and waits."""
    route = ExpertRoute(mesh.axis("ep_outer"), mesh.axis("ep_inner"), padding=4.0 if is_padded else None)
    random = torch.Generator().manual_seed(mesh.rank)
    scores, weight = torch.rand(24, 6, generator=random), torch.randn(2, 16, 16, generator=random).bfloat16()
    made = torch.randn(24, 16, generator=random).bfloat16(), torch.rand(24, 2, generator=random), scores, weight
    x, shares, scores, weight = (upload(each, mesh.device) for each in made)
    ids = scores.topk(2).indices  # no expert of the last rank
    layer = nn.Module()
    x, layer.weight = x.requires_grad_(), nn.Parameter(weight)
    before = len(here().waits)
    rows = route.plan(ids, 8)
    rows.depart(x, ids, shares)
    rows.pass_on()
    rows.depart_back(StackedMatmul(layer, "weight", is_transposed=False)(rows.arrive(), rows.plan.groups))
    rows.cross_back()
    out = rows.arrive_back()
    out.float().square().sum().backward()
    assert x.grad is not None and layer.weight.grad is not None  # noqa: PT018
    return [out.detach(), x.grad, layer.weight.grad], len(here().waits) - before


def test_padded_rows_of_bf16_experts_travel_as_others_and_no_host_waits() -> None:
    """On a Hopper, which multiplies groups whose sizes no host knows."""
    topology = Topology(dp=4, ep=4, ep_inner=2, ranks_per_node=2)
    with installed(), patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)):
        exact, padded = (run_ranks(topology, lambda mesh, each=each: send_rows(mesh, each)) for each in (False, True))
    assert [waits for _, waits in padded] == [0] * 4
    assert all(waits for _, waits in exact)
    for (expected, _), (found, _) in zip(exact, padded, strict=True):
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("layers", [2, 3])
def test_a_host_waits_once_for_each_layer_of_experts(layers: int) -> None:
    layout = replace(LAYOUTS["ep 2"], changes=(("num_hidden_layers", layers),))
    assert count_waits(layout) == [Counter({"comm/transfer.py": layers})] * 2
