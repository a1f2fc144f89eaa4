"""What attention over the ranks of cp sends, by the ledger, is what the plan says in closed form."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from framework.comm.connect import connect
from framework.plan.candidate import Candidate
from framework.plan.forecast_plan import measure_traffic
from framework.plan.layer_widths import AttentionShape
from framework.plan.messages import ContextCost
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Parallel, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import family
from tests.grid import IN_TURN
from tests.planned import kept_activations
from tests.ranks.parity import CPU, small_recipe, topology_of
from tests.ranks.parity import Case as ParityCase
from tests.ranks.pool import RankPool
from tests.ranks.test_context_methods import Case, Layout, Share, connect_context, draw, make_attention
from tests.ranks.test_plan import counting_saved_bytes

pytestmark = IN_TURN

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
    cp, is_gather = layout.ulysses * layout.ring, layout.method == "gather"
    c = Candidate(cp=cp, ulysses=layout.ulysses, is_gather=is_gather, sequences=case.sequences, context=case.context)
    reach, is_windowed = case.window or case.context, case.window is not None
    shape = AttentionShape(case.heads, case.kv_heads, case.width, case.v_width, reach, is_windowed)
    index = rank % layout.ulysses
    cost = ContextCost(c, shape, dtype.itemsize, index)
    return [sum(each) for each in zip(cost.exchanged_bytes, cost.travelling_bytes, strict=True)]


@pytest.mark.grid  # of a step: below
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bytes_of_forward_and_backward_are_planned(pool: RankPool, layout: Layout) -> None:
    for rank, found in enumerate(pool.run(layout.ulysses * layout.ring, measure_sent, layout)):
        planned = {key: plan_sent(CASES[key[0]], layout, key[1], rank) for key in found}
        assert found == planned
        assert len(found) == len(CASES) * len(DTYPES)
        assert all(min(sent) > 0 for sent in found.values())


WIDE = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDE |= {"num_hidden_layers": 3, "vocab_size": 1024}


def lay_out(cp: int, method: str | list[int], policy: str, pp: int = 1) -> Recipe:
    """One that a step of llama runs with, on four ranks."""
    parallel: Any = Parallel(cp=cp, context=method, pp=pp)  # type: ignore[arg-type]
    recipe = small_recipe("bf16", 4, 3, 12, None, Zero(stage=0), parallel)
    memory = Memory(policy, ["attention"], compile="never", chunked_loss=True)  # type: ignore[arg-type]
    return replace(recipe, memory=memory, batch=replace(recipe.batch, context=254))


STEPS = {
    "ring": lay_out(4, "ring", "none"),
    "ring of a pipeline, recomputed": lay_out(2, "ring", "full", pp=2),
    "gather, recomputed": lay_out(2, "gather", "full"),
    "both, attention kept": lay_out(4, [2, 2], "selective"),
    "ring, attention kept": lay_out(4, "ring", "selective"),
    "copies of key-value heads": lay_out(4, "ulysses", "none"),
}


def observe_steps(rank: int, world: int, rendezvous: str, case: ParityCase) -> dict[str, tuple[int, int]]:
    """Body: of each layout the bytes that a step sent over cp, and the most that it kept for backward."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, case.config), mesh)
        tokens = torch.randint(3, 97, (12, recipe.batch.context))
        batch = replace(case.batches()[0], input_ids=tokens, labels=tokens)
        microbatches = share(batch, recipe.batch.sequences_per_microbatch, mesh)
        with counting_saved_bytes({buffer.full.untyped_storage().data_ptr() for buffer in run.buffers}) as peak:
            train_step(run, microbatches, 0, 1e-3)
        sent = sum(sum(mesh.axis(name).traffic.bytes.values()) for name in ("ulysses", "ring"))
        found[label] = sent, peak[0]
        mesh.close()
    return found


FEW = ("copies of key-value heads",)


@pytest.mark.parametrize("labels", [FEW, pytest.param(tuple(STEPS), marks=pytest.mark.grid)], ids=["few", "all"])
def test_a_step_sends_and_keeps_what_was_planned(pool: RankPool, labels: tuple[str, ...]) -> None:
    """Recomputation included, and an attention that is kept, for which K/V are not sent again."""
    case = ParityCase("", family("llama"), {label: STEPS[label] for label in labels}, WIDE)
    by_rank = pool.run(4, observe_steps, case)
    for label, recipe in case.layouts.items():
        plan = make_plan(recipe, case.config)
        for rank, found in enumerate(by_rank):
            sent, kept = found[label]
            assert sent == measure_traffic(plan, rank)["cp"] > 0, label
            if recipe.memory.activation_checkpointing == "none":  # of others' layers these hooks see the inputs only
                planned = kept_activations(plan, rank) - plan.activations.chunk_bytes
                assert kept == pytest.approx(planned, rel=0.01), label
