"""Options of expert parallelism change when and how rows travel, and nothing of what is trained; so does capacity."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from framework.comm.connect import connect
from framework.errors import RecipeError
from framework.mesh.topology import Topology
from framework.model.experts import Capacity
from framework.parallel.experts.dispatch import SharedExperts
from framework.parallel.experts.route import DispatchedRows, ExpertRoute
from framework.parallel.experts.rows import RowExchange
from framework.plan.plan import make_plan
from framework.recipe.schema import Launch, Memory, Model, Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.step import refuse_overflow, train_step
from framework.verify.layout import run_layout, share
from framework.verify.plain import PlainMixtures
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import SEQUENCES, Case, assert_equal, run_cases, small_recipe, topology_of, worst_error
from tests.ranks.pool import RankPool
from tests.ranks.test_expert_load import count_layouts
from tests.ranks.test_experts import FOUR_LAYERS, skew_routers

pytestmark = IN_TURN

CPU = torch.device("cpu")
RECOMPUTES = Memory(activation_checkpointing="full", compile="never")
# Two nodes of two ranks, or four of two.
NODES = Launch(kind="slurm", ranks_per_node=2, device="cpu")
COMPILED = {"": Memory(compile="always"), "recomputed": Memory(compile="always", activation_checkpointing="full")}
OPTIONS = {
    "overlap": Parallel(ep=2, expert_overlap=True),
    "overlap, tp": Parallel(ep=2, tp=2, expert_overlap=True),
    "overlap, slices": Parallel(ep=2, tp=2, expert_tp=2, expert_overlap=True),
    "two hops": Parallel(ep=4, expert_hierarchical=2),
    "once to each rank": Parallel(ep=4, expert_hierarchical=1),
    "two hops of codes": Parallel(ep=4, expert_hierarchical=2, expert_dispatch="fp8"),
    "codes, overlap, tp": Parallel(ep=2, tp=2, expert_overlap=True, expert_dispatch="fp8"),
    "two hops, overlap, tp": Parallel(ep=4, tp=2, expert_hierarchical=2, expert_overlap=True),
    "padded, slices": Parallel(ep=2, tp=2, expert_tp=2, expert_padding=2.0),
    "padded, two hops, overlap, tp": Parallel(
        ep=4, tp=2, expert_hierarchical=2, expert_overlap=True, expert_padding=4.0
    ),
    "padded codes": Parallel(ep=4, expert_hierarchical=2, expert_dispatch="fp8", expert_padding=4.0),
}


def recipes_of(
    parallels: dict[str, Parallel], world: int, sequences: int = SEQUENCES, **groups: Any
) -> dict[str, Recipe]:
    made = {
        name: small_recipe("fp64", world, 1, sequences, zero=Zero(stage=3), parallel=each)
        for name, each in parallels.items()
    }
    return {name: replace(recipe, **groups) for name, recipe in made.items()}


def test_options_train_as_one_process(pool: RankPool):
    # It asks for its shared experts behind the routed ones; those that ask in front: test_shared_experts_in_front_...
    shown = [("two hops, overlap, tp", "padded, two hops, overlap, tp"), ("two hops of codes",)]
    cases = [{label: OPTIONS[label] for label in each} for each in shown]
    name = "deepseek_v3"
    assert_equal(
        pool, 4, [Case(f"{name}, {label}", family(name), recipes_of(each, 4)) for each in cases for label in each]
    )


# What is added to the logits of eight experts: all to one of the last node's; none to the second node.
SKEWED_NODES = {"all to one": {7: 9.0}, "a node without a token": {2: -9.0, 3: -9.0}}


def run_on_nodes(rank: int, world: int, rendezvous: str, cases: list[Case], moved: dict[int, float]) -> Any:
    """Body: `run_cases` with moved logits of qwen3_moe's routers, in the layouts and in the oracle."""
    bias = tuple(moved.get(expert, 0.0) for expert in range(8))
    with skew_routers(bias, range(8)):
        return run_cases(rank, world, rendezvous, cases)


