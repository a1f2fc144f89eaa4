"""Recurrent mixers whose sequences ranks divide, or whose heads: the training run of stock transformers in one process; what one
token changes, and what is sent, is what the mathematics says."""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from framework.comm.collectives import all_gather
from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.mesh.token_layout import ContextSlices
from framework.mesh.topology import Topology
from framework.model.units import count_channels, count_map, find_mixers
from framework.parallel.attention.pieces import Pieces
from framework.parallel.attention.recurrent import hook_mixers
from framework.parallel.attention.visible_rows import Documents
from framework.plan.forecast_plan import measure_traffic
from framework.plan.messages import MixerCost, Passes
from framework.plan.plan import make_plan
from framework.recipe.derive import context_degrees, has_tokens_everywhere
from framework.recipe.schema import Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.evidence import keep_double
from framework.verify.layout import share
from tests.families import RECURRENT, build_config
from tests.grid import IN_TURN, few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.mixers import PLAIN, RECOMPUTES, SELECTS, Way, find
from tests.ranks.parity import CPU, assert_equal, topology_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

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
# A family of each form, and how far a token reaches where it is not to the end of its document.
FORMS = {"qwen3_5_text": LENGTH, "kimi_linear": LENGTH, "bamba": LENGTH, "mamba": LENGTH, "lfm2": 3}
Probe = tuple[str, str]  # family, method


