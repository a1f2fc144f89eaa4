"""Families under tensor parallelism hold a share, and README says of layouts what the sweep's table does."""

import re
from math import prod
from pathlib import Path

from framework.comm.communicator import Communicator
from framework.mesh.topology import Axis
from framework.model.load import build_meta
from framework.parallel.tensor.partition import ranks_per_kv_head
from tests.families import FAMILIES, build_config
from tests.grid import IN_TURN
from tests.ranks.tensor_parity import split
from tests.ranks.test_tensor import CHANGES

pytestmark = IN_TURN

ROOT = Path(__file__).parents[2]
DEGREE = 2


def test_each_of_two_ranks_holds_about_half_of_every_family() -> None:
    # Norms, routers, position tables and the down-projections of latent attention are all that both hold.
    shares = {}
    for family in FAMILIES:
        config = build_config(family, **CHANGES.get(family.name, {}))
        copies = ranks_per_kv_head(config, DEGREE)
        tp, kv = Communicator(Axis("tp", DEGREE, 0, (0, 1))), Communicator(Axis("kv", copies, 0, tuple(range(copies))))
        layouts = split(build_meta(config), tp, kv, sequence=True).values()
        whole, local = sum(prod(layout.shape) for layout in layouts), sum(layout.numel_local for layout in layouts)
        shares[family.name] = local / whole
    assert max(shares.values()) < 0.6, shares


def test_readme_has_the_counts_of_the_table() -> None:
    counts = re.search(r"; equal: (.*?)(, tp documents .*)?$", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    assert counts is not None
    assert f"({counts[1]})" in (ROOT / "README.md").read_text().replace("\n", " ")
