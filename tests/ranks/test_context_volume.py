"""What attention over the ranks of cp sends, by the ledger, is what the plan says in closed form."""

from itertools import product

import pytest
import torch

from framework.plan.context import AttentionShape, ContextCost, Method
from tests.ranks.pool import RankPool
from tests.ranks.test_context_methods import Case, Layout, Share, connect_context, draw, make_attention

CASES = {
    "one key-value head": Case(heads=8, kv_heads=1),
    "unequal widths": Case(heads=8, kv_heads=2, width=6, v_width=4, context=32),
    "groups that ranks share": Case(heads=12, kv_heads=3, width=4, v_width=2),
    "window": Case(window=5),
    "wide window": Case(window=21),
    "documents": Case(documents=((0, 3, 20), (0, 9, 10, 31)), kv_heads=2),
}
LAYOUTS = [Layout(1, 2), Layout(1, 4), Layout(1, 4, "gather"), Layout(2, 1), Layout(4, 1), Layout(2, 2)]
DTYPES = (torch.bfloat16, torch.float64)


def measure_sent(rank: int, world: int, rendezvous: str, layout: Layout) -> dict[tuple[str, torch.dtype], list[int]]:
    """Body: bytes over Ulysses and ring in forward, and in backward."""
    mesh, found = connect_context(rank, rendezvous, layout), {}

    def total() -> int:
        return sum(sum(mesh.axis(name).traffic.bytes.values()) for name in ("ulysses", "ring"))

    for (name, case), dtype in product(CASES.items(), DTYPES):
        attention = make_attention(mesh, layout, case.context)
        share, readings = Share(draw(case, dtype), attention.slices), [total()]
        out = share.attend(attention)
        readings.append(total())
        share.differentiate(out)
        found[name, dtype] = [readings[1] - readings[0], total() - readings[1]]
    mesh.close()
    return found


def plan_sent(case: Case, layout: Layout, dtype: torch.dtype, rank: int) -> list[int]:
    method = Method(layout.ulysses, layout.ring, layout.method == "gather")
    reach = case.context if case.window is None else case.window
    shape = AttentionShape(case.heads, case.kv_heads, case.width, case.v_width, reach)
    packs, index = case.documents is not None, rank % layout.ulysses
    return list(ContextCost(method, shape, case.sequences, case.context, dtype.itemsize, packs, index).sent)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bytes_of_forward_and_backward_are_planned(pool: RankPool, layout: Layout) -> None:
    for rank, found in enumerate(pool.run(layout.ulysses * layout.ring, measure_sent, layout)):
        planned = {key: plan_sent(CASES[key[0]], layout, key[1], rank) for key in found}
        assert found == planned
        assert len(found) == len(CASES) * len(DTYPES)
        assert all(min(sent) > 0 for sent in found.values())
