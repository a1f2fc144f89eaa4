"""Recurrent mixers whose sequences ranks divide, or whose heads: the training run of stock transformers in one process; what one
token changes, and what is sent, is what the mathematics says."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from framework.comm.collectives import all_gather
from framework.comm.connect import connect
from framework.mesh.context import ContextSlices
from framework.model.mixers import find_mixers
from framework.parallel.attention.documents import Documents
from framework.parallel.attention.recurrent import Pieces, hook_mixers
from framework.plan.plan import make_plan
from framework.plan.traffic import measure_traffic
from framework.recipe.derive import context_degrees, has_tokens_everywhere
from framework.recipe.schema import Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import RECURRENT, build_config
from tests.ranks.covering import cover_pairs
from tests.ranks.mixers import PLAIN, RECOMPUTES, SELECTS, Way, find
from tests.ranks.parity import CPU, assert_equal, topology_of
from tests.ranks.pool import RankPool

# Each mechanism once: pieces on two ranks and on four, by either method, documents that span them, recomputation.
SHOWN = (
    Way("qwen3_5_text", 2, packs=True),
    Way("lfm2", 2, "ulysses", packs=True, memory=RECOMPUTES),
    Way("kimi_linear", tp=2),
)
MORE = (
    *(Way(each.name, 2, method) for each in RECURRENT for method in ("ring", "ulysses")),
    *(Way(each.name, tp=2, packs=True, sequence=each.name != "lfm2") for each in RECURRENT),
    *(Way(each.name, pp=2, packs=True) for each in RECURRENT),
    Way("kimi_linear", 4, (2, 2), packs=True, context=16),
    Way("olmo_hybrid", 4, context=10),  # pieces shorter than a window
    Way("qwen3_next", dp=2, packs=True),
)


def test_mixers_of_divided_sequences_and_heads_equal_one_process(pool: RankPool) -> None:
    assert_equal(pool, 2, [way.case() for way in SHOWN])


@pytest.mark.grid
@pytest.mark.parametrize("name", [each.name for each in RECURRENT])
def test_mixers_of_every_family_equal_one_process(pool: RankPool, name: str) -> None:
    assert_equal(pool, 4, [way.case() for way in MORE if way.family == name])


# (cp, dp, tp, pp, ep, sequence, schedule)
MESHES = (
    (2, 1, 1, 1, 2, True, "1f1b"), (2, 2, 1, 1, 4, True, "1f1b"), (2, 1, 2, 1, 1, True, "1f1b"),
    (2, 1, 2, 1, 2, False, "1f1b"), (2, 1, 1, 2, 2, True, "zb_h1"), (4, 1, 1, 1, 1, True, "1f1b"),
    (4, 1, 2, 1, 2, True, "1f1b"), (2, 1, 2, 2, 2, True, "interleaved"), (1, 2, 2, 2, 4, True, "zbv"),
    (1, 2, 1, 2, 2, True, "1f1b"),
)  # fmt: skip
# Mixtures beside a delta rule, beside a state space, and of sparse latent attention; with layers for four stages.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "nemotron_h": {"n_routed_experts": 8},
    "deepseek_v32": {"num_hidden_layers": 4},
}


def can_run(_: str, mesh: tuple[int, int, int, int, int, bool, str], method: Any, context: int, *__: Any) -> bool:
    cp, _, tp, *_ = mesh
    if isinstance(method, tuple) and method[0] * method[1] != cp:
        return False
    ulysses, ring = context_degrees(Way("", cp, method).parallel)
    return 4 // tp % ulysses == 0 and has_tokens_everywhere(context, ulysses, ring)


@cache
def cover() -> tuple[Way, ...]:
    zeros, memories = (Zero(stage=1), Zero(stage=3)), (PLAIN, SELECTS, RECOMPUTES)
    methods = ("ring", "ulysses", (2, 2))
    rows = cover_pairs((tuple(MIXTURES), MESHES, methods, (16, 13), (False, True), zeros, memories), can_run)
    return tuple(
        Way(
            name, cp, method, dp, tp, pp, ep, sequence, zero, context, packs, 3 if pp > 1 else 1, memory, schedule=schedule
        )
        for name, (cp, dp, tp, pp, ep, sequence, schedule), method, context, packs, zero, memory in rows
    )  # fmt: skip


@pytest.fixture(scope="module")
def eight():
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.grid
@pytest.mark.parametrize("part", range(9))
def test_any_two_options_of_a_mixture_equal_one_process(eight: RankPool, part: int) -> None:
    """Of its family, of all axes, of schedules, packed documents, ZeRO and recomputation."""
    # Clipped by the norm of all axes, but for state spaces, whose first norms are small.
    cases = [way.case(clips=way.family != "nemotron_h", **MIXTURES[way.family]) for way in cover()[part::9]]
    assert_equal(eight, 8, cases)


LENGTH, STARTS, CHANGED = 21, (0, 4, 17), (3, 5, 10, 18)


def perturb_tokens(
    rank: int, world: int, rendezvous: str, name: str, method: str, spoiled: str = ""
) -> dict[int, list[int]]:
    """Body: the rows of the sequence in which a mixer's output differs, by the row whose input does. spoiled: what pieces do not
    get of those before."""
    mesh = connect(topology_of(Way(name, world, method).recipe, build_config(find(name))), CPU, rendezvous, rank)
    sizes = {"ulysses": world} if method == "ulysses" else {"ring": world}
    slices, cp = ContextSlices(LENGTH, rank=rank, **sizes), mesh.axis("cp")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(build_config(find(name)), dtype=torch.float64)
    pieces, (_, mixer) = Pieces(slices, cp), next(find_mixers(model))
    hook_mixers(model, pieces)
    if spoiled == "window":
        pieces.window = lambda x, length: torch.zeros_like(x[:, :, :1]).expand(-1, -1, length, -1)  # type: ignore[method-assign]
    elif spoiled == "states":
        pieces.states = lambda maps, step, first: torch.stack([first] * maps.shape[1], 1)  # type: ignore[method-assign]
    elif spoiled == "starts":
        pieces.starts = lambda device: None  # type: ignore[method-assign]
    whole = torch.randn(1, LENGTH, model.config.hidden_size, dtype=torch.float64)

    def compute(x: Tensor) -> Tensor:
        with pieces.of(Documents((STARTS,), LENGTH + slices.padding)):
            own = mixer(slices.cut(x, 0)).detach().contiguous()
        parts = own.new_empty(world, *own.shape)
        all_gather(parts, own, cp)
        return slices.join(parts)[0]

    expected, found = compute(whole), {}
    for row in CHANGED:
        changed = whole.clone()
        changed[:, row] += 1
        found[row] = (compute(changed) != expected).any(-1).nonzero().flatten().tolist()
    mesh.close()
    return found


@pytest.mark.parametrize(
    ("name", "reach"),
    [("qwen3_5_text", LENGTH), pytest.param("kimi_linear", LENGTH, marks=pytest.mark.grid), ("lfm2", 3)],
)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_token_changes_the_later_ones_of_its_document_alone(
    pool: RankPool, name: str, reach: int, method: str
) -> None:
    assert pool.run(2, perturb_tokens, name, method) == [expect_rows(reach)] * 2


def expect_rows(reach: int) -> dict[int, list[int]]:
    ends = {row: min(stop for stop in (*STARTS, LENGTH) if stop > row) for row in CHANGED}
    return {row: list(range(row, min(end, row + reach))) for row, end in ends.items()}


@pytest.mark.grid
@pytest.mark.parametrize(("name", "spoiled"), [("lfm2", "window"), ("qwen3_5_text", "states"), ("lfm2", "starts")])
def test_what_a_piece_does_not_get_is_missed(pool: RankPool, name: str, spoiled: str) -> None:
    found = pool.run(2, perturb_tokens, name, "ring", spoiled)
    assert found[0] != expect_rows(3 if name == "lfm2" else LENGTH)


def count_sent(rank: int, world: int, rendezvous: str, ways: list[Way]) -> list[int]:
    """Body: bytes that a step sends over cp."""
    found = []
    for number, way in enumerate(ways):
        case = way.case()
        mesh = connect(topology_of(way.recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(way.recipe, case.config), mesh)
        microbatches = share(case.batches()[0], way.recipe.batch.sequences_per_microbatch, mesh)
        train_step(run, microbatches, 0, 1e-3)
        found.append(sum(sum(mesh.axis(name).traffic.bytes.values()) for name in ("ulysses", "ring", "cp")))
        mesh.close()
    return found


def test_a_step_sends_what_was_planned(pool: RankPool) -> None:
    """Of attention what grows with the sequence; of mixers the same for any."""
    ways = [
        Way("qwen3_5_text", 2, context=16),
        Way("qwen3_5_text", 2, "ulysses", context=32, packs=True, memory=RECOMPUTES),
    ]
    for rank, found in enumerate(pool.run(2, count_sent, ways)):
        plans = [make_plan(way.recipe, way.case().config) for way in ways]
        assert found == [measure_traffic(plan, rank)["cp"] for plan in plans]