@pytest.mark.grid
@pytest.mark.parametrize("dispatch", ["bf16", "fp8"])
@pytest.mark.parametrize("moved", [{}, *SKEWED_NODES.values()], ids=["as it is", *SKEWED_NODES])
def test_four_nodes_of_two_ranks_train_as_one_process(moved: dict[int, float], dispatch: str):
    parallels = {
        "ep over nodes": Parallel(ep=8, expert_dispatch=dispatch),  # type: ignore[arg-type]
        "over tp": Parallel(ep=8, tp=2, expert_dispatch=dispatch),  # type: ignore[arg-type]
        "over tp, tokens alike": Parallel(ep=8, tp=2, sequence=False, expert_dispatch=dispatch),  # type: ignore[arg-type]
        "two nodes": Parallel(ep=4, expert_dispatch=dispatch, expert_overlap=True),  # type: ignore[arg-type]
        "padded": Parallel(ep=8, tp=2, expert_dispatch=dispatch, expert_padding=8.0),  # type: ignore[arg-type]
    }
    layouts = recipes_of(parallels, 8, 16, launch=replace(NODES, ranks=8))
    changes = {"num_experts": 8, "num_experts_per_tok": 1 if 7 in moved else 2, "mlp_only_layers": []}
    case = Case("qwen3_moe", family("qwen3_moe"), layouts, changes)
    eight = RankPool(8)
    try:
        rows = {label: each for of_rank in eight.run(8, run_on_nodes, [case], moved) for label, each in of_rank.items()}
    finally:
        eight.close()
    assert len(rows) == len(layouts)
    assert {label: worst_error(each) for label, each in rows.items() if worst_error(each) > case.tolerance} == {}


@pytest.mark.grid
def test_shared_experts_in_front_of_recomputed_layers_train_as_one_process(pool: RankPool):
    front = recipes_of({"overlap, tp": OPTIONS["overlap, tp"]}, 4, memory=RECOMPUTES)
    assert_equal(pool, 4, [Case("qwen2_moe", family("qwen2_moe"), front)])


@pytest.mark.grid
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "llama4_text", "qwen2_moe", "ernie4_5_moe"])
def test_options_of_other_families_train_as_one_process(pool: RankPool, name: str):
    fitting = {label: each for label, each in OPTIONS.items() if each.ep == 2 or name not in ("gpt_oss", "qwen2_moe")}
    if name == "llama4_text":  # it gives every expert every token
        fitting = {label: each for label, each in fitting.items() if each.expert_padding is None}
    for dispatch in ("bf16", "fp8"):  # each has an oracle of its own, which rounds as ranks do
        layouts = {label: each for label, each in fitting.items() if each.expert_dispatch == dispatch}
        assert_equal(pool, 4, [Case(name, family(name), recipes_of(layouts, 4))])


@pytest.mark.grid
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_next", "ernie4_5_moe"])
def test_shared_experts_in_front_train_as_one_process(pool: RankPool, name: str):
    whole = {"ep": Parallel(ep=2), "tp": Parallel(ep=2, tp=2), "alike": Parallel(ep=2, tp=2, sequence=False)}
    staged = small_recipe("fp64", 4, 3, zero=Zero(stage=2), parallel=Parallel(ep=2, pp=2))
    split = {"split backwards": replace(staged, pipeline=Pipeline("zb_h1"))}
    recomputed = {f"{label}, recomputed": each for label, each in recipes_of(whole, 4, memory=RECOMPUTES).items()}
    changes = FOUR_LAYERS.get(name, {}) | {"num_hidden_layers": 4}
    assert_equal(pool, 4, [Case(name, family(name), recipes_of(whole, 4) | recomputed | split, changes)])


@pytest.mark.grid
def test_shared_experts_in_front_of_compiled_layers_train_as_one_process(pool: RankPool):
    recipe = small_recipe("fp32", 2, 1, zero=Zero(stage=3), parallel=Parallel(ep=2))
    layouts = {label: replace(recipe, memory=memory) for label, memory in COMPILED.items()}
    assert_equal(pool, 2, [Case("qwen2_moe", family("qwen2_moe"), layouts)])


