"""Layers that are computed again in backward, by any policy, in any layout: bitwise what they are when all is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from framework.comm.connect import connect
from framework.model.load import build_meta
from framework.plan.plan import Plan, make_plan
from framework.plan.policies import find_operations
from framework.recipe.schema import Memory, Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.evidence import Evidence, make_batches
from framework.verify.layout import share
from scripts.bench.foresight_memory import count_activations
from tests.families import build_config, family
from tests.grid import IN_TURN
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, Case, small_recipe, topology_of, train_layouts
from tests.ranks.pool import RankPool
from tests.ranks.test_parity_options import assert_bitwise_equal

pytestmark = IN_TURN

WORLD = 4
EVERYTHING = "everything"  # is kept: selective, of which every operation is kept
ALL_POLICIES = ("selective", "sqrt", EVERYTHING)  # full is among the layouts of other files


def layout(parallel: Parallel, zero: int = 0, schedule: str = "1f1b", regathers: bool = False) -> Recipe:
    recipe = small_recipe("fp32", WORLD, 2, 8, None, Zero(zero, prefetch_units=zero % 2), parallel)
    if parallel.pp > 1:
        recipe = replace(recipe, pipeline=Pipeline(schedule=schedule))  # type: ignore[arg-type]
    return replace(recipe, memory=Memory(gathered_inputs="regather" if regathers else "keep", compile="never"))


DENSE = {
    "dp2 tp2, zero 3": layout(Parallel(tp=2), 3),
    "tp2 pp2, regathered": layout(Parallel(tp=2, pp=2), 0, "1f1b", True),
    "tp2 pp2, overlapped, split backwards": layout(Parallel(tp=2, pp=2, overlap="always"), 0, "zb_h1", True),
}
MIXTURES = {
    "tp2 ep2, zero 3": layout(Parallel(tp=2, ep=2), 3),
    "tp2 ep2, slices, not sequences": layout(Parallel(tp=2, ep=2, expert_tp=2, sequence=False), 1),
    "pp2 ep2, halves": layout(Parallel(pp=2, ep=2, expert_overlap=True), 2),
    "cp4, ring and ulysses": layout(Parallel(cp=4, context=[2, 2]), 1),
}


def with_policies(layouts: Mapping[str, Recipe], operations: list[str], policies: Sequence[str]) -> dict[str, Recipe]:
    found = {}
    for label, recipe in layouts.items():
        everything = replace(recipe.memory, activation_checkpointing="selective", kept_operations=operations)
        for policy in ("none", *policies):
            memory = replace(recipe.memory, activation_checkpointing=policy) if policy != EVERYTHING else everything
            found[f"{label} {policy}"] = replace(recipe, memory=memory)
    return found


def train(
    pool: RankPool,
    name: str,
    layouts: Mapping[str, Recipe],
    changes: Mapping[str, Any],
    policies: Sequence[str] = ALL_POLICIES,
) -> dict[str, Evidence]:
    operations = find_operations(build_meta(build_config(family(name))))
    case = Case(name, family(name), with_policies(layouts, operations, policies), changes)
    return {label: each for (_, label), each in pool.run(WORLD, train_layouts, [case], timeout_s=300)[0].items()}


@pytest.mark.parametrize(
    ("name", "label", "policies"),
    [
        # All operations kept: unit/test_activation_checkpointing.py.
        pytest.param("mixtral", "tp2 ep2, zero 3", ("selective",), id="few"),
        *(pytest.param("llama", label, ALL_POLICIES, marks=pytest.mark.grid, id=f"llama {label}") for label in DENSE),
        *(pytest.param("mixtral", label, ALL_POLICIES, marks=pytest.mark.grid, id=label) for label in MIXTURES),
    ],
)
def test_every_policy_is_bitwise_what_keeping_all_is(
    pool: RankPool, name: str, label: str, policies: Sequence[str]
) -> None:
    changes = {"num_hidden_layers": 4} if "sqrt" in policies else {}
    found = train(pool, name, {label: (DENSE | MIXTURES)[label]}, changes, policies)
    for policy in policies:
        assert_bitwise_equal(found[f"{label} none"], found[f"{label} {policy}"])


# --- what is kept under sequence parallelism

WIDTHS = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
CONTEXT, TP, ITEMSIZE = 128, 2, 4
# With o_proj: a row layer's output, which is a rank's tokens only once it has been summed.
WITH_ROWS = ["attention", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
KEPT_BY = {
    "full": Memory("full", compile="never"),
    "selective": Memory("selective", kept_operations=WITH_ROWS, compile="never"),
    "sqrt": Memory("sqrt", compile="never"),
}


def plan_sharded(memory: Memory, num_layers: int) -> Plan:
    recipe = small_recipe("fp32", TP, 1, 2, None, parallel=Parallel(tp=TP, sequence=True))
    config = build_config(family("llama"), **WIDTHS, num_hidden_layers=num_layers)
    config.use_cache = False
    return make_plan(replace(recipe, memory=memory, batch=replace(recipe.batch, context=CONTEXT)), config)


def count_held(rank: int, world: int, rendezvous: str, plans: Mapping[str, tuple[Plan, Plan]]) -> dict[str, int]:
    """Body: what the second plan of each pair holds behind a forward more than the first, in bytes of this rank."""
    found = {}
    for label, pair in plans.items():
        held = []
        for number, plan in enumerate(pair):
            mesh = connect(topology_of(plan.recipe, plan.config), CPU, f"{rendezvous}-{label}-{number}", rank)
            run, batches = build(plan, mesh), make_batches(plan.config, 2, 2, CONTEXT, seed=11)
            steps = [share(batch, 2, mesh) for batch in batches]
            train_step(run, steps[0], 0, 1e-3)
            held.append(max(count_activations(run, steps[1])))
            run.close()
            mesh.close()
        found[label] = held[1] - held[0]
    return found


def test_under_sequence_parallelism_what_is_kept_is_this_ranks_shard(pool: RankPool) -> None:
    """A layer's, as three have more than two; of sqrt an input, as three have more than one."""
    counts = {"full": (2, 3), "selective": (2, 3), "sqrt": (1, 3)}
    plans = {
        policy: (plan_sharded(memory, counts[policy][0]), plan_sharded(memory, counts[policy][1]))
        for policy, memory in KEPT_BY.items()
    }
    tokens, width = 2 * CONTEXT, WIDTHS["hidden_size"]
    shard = tokens // TP * width * ITEMSIZE
    # Of all tokens a rank's heads and features: attention with a number for each head, keys, values, gate and up.
    inside = tokens * (width + 8 + 2 * 4 * 16 + 2 * WIDTHS["intermediate_size"]) * ITEMSIZE // TP
    # Beside them the input and what o_proj gives, of a rank's tokens.
    expected = {"full": shard, "selective": inside + 2 * shard, "sqrt": shard}
    for found in pool.run(TP, count_held, plans):
        assert found == expected
    assert [plans[policy][0].activations.layer_bytes for policy in ("full", "selective")] == [shard, inside + 2 * shard]