def hook_mixer(name: str, slices: ContextSlices, cp: Communicator) -> tuple[Pieces, nn.Module, int]:
    """Pieces of a rank, the family's first mixer on them, and its features."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(build_config(find(name)), dtype=torch.float64)
    pieces, (_, mixer) = Pieces(slices, cp), next(find_mixers(model))
    hook_mixers(model, pieces)
    if "A_log" in dict(mixer.named_parameters()):
        # So slow a decay that nothing a token changes is lost in rounding.
        nn.init.constant_(mixer.get_parameter("A_log"), -3.0)
    return pieces, mixer, model.config.hidden_size


def slices_of(method: str, length: int, world: int, rank: int) -> ContextSlices:
    return ContextSlices(length, **{method: world}, rank=rank)


def perturb_tokens(
    rank: int, world: int, rendezvous: str, probes: list[Probe], spoiled: str = ""
) -> dict[Probe, dict[int, list[int]]]:
    """Body: the rows of the sequence in which a mixer's output differs, by the row whose input does. spoiled: what pieces do not
    get of those before."""
    mesh, found = connect(Topology(cp=world), CPU, rendezvous, rank), {}
    for name, method in probes:
        slices = slices_of(method, LENGTH, world, rank)
        pieces, mixer, features = hook_mixer(name, slices, mesh.axis("cp"))
        if spoiled == "window":
            pieces.window = lambda x, length: torch.zeros_like(x[:, :, :1]).expand(-1, -1, length, -1)  # type: ignore[method-assign]
        elif spoiled == "states":
            pieces.states = lambda maps, step, first: torch.stack([first] * maps.shape[1], 1)  # type: ignore[method-assign]
        elif spoiled == "starts":
            pieces.starts = lambda device: None  # type: ignore[method-assign]
        whole = torch.randn(1, LENGTH, features, dtype=torch.float64)
        documents = Documents((STARTS,), LENGTH + slices.padding)

        def compute(
            x: Tensor, slices: Any = slices, pieces: Any = pieces, mixer: Any = mixer, of: Any = documents
        ) -> Tensor:
            with pieces.of(of):
                own = mixer(slices.cut(x, 0)).detach().contiguous()
            parts = own.new_empty(world, *own.shape)
            all_gather(parts, own, mesh.axis("cp"))
            return slices.join(parts)[0]

        expected, found[name, method] = compute(whole), {}
        for row in CHANGED:
            changed = whole.clone()
            changed[:, row] += 1
            rows = (compute(changed) != expected).any(-1).nonzero().flatten().tolist()
            found[name, method][row] = rows
    mesh.close()
    return found


def expect_rows(reach: int) -> dict[int, list[int]]:
    ends = {row: min(stop for stop in (*STARTS, LENGTH) if stop > row) for row in CHANGED}
    return {row: list(range(row, min(end, row + reach))) for row, end in ends.items()}


@pytest.mark.parametrize("world", few_of((2, 4), lambda world: world == 2))
def test_a_token_changes_the_later_ones_of_its_document_alone(pool: RankPool, world: int) -> None:
    probes = list(product(FORMS, ("ring", "ulysses")))
    wanted = {(name, method): expect_rows(FORMS[name]) for name, method in probes}
    assert pool.run(world, perturb_tokens, probes) == [wanted] * world


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "spoiled"),
    [
        ("lfm2", "window"),
        *((name, "states") for name in FORMS if name != "lfm2"),
        ("lfm2", "starts"),
        ("mamba", "starts"),
    ],
)
def test_what_a_piece_does_not_get_is_missed(pool: RankPool, name: str, spoiled: str) -> None:
    found = pool.run(2, perturb_tokens, [(name, "ring")], spoiled)
    assert found[0][name, "ring"] != expect_rows(FORMS[name])


def measure_sent(rank: int, world: int, rendezvous: str, probes: list[Probe], length: int) -> dict[Probe, list[int]]:
    """Body: bytes that a mixer sends over cp for two sequences, forward and backward; and those that are planned."""
    mesh, found = connect(Topology(cp=world), CPU, rendezvous, rank), {}
    for name, method in probes:
        slices = slices_of(method, length, world, rank)
        _, mixer, features = hook_mixer(name, slices, mesh.axis("cp"))
        x = torch.randn(2, slices.tokens_local, features, dtype=torch.float64, requires_grad=True)
        before = sum(mesh.axis("cp").traffic.bytes.values())
        mixer(x).sum().backward()
        filters = next(each.weight for each in mixer.modules() if isinstance(each, nn.Conv1d))
        channels = count_channels(mixer, filters.shape[0], 1)
        cost = MixerCost(slices, 2, channels, filters.shape[-1], count_map(mixer), x.itemsize)
        found[name, method] = [sum(mesh.axis("cp").traffic.bytes.values()) - before, cost.sent(Passes())]
    mesh.close()
    return found


def test_bytes_of_windows_and_states_do_not_grow_with_the_sequence(pool: RankPool) -> None:
    probes = list(product(FORMS, ("ring", "ulysses")))
    short, long = [pool.run(2, measure_sent, probes, length) for length in (16, 96)]
    assert short == long
    assert all(sent == planned > 0 for of_rank in short for sent, planned in of_rank.values())


def count_sent(
    rank: int, world: int, rendezvous: str, ways: list[Way], axes: tuple[str, ...] = ("ulysses", "ring", "cp")
) -> list[int]:
    """Body: bytes that a step sends over axes, by default those of cp."""
    found = []
    for number, way in enumerate(ways):
        case = way.case()
        mesh = connect(topology_of(way.recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(way.recipe, case.config), mesh)
        microbatches = share(case.batches()[0], way.recipe.batch.sequences_per_microbatch, mesh)
        with keep_double(torch.float64):
            train_step(run, microbatches, 0, 1e-3)
        found.append(sum(sum(mesh.axis(name).traffic.bytes.values()) for name in axes))
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


# A gated norm and B, C of one group (bamba), a sum within a mixer (mamba), mixers beside attention, layers of one region, norms
# over all heads; llama, whose layers have two regions and nothing else, tells what embedding, head and loss send.
BORDERS = ("mamba", "bamba", "falcon_h1", "nemotron_h", "jamba", "olmo_hybrid", "qwen3_5_text", "kimi_linear", "lfm2")


@pytest.mark.grid
@pytest.mark.parametrize("names", [BORDERS[:3], BORDERS[3:]])
def test_a_step_sends_over_tp_what_was_planned(pool: RankPool, names: tuple[str, ...]) -> None:
    """The difference between two lengths, so that gradients drop out; with tokens divided and not."""
    ways = [
        [Way(name, tp=2, sequence=sequence, context=context) for sequence in (True, False) for context in (16, 24)]
        for name in ("llama", *names)
    ]
    of_ranks = pool.run(2, count_sent, [way for each in ways for way in each], ("tp",), timeout_s=300)
    for rank, found in enumerate(of_ranks):
        sent = [
            [found[place + 1] - found[place], found[place + 3] - found[place + 2]] for place in range(0, len(found), 4)
        ]
        planned = [
            [measure_traffic(make_plan(way.recipe, way.case().config), rank)["tp"] for way in each] for each in ways
        ]
        grown = [[each[1] - each[0], each[3] - each[2]] for each in planned]
        ends = [one - other for one, other in zip(sent[0], grown[0], strict=True)]
        beside = [[one - other for one, other in zip(*each, strict=True)] for each in zip(sent, grown, strict=True)]
        assert dict(zip(names, beside[1:], strict=True)) == dict.fromkeys(names, ends)
