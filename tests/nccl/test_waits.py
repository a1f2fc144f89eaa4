"""Host waits of a step on GPUs, in each rank of a layout: none, but for rows that come to experts.

`tests/unit/test_step_waits.py` counts calls of one rank that would wait; here each tensor says where it is.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import framework
from framework.comm.connect import Mesh
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


@pytest.mark.parametrize("layers", [2, 3])
def test_a_host_waits_once_for_each_layer_of_experts(layers: int) -> None:
    layout = replace(LAYOUTS["ep 2"], changes=(("num_hidden_layers", layers),))
    assert count_waits(layout) == [Counter({"comm/transfer.py": layers})] * 2