def is_legal(
    name: str, tp: int, pp: int, ep: int, zero: int, schedule: str, sequence: bool, overlap: str, regathers: bool
) -> bool:
    ranks = max(tp * pp, pp * ep)
    sends = tp > 1 and sequence
    return (
        ranks <= WORLD
        and (ep == 1 or name in WITH_EXPERTS)
        and (pp > 1 or schedule == "1f1b")
        and (tp > 1 or sequence)
        and (sends or (overlap == "auto" and not regathers))
    )


WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
NAMES = ("llama", "gpt2", "gemma2", *WITH_EXPERTS)
NUM_BATCHES = 7  # of rows, which are one case each: all together would be a day's grid


@pytest.mark.grid
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_any_two_of_family_and_options_are_bitwise_what_keeping_all_is(pool: RankPool, batch: int) -> None:
    degrees = [(1, 2), (1, 2), (1, 2)]
    options = [(0, 1, 2, 3), ("1f1b", "zb_h1"), (True, False), ("auto", "always"), (False, True)]
    rows = cover_pairs([NAMES, *degrees, *options], is_legal)
    for name, tp, pp, ep, zero, schedule, sequence, overlap, regathers in rows[batch::NUM_BATCHES]:
        parallel = Parallel(tp=tp, pp=pp, ep=ep, sequence=sequence, overlap=overlap)
        label = f"{name} tp{tp} pp{pp} ep{ep} {zero} {schedule} {sequence} {overlap} {regathers}"
        found = train(pool, name, {label: layout(parallel, zero, schedule, regathers)}, {})
        for policy in ALL_POLICIES:
            assert_bitwise_equal(found[f"{label} none"], found[f"{label} {policy}"])