DROPPED = {
    "ep, tokens divided": Parallel(ep=2, tp=2),
    "slices": Parallel(tp=2),
    "dp": Parallel(),
    "ep": Parallel(ep=2),
    "ep, tokens alike": Parallel(ep=2, tp=2, sequence=False),
}


@pytest.mark.parametrize(
    ("factor", "priority", "labels"),
    few_of(
        [(1.0, "weight", tuple(DROPPED)[:2]), (1.0, "weight", tuple(DROPPED)[2:]), (1.25, "position", tuple(DROPPED))],
        lambda factor, _, labels: factor == 1.0 and "slices" in labels,
    ),
)
def test_every_layout_drops_what_one_process_drops(pool: RankPool, factor, priority, labels):
    model, layouts = Model(expert_capacity=factor, expert_drop=priority), {label: DROPPED[label] for label in labels}
    assert_equal(pool, 2, [Case("mixtral", family("mixtral"), recipes_of(layouts, 2, model=model))])


@pytest.mark.grid
def test_dropped_pairs_are_counted_alike_in_every_layout(pool: RankPool):
    case = family("qwen3_moe")
    layouts = {
        "one rank": (1, Parallel()),
        "ep, tokens divided": (2, Parallel(ep=2, tp=2)),
        "ep, tokens alike": (2, Parallel(ep=2, tp=2, sequence=False)),
    }
    recipes = {
        name: replace(
            small_recipe("fp64", world, 4 // world, sequences=4, parallel=parallel), model=Model(expert_capacity=1.0)
        )
        for name, (world, parallel) in layouts.items()
    }
    found = pool.run(2, count_layouts, case, recipes)[0]
    one, *others = (found[name] for name in layouts)
    assert any(load.dropped for load in one.values())
    for other in others:
        assert {layer: load.dropped for layer, load in other.items()} == {
            layer: load.dropped for layer, load in one.items()
        }


def overflow(rank: int, world: int, rendezvous: str) -> tuple[str, bool]:
    """Body: the error of a step whose buffers are too short, and whether it has updated anything."""
    recipe = recipes_of({"": Parallel(ep=2, expert_padding=1.0)}, world)[""]
    case = Case("", family("mixtral"), {"": recipe})
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    before = [buffer.master.clone() for buffer in run.buffers]
    microbatches = share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh)
    values = train_step(run, microbatches, 0, 1e-2).read()
    assert not values.is_finite
    with pytest.raises(RecipeError) as found:
        refuse_overflow(run, recipe.parallel.expert_padding, 1)
    is_moved = any(not torch.equal(buffer.master, was) for buffer, was in zip(run.buffers, before, strict=True))
    mesh.close()
    return str(found.value), is_moved


def test_rows_that_find_no_room_end_the_run_and_update_nothing(pool: RankPool) -> None:
    (message, *others), moved = zip(*pool.run(2, overflow), strict=True)
    assert moved == (False, False)
    assert others == [message]
    needed = re.match(
        r"parallel\.expert_padding=1\.0: in step 1 routers chose up to (.*) times an even share .*expert_padding=(.*) or more",
        message,
    )
    assert needed is not None, message
    # What routers choose for the NaN of a layer without room is not counted: all for one rank, twice an even share.
    assert 1 < float(needed[1]) <= float(needed[2]) < 1.5
    with_room = recipes_of({"": Parallel(ep=2, expert_padding=1.5)}, 2)
    assert_equal(pool, 2, [Case("mixtral", family("mixtral"), with_room)])


def record_order(rank: int, world: int, rendezvous: str) -> list[str]:
    """Body: what the first layer with experts does in its first forward, in order."""
    recipe = recipes_of({"ep": Parallel(ep=2)}, world)["ep"]
    case = Case("deepseek_v3", family("deepseek_v3"), {"ep": recipe})
    mesh = connect(Topology(dp=2, ep=2, shard=2, expert_tp=1), CPU, rendezvous, rank)
    events: list[str] = []

    def note(owner: Any, method: str, name: str) -> Any:
        whole = getattr(owner, method)

        def noted(*args: Any) -> Any:
            events.append(name)
            return whole(*args)

        return patch.object(owner, method, noted)

    with (
        note(DispatchedRows, "depart", "depart"),
        note(SharedExperts, "compute_ahead", "shared"),
        note(DispatchedRows, "arrive", "arrive"),
    ):
        run_layout(make_plan(recipe, case.config), case.batches()[:1], mesh)
    mesh.close()
    return events[:3]


