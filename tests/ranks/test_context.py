"""Context parallelism is the training run of stock Hugging Face and torch in one process: losses, every gradient, norms, weights,
whatever ranks divide the tokens of a sequence among them and by whichever method they attend to one another's.

The product of families, meshes, methods, lengths, ZeRO and the rest is too large: in the grid any two of their values meet.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from framework.comm.collectives import all_gather
from framework.comm.connect import connect
from framework.data.pack import Microbatch, cut_context
from framework.plan.plan import make_plan
from framework.recipe.derive import context_degrees, has_tokens_everywhere
from framework.recipe.schema import Batch, Memory, Parallel, Recipe, Zero
from framework.train.build import build
from framework.train.stage import StepInputs
from tests.families import build_config, family
from tests.grid import few_of
from tests.ranks import mixers
from tests.ranks.covering import cover_pairs
from tests.ranks.mixers import PLAIN, RECOMPUTES, Method
from tests.ranks.parity import CPU, Case, assert_equal, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.test_bubble_filling import train_both

EIGHT_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    "gpt_oss": {"num_local_experts": 8},
}
FOUR_LAYERS: dict[str, dict[str, Any]] = {
    name: {"layer_types": ["sliding_attention", "full_attention"] * 2} for name in ("gemma2", "gpt_oss", "cohere2")
}
NAMES = ("llama", "qwen3", "mistral", "gemma2", "deepseek_v3", "olmo2", "glm4", "cohere2", "qwen3_moe", "gpt_oss")
MIXTURES = ("deepseek_v3", "gpt_oss", "qwen3_moe")

CHUNKED = Memory(chunked_loss=True, compile="never")


@dataclass(frozen=True)
class Way(mixers.Way):
    """A training run with more of what attention and experts can. capacity: model.expert_capacity."""

    capacity: float | None = None
    bias_rate: float = 0.0

    @property
    def recipe(self) -> Recipe:
        recipe = super().recipe
        return replace(
            recipe, model=replace(recipe.model, expert_capacity=self.capacity, router_bias_rate=self.bias_rate)
        )

    def case(self) -> Case:
        changes = dict(EIGHT_EXPERTS.get(self.family, {}))
        if self.pp > 1:
            changes |= {"num_hidden_layers": 4, **FOUR_LAYERS.get(self.family, {})}
        # By microbatch: a load-balancing loss is no sum over tokens.
        return Case(str(self), family(self.family), {"": self.recipe}, changes, "output_router_logits" in changes)


# Each mechanism once: the methods, two ranks and four, lengths that need padding and not, packed documents that span ranks,
# windows, soft-caps, sinks, unequal head dims, experts with capacity and balancing, beside every other axis.
SHOWN = (
    Way("gemma2", 2, "ulysses", tp=2, zero=Zero(stage=1), packs=True, memory=CHUNKED),
    Way("deepseek_v3", 2, pp=2, ep=2, count=3, schedule="zbv", bias_rate=0.05),
)
MORE = (
    Way("mistral", 4, (2, 2), context=16, packs=True, memory=RECOMPUTES),
    Way("llama", 2, dp=2, zero=Zero(stage=3), packs=True, precision="fp32"),
    Way("gpt_oss", 2, "gather", dp=2, ep=2, zero=Zero(stage=3)),
    Way("qwen3_moe", 2, tp=2, ep=2, capacity=1.0, zero=Zero(stage=1)),
    Way("llama", 4, context=9),
)


@pytest.mark.parametrize("ways", [SHOWN, pytest.param(MORE, marks=pytest.mark.grid)], ids=["few", "more"])
def test_tokens_divided_by_each_method_equal_one_process(pool: RankPool, ways: tuple[Way, ...]) -> None:
    assert_equal(pool, 4, [way.case() for way in ways])


def test_a_rank_may_have_one_token_of_each_sequence(pool: RankPool) -> None:
    assert_equal(pool, 2, [Way("llama", 2, "ulysses", context=2).case()])


# (cp, dp, tp, pp, ep, sequence, schedule)
MESHES: tuple[tuple[int, int, int, int, int, bool, str], ...] = (
    (2, 1, 1, 1, 1, True, "1f1b"),
    (2, 1, 1, 1, 2, True, "1f1b"),
    (2, 2, 1, 1, 4, True, "1f1b"),
    (2, 1, 2, 1, 1, True, "1f1b"),
    (2, 1, 2, 1, 2, False, "1f1b"),
    (2, 1, 2, 1, 4, True, "1f1b"),
    (2, 1, 1, 2, 1, True, "1f1b"),
    (2, 1, 1, 2, 2, True, "zb_h1"),
    (2, 1, 1, 2, 1, True, "interleaved"),
    (4, 1, 1, 1, 1, True, "1f1b"),
    (4, 1, 1, 1, 2, True, "1f1b"),
    (4, 1, 1, 1, 4, True, "1f1b"),
    (4, 1, 2, 1, 1, True, "1f1b"),
    (4, 1, 2, 1, 8, True, "1f1b"),
    (4, 1, 2, 1, 2, False, "1f1b"),
    (4, 1, 1, 2, 1, True, "zbv"),
    (4, 2, 1, 1, 2, True, "1f1b"),
    (2, 1, 2, 2, 2, True, "1f1b"),
    (2, 1, 2, 2, 1, False, "zb_h1"),
)
METHODS: tuple[Method, ...] = ("ring", "ulysses", "gather", (2, 2))
ZEROS = (Zero(stage=0), Zero(stage=1), Zero(stage=3), Zero(stage=3, shard_within=2), Zero(stage=2, accumulate="local"))


def can_run(
    name: str,
    mesh: tuple[int, int, int, int, int, bool, str],
    method: Method,
    context: int,
    packs: bool,
    zero: Zero,
    memory: Memory,
    precision: str,
) -> bool:
    cp, _, tp, _, ep, _, _ = mesh
    if isinstance(method, tuple) and method[0] * method[1] != cp:
        return False
    ulysses, ring = context_degrees(Parallel(cp=cp, context=list(method) if isinstance(method, tuple) else method))  # type: ignore[arg-type]
    is_divided = 4 // tp % ulysses == 0 and has_tokens_everywhere(context, ulysses, ring)
    return is_divided and (ep == 1 or name in MIXTURES)


@cache
def cover() -> tuple[Way, ...]:
    memories = (PLAIN, RECOMPUTES, CHUNKED)
    rows = cover_pairs((NAMES, MESHES, METHODS, (16, 13, 9), (False, True), ZEROS, memories, ("fp64", "fp32")), can_run)
    return tuple(
        Way(name, cp, method, dp, tp, pp, ep, sequence, zero, context, packs, 3 if pp > 1 else 1, memory, precision, schedule)
        for name, (cp, dp, tp, pp, ep, sequence, schedule), method, context, packs, zero, memory, precision in rows
    )  # fmt: skip


@pytest.fixture(scope="module")
def eight():
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_any_two_of_family_mesh_method_length_and_options_equal_one_process(eight: RankPool, name: str) -> None:
    assert_equal(eight, 8, [way.case() for way in cover() if way.family == name])


# A family for each form of attention, with what its small config lacks of it. Bloom's biases of distance are its own code.
FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "gemma2": {"attn_logit_softcapping": 1.0},
    "gpt_oss": {},
    "llama4_text": {},
    "deepseek_v3": {"v_head_dim": 6},
    "bloom": {},
}


def test_each_family_has_the_form_that_it_stands_for() -> None:
    of = {name: build_config(family(name), **changes) for name, changes in FORMS.items()}
    tokens = Way("llama").context
    assert of["llama"].num_key_value_heads < of["llama"].num_attention_heads
    assert of["mistral"].sliding_window < tokens
    assert {*of["gemma2"].layer_types} == {*of["gpt_oss"].layer_types} == {"sliding_attention", "full_attention"}
    assert of["gemma2"].attn_logit_softcapping == 1
    assert "chunked_attention" in of["llama4_text"].layer_types
    assert of["llama4_text"].attention_chunk_size < tokens
    assert of["deepseek_v3"].qk_head_dim > of["deepseek_v3"].v_head_dim


@pytest.mark.parametrize(
    ("name", "precision"),
    few_of(product(FORMS, ("fp64", "fp32")), lambda name, precision: (name, precision) == ("mistral", "fp64")),
)
def test_every_form_packed_or_not_equals_transformers(pool: RankPool, name: str, precision: str) -> None:
    """Among one rank of cp and two, with heads on one rank of tp and on two; the oracle sees one document at a time.

    llama         causal, key-value heads shared by query heads (in all but deepseek_v3 and bloom)
    mistral       a sliding window in every layer
    gemma2        soft caps; windows in every other layer
    gpt_oss       sinks; windows in every other layer
    llama4_text   chunks; layers without rope, whose queries have a temperature
    deepseek_v3   latent attention: keys longer than values
    bloom         ALiBi, which transformers computes: unpacked, since it does not keep documents apart
    """
    ways = [
        Way(name, cp, tp=tp, packs=packs, precision=precision, memory=RECOMPUTES if packs else PLAIN,
            sequence=(name, cp) != ("bloom", 2))
        for cp, tp, packs in product((1, 2), (1, 2), (False, True)[: 1 + (name != "bloom")])
    ]  # fmt: skip
    cases = [way.case() for way in ways]
    assert_equal(pool, 4, [replace(case, changes=case.changes | FORMS[name]) for case in cases])


ALL_AXES = (
    Way("qwen3_moe", 2, tp=2, pp=2, ep=2, zero=Zero(stage=1), count=3),
    Way("deepseek_v3", 2, "ulysses", dp=2, pp=2, ep=4, zero=Zero(stage=3), packs=True, count=3, schedule="zb_h1"),
    Way("gpt_oss", 2, "gather", dp=2, tp=2, ep=4, zero=Zero(stage=3, shard_within=2)),
)


@pytest.mark.grid
def test_all_axes_at_once_on_eight_ranks_equal_one_process(eight: RankPool) -> None:
    assert_equal(eight, 8, [way.case() for way in ALL_AXES])


# --- validation


DROPOUT = {"resid_pdrop": 0.3, "embd_pdrop": 0.1, "attn_pdrop": 0.0, "n_layer": 4}


@pytest.mark.grid
@pytest.mark.parametrize(("pp", "free"), [(1, 0.0), (2, 1 / 5)])
def test_validation_counts_every_token_once_in_bubbles_and_alone(pool: RankPool, pp: int, free: float) -> None:
    """And ranks of cp, which have other tokens, drop other elements of them."""
    way = Way("gpt2", 2, pp=pp, context=9, count=3)
    cases = [Case(str(each), family("gpt2"), {"": each.recipe}, DROPOUT) for each in (way, replace(way, cp=1, pp=1))]
    divided, whole = (pool.run(case.recipe.launch.ranks or 0, train_both, case) for case in cases)
    for alone, filled in (of_rank[""] for of_rank in divided):
        assert filled.equals(alone)
        assert filled.validations == alone.validations
        assert filled.free_fraction == free
    # Before the first step, since dropout then makes it another run.
    assert divided[0][""][0].validations[0] == pytest.approx(whole[0][""][0].validations[0], rel=1e-12)
    first, neighbour = (of_rank[""][0].states[0] for of_rank in divided[:2])
    assert not torch.equal(first, neighbour)


# --- who sees whom: the probe


LENGTH = 29
DOCUMENTS = (11, 3, 15)


def see(rank: int, world: int, rendezvous: str, way: Way) -> Tensor:
    """Body: [T, T] bool, whether logits at position t (row) change in any bit when token s (column) is another one."""
    config = build_config(family(way.family))
    config.use_cache = False
    batch = Batch(sequences_per_step=LENGTH + 1, sequences_per_microbatch=LENGTH + 1, context=LENGTH)
    recipe = replace(way.recipe, batch=batch)
    plan = make_plan(recipe, config)
    mesh = connect(topology_of(recipe, config), CPU, rendezvous, rank)
    run = build(plan, mesh)
    # Row 0 is left alone; row s + 1 has another token at s.
    tokens = torch.randint(3, 90, (LENGTH,), generator=torch.Generator().manual_seed(1)).repeat(LENGTH + 1, 1)
    tokens[torch.arange(LENGTH) + 1, torch.arange(LENGTH)] += 5
    positions = None
    if way.packs:
        positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).repeat(LENGTH + 1, 1)
    slices = plan.context_slices(rank)
    own = cut_context(Microbatch(tokens, tokens, positions), slices)
    stage, logits = run.stages[0], []
    stage.model.model.get_output_embeddings().register_forward_hook(lambda head, args, output: logits.append(output))
    stage.start_step(StepInputs([own], (), torch.zeros((), dtype=torch.int64), 0, run.loss_scale.value))
    with torch.no_grad():
        stage.validate(0, ())
    changed = (logits[0][1:] != logits[0][:1]).any(-1).byte()
    parts = changed.new_empty(slices.ranks, *changed.shape)
    all_gather(parts, changed, mesh.axis("cp"))
    mesh.close()
    return slices.join(parts).T.bool()


def expect_to_see(window: int | None, layers: int, packs: bool) -> Tensor:
    """[T, T] bool, by the definition: through each layer a token sees those at most window - 1 before it, of its document."""
    row, seen = torch.arange(LENGTH), torch.eye(LENGTH)
    document = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS)) * packs
    distance = row[:, None] - row
    one = (distance >= 0) & (distance < (window or LENGTH)) & (document[:, None] == document)
    for _ in range(layers):
        seen = (one.float() @ seen).bool().float()
    return seen.bool()


@pytest.mark.parametrize(
    ("name", "window", "packs", "methods"),
    few_of(
        [
            ("mistral", 5, True, METHODS[-1:]),
            ("mistral", 5, True, METHODS[:-1]),
            *((*row, METHODS) for row in (("llama", None, False), ("llama", None, True), ("mistral", 5, False))),
        ],
        lambda *row: row[-1] == METHODS[-1:],
    ),
)
def test_a_changed_token_changes_exactly_what_may_see_it(
    pool: RankPool, name: str, window: int | None, packs: bool, methods: tuple[Method, ...]
) -> None:
    """On every rank, across ranks, and for documents that begin on one rank and end on another."""
    expected = expect_to_see(window, 3, packs)
    for method in methods:
        found = pool.run(4, see, Way(name, 4, method, context=LENGTH, packs=packs))
        assert all(torch.equal(each, expected) for each in found), (method, (found[0] != expected).nonzero().tolist())