def test_shared_experts_are_computed_while_rows_travel(pool: RankPool) -> None:
    assert pool.run(2, record_order) == [["depart", "shared", "arrive"]] * 2


def record_turns(rank: int, world: int, rendezvous: str) -> list[str]:
    """Body: what the first layer with experts sends and waits for in its first forward, and in the backward of the last."""
    recipe = recipes_of({"halves": OPTIONS["overlap"]}, world)["halves"]
    case = Case("mixtral", family("mixtral"), {"halves": recipe}, {"num_hidden_layers": 1})
    mesh = connect(Topology(dp=2, ep=2, shard=2, expert_tp=1), CPU, rendezvous, rank)
    events: list[str] = []
    halves: dict[int, str] = {}

    def note(method: str, name: str) -> Any:
        whole = getattr(RowExchange, method)

        def noted(self: RowExchange, *args: Any) -> Any:
            events.append(f"{name} {halves.setdefault(id(self), str(len(halves)))}")
            return whole(self, *args)

        return patch.object(RowExchange, method, noted)

    with (
        note("send", "send"),
        note("receive", "wait"),
        note("send_gradients", "send"),
        note("receive_gradients", "wait"),
    ):
        run_layout(make_plan(recipe, case.config), case.batches()[:1], mesh)
    mesh.close()
    return events[:16]


def test_rows_of_one_half_travel_under_the_other_forward_and_backward(pool: RankPool) -> None:
    """Of half 0 rows go as number 0 and come back as number 2, of half 1 as 1 and 3."""
    forward = ["send 0", "send 1", "wait 0", "send 2", "wait 1", "send 3", "wait 2", "wait 3"]
    backward = ["send 3", "send 2", "wait 3", "send 1", "wait 2", "send 0", "wait 1", "wait 0"]
    assert pool.run(2, record_turns) == [forward + backward] * 2


@pytest.mark.grid
@pytest.mark.parametrize("name", ["mixtral", "qwen3_next"])
def test_halves_of_packed_documents_train_as_one_process(pool: RankPool, name: str):
    recipe = recipes_of({"overlap": OPTIONS["overlap"]}, 2)["overlap"]
    packed = replace(recipe, data=replace(recipe.data, pack="documents"))
    assert_equal(pool, 2, [Case(name, family(name), {"packed": packed})])


def cross_nodes(rank: int, world: int, rendezvous: str, indices: list[list[list[int]]]) -> dict[str, int]:
    """Body: rows over each hop, of tokens whose hidden states are numbers, and what comes back of experts that add theirs.
    indices: of each rank [T, 2], of 8 experts."""
    mesh = connect(Topology(dp=4, ep=4, ep_inner=2, ranks_per_node=2), CPU, rendezvous, rank)
    outer, inner = mesh.axis("ep_outer"), mesh.axis("ep_inner")
    index = torch.tensor(indices[rank], dtype=torch.int64).view(-1, 2)
    x = torch.arange(len(index), dtype=torch.float64).unsqueeze(1) + 100 * rank
    weights = torch.linspace(1, 2, max(1, index.numel()), dtype=torch.float64)[: index.numel()].view(-1, 2)
    rows = ExpertRoute(outer, inner).plan(index, 8)
    numbers = {name: mesh.axis(name).traffic.bytes["all_to_all"] for name in ("ep_outer", "ep_inner")}
    rows.depart(x, index, weights)
    rows.pass_on()
    arrived = rows.arrive()
    # Of each expert the rows in the order of ranks and tokens.
    assert sorted(rows.plan.ids.tolist()) == rows.plan.ids.tolist()
    rows.depart_back(arrived * 10 ** (2 * rank + rows.plan.ids).unsqueeze(1))
    rows.cross_back()
    found = rows.arrive_back()
    sent = {name: mesh.axis(name).traffic.bytes["all_to_all"] - before for name, before in numbers.items()}
    left = outer.traffic.bytes_leaving["all_to_all"], inner.traffic.bytes_leaving["all_to_all"]
    mesh.close()
    assert torch.equal(found, (x * 10**index * weights).sum(1, keepdim=True))
    assert left == (numbers["ep_outer"] + sent["ep_outer"], 0)
    # A node's numbers of rows and of pairs for its four experts; a rank's for its two.
    assert numbers == {"ep_outer": 5 * 8, "ep_inner": 2 * 8}
    return sent


def test_a_token_crosses_once_for_each_node_however_many_of_its_experts_are_there(pool: RankPool):
    """Experts 0 to 3 are on ranks 0 and 1, the first node's, the others on the second's."""
    away, both, home = [[4, 7], [7, 4], [5, 6]], [[0, 4], [3, 7]], [[0, 3]]
    found = pool.run(4, cross_nodes, [away + both + home, away, [], home])
    row = 8  # bytes, beside it two weights of 8 bytes and two numbers of 4
    there = row + 2 * 8 + 2 * 4
    # Back go the sums for what has come: 5, 3 and, to rank 3, 1.
    assert [each["ep_outer"] for each in found] == [5 * there, 3 * there + row, 5 * row, there + 3 * row]
    # Within a node each pair is a row, there and back.
    assert [each["ep_inner"] for each in found] == [3 * row, 3 * row, 7 * row, 7 * row]


def find_dropped_plainly(index: Tensor, weights: Tensor, room: int, by_weight: bool) -> set[tuple[int, int]]:
    pairs = [(t, j) for t in range(index.shape[0]) for j in range(index.shape[1])]
    if by_weight:
        pairs.sort(key=lambda pair: -float(weights[pair]))
    taken: dict[int, int] = {}
    dropped = set()
    for pair in pairs:
        expert = int(index[pair])
        taken[expert] = taken.get(expert, 0) + 1
        dropped |= {pair} if taken[expert] > room else set()
    return dropped


def test_rounding_does_not_decide_who_is_dropped():
    # The two first tokens of a sequence are the same: their weights are equal but for rounding, in whatever layout.
    index, weights = torch.zeros(1, 3, 1, dtype=torch.int64), torch.tensor([[[0.5], [0.5], [0.4]]], dtype=torch.float64)
    for rounding in (-1e-12, 0.0, 1e-12):
        noise = torch.tensor([[[0.0], [rounding], [0.0]]], dtype=torch.float64)
        dropped = Capacity(1.0, "weight").find_dropped(index, weights + noise, 3)
        assert dropped.flatten().tolist() == [False, True, True]


@pytest.mark.parametrize("priority", ["weight", "position"])
def test_capacity_drops_by_sequence(priority):
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(21)]).view(3, 7, 2)
    # Few different weights: ties go to the first token.
    weights = torch.randint(1, 4, (3, 7, 2), generator=generator) / 4
    capacity = Capacity(1.0, priority)
    dropped = capacity.find_dropped(index, weights, 5)
    room = capacity.room(7, 2, 5)
    assert room == 3
    for sequence in range(3):
        expected = find_dropped_plainly(index[sequence], weights[sequence], room, priority == "weight")
        assert {tuple(pair) for pair in dropped[sequence].nonzero().tolist()} == expected
    assert dropped.any()


def test_the_capacity_is_of_the_decimal_in_the_recipe_and_the_oracles_is_the_same():
    # Products of floats would give 441, and 12.
    assert Capacity(1.1, "weight").room(3200, 1, 8) == 440
    index, weights = torch.zeros(1, 50, 1, dtype=torch.int64), torch.ones(1, 50, 1)
    dropped = Capacity(1.1, "position").find_dropped(index, weights, 5)
    assert int((~dropped).sum()) == 11
    experts = nn.ParameterDict({"down_proj": torch.zeros(5, 1, 1)})
    plain = SimpleNamespace(_settings=Model(expert_capacity=1.1, expert_drop="position"))
    found: Any = PlainMixtures._find_dropped(plain, list(range(50)), index[0], weights[0], experts)  # type: ignore[arg-type]
    assert found == [tuple(each) for each in dropped[0].nonzero().tolist()]
