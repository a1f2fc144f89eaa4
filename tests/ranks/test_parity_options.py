"""Parallel equals serial under the options of a recipe, at every ZeRO stage: two ranks with two microbatches each, in fp64."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from framework.recipe.schema import LearningRateSchedule, Memory, Model, Optim, ParameterGroup, Recipe, Zero
from framework.verify.compare import compare
from framework.verify.evidence import Evidence
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import Case, assert_equal, expect, small_recipe, train_layouts, worst_error
from tests.ranks.pool import RankPool
from tests.ranks.spare_model import SPARE

pytestmark = IN_TURN

WORLD = 2
SEQUENCES = 12
CLIP = 0.01
STAGES = tuple(Zero(stage=stage) for stage in range(4))
# Where all comes and goes; the others know less of the options.
SHARDED, OTHERS = STAGES[3:], STAGES[:3]

UNTIED_FREEZES = {
    "embedding": ["embed_tokens|wte"],
    "head": ["lm_head"],
    "all but the last layer and the head": [r"(layers|h)\.[01]\.", "embed_tokens|wte|wpe"],
    "norms and biases": ["norm|ln_|bias"],
}
GROUPS = {
    "slow embedding": ParameterGroup("embed_tokens|lm_head", lr_ratio=0.1, weight_decay=0.0),
    "fast middle": ParameterGroup(r"layers\.1\.", lr_ratio=3.0),
    "still norms": ParameterGroup("norm", lr_ratio=0.0, weight_decay=0.3),
}


@pytest.fixture(params=[SHARDED, pytest.param(OTHERS, marks=pytest.mark.grid)], ids=["3", "0 to 2"])
def stages(request: pytest.FixtureRequest) -> Sequence[Zero]:
    return request.param  # type: ignore[no-any-return]


def recipes(stages: Sequence[Zero], precision: str = "fp64", **groups: Any) -> dict[str, Recipe]:
    """One recipe for each stage. `groups`: whole groups of the recipe to replace."""
    recipe = replace(small_recipe(precision, WORLD, 2, SEQUENCES, CLIP), **groups)
    return {f"zero {zero.stage}": replace(recipe, zero=zero) for zero in stages}


def optim_recipes(stages: Sequence[Zero], **values: Any) -> dict[str, Recipe]:
    return recipes(stages, optim=Optim(lr=1e-2, clip_norm=CLIP, **values))


def train(pool: RankPool, world: int, case: Case) -> dict[str, Evidence]:
    """Evidence by the label of the layout."""
    return {label: evidence for (_, label), evidence in pool.run(world, train_layouts, [case])[0].items()}


def assert_bitwise_equal(a: Evidence, b: Evidence) -> None:
    assert (a.losses, a.norms) == (b.losses, b.norms)
    for of_a, of_b in ((a.gradients, b.gradients), (a.weights, b.weights)):
        assert of_a.keys() == of_b.keys()
        assert [name for name in of_a if not torch.equal(of_a[name], of_b[name])] == []


FROZEN = {("mixtral", "all but the last layer and the head")}


@pytest.mark.parametrize(
    ("name", "what"), few_of(product(("gpt2", "mixtral"), UNTIED_FREEZES), lambda *row: row in FROZEN)
)
def test_frozen_parameters_equal_one_process(pool: RankPool, stages: Sequence[Zero], name: str, what: str) -> None:
    layouts = recipes(stages, model=Model(freeze=UNTIED_FREEZES[what]))
    assert_equal(pool, WORLD, [Case(name, family(name), layouts, {"tie_word_embeddings": False})])


def test_a_frozen_tied_embedding_equals_one_process(pool: RankPool, stages: Sequence[Zero]) -> None:
    layouts = recipes(stages, model=Model(freeze=["embed_tokens"]))
    assert_equal(pool, WORLD, [Case("llama", family("llama"), layouts, {"tie_word_embeddings": True})])


OPTIMIZERS = ("adamw", "lion", "sgd")
FEW = {("lion", "mixtral"), ("sgd", "gpt2")}  # AdamW: nearly all other tests


@pytest.mark.parametrize(
    ("name", "model"), few_of(product(OPTIMIZERS, ("llama", "gpt2", "mixtral")), lambda *row: row in FEW)
)
def test_optimizers_equal_one_process(pool: RankPool, stages: Sequence[Zero], name: Any, model: str) -> None:
    assert_equal(pool, WORLD, [Case(model, family(model), optim_recipes(stages, name=name))])


@pytest.mark.grid
def test_sgd_without_momentum_equals_one_process(pool: RankPool, stages: Sequence[Zero]) -> None:
    assert_equal(pool, WORLD, [Case("gpt2", family("gpt2"), optim_recipes(stages, name="sgd", momentum=0.0))])


@pytest.mark.parametrize(
    ("name", "tied"), few_of(product(OPTIMIZERS, (True, False)), lambda *row: row == ("adamw", False))
)
def test_parameter_groups_equal_one_process(pool: RankPool, stages: Sequence[Zero], name: Any, tied: bool) -> None:
    layouts = optim_recipes(stages, name=name, groups=GROUPS)
    assert_equal(pool, WORLD, [Case(name, family("llama"), layouts, {"tie_word_embeddings": tied})])


def first_tokens(case: Case, rank: int) -> list[int]:
    """The first token of the last microbatch of a rank in each step."""
    rows = next(iter(case.layouts.values())).batch.sequences_per_microbatch
    return [int(batch.input_ids[(WORLD + rank) * rows, 0]) for batch in case.batches()]


@pytest.mark.parametrize("name", few_of(["adamw", "lion", "sgd"], lambda name: name == "adamw"))
def test_parameters_that_some_or_all_ranks_leave_out_equal_one_process(
    pool: RankPool, stages: Sequence[Zero], name: Any
) -> None:
    """Layer 1 runs on rank 1 alone, in its last microbatch; layer 3 and the spare weights run nowhere and do not decay."""
    layouts = optim_recipes(stages, name=name)
    case = Case("spare", SPARE, layouts, by_microbatch=True)
    opened = replace(case, changes={"open_tokens": first_tokens(case, rank=1)})
    assert not set(first_tokens(case, rank=0)) & set(first_tokens(case, rank=1))
    assert_equal(pool, WORLD, [opened])


@pytest.mark.grid
@pytest.mark.parametrize("name", few_of(["lion", "sgd"], lambda name: name == "lion"))
def test_parameters_left_out_of_a_whole_step_rest_in_it(pool: RankPool, stages: Sequence[Zero], name: Any) -> None:
    """Layer 1 runs in the first and in the last step. With AdamW it differs from stock: see docs/verify.md."""
    case = Case("spare", SPARE, optim_recipes(stages, name=name), by_microbatch=True)
    first, _, last = first_tokens(case, rank=1)
    assert_equal(pool, WORLD, [replace(case, changes={"open_tokens": [first, last]})])


@pytest.mark.parametrize("name", few_of(["mixtral", "qwen3_moe"], lambda name: name == "qwen3_moe"))
def test_router_balancing_terms_equal_one_process(pool: RankPool, stages: Sequence[Zero], name: str) -> None:
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    assert_equal(pool, WORLD, [Case(name, family(name), recipes(stages), changes, by_microbatch=True)])


@pytest.mark.parametrize("schedule", few_of(["cosine", "wsd"], lambda schedule: schedule == "wsd"))
def test_learning_rate_schedules_equal_one_process(pool: RankPool, stages: Sequence[Zero], schedule: Any) -> None:
    layouts = optim_recipes(stages, schedule=LearningRateSchedule(schedule, warmup_steps=1))
    assert_equal(pool, WORLD, [Case("llama", family("llama"), layouts)])


POLICIES = ("selective", "full", "sqrt")
DROPOUT = {"resid_pdrop": 0.2, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "n_layer": 5}


@pytest.mark.parametrize(
    ("name", "changes", "policies"),
    [
        # Where units come and go; selective: test_activation_checkpointing.py.
        pytest.param("gpt2", DROPOUT, {3: ("full", "sqrt")}, id="gpt2 with dropout"),
        *(
            pytest.param(name, changes, dict.fromkeys(range(4), POLICIES), marks=pytest.mark.grid, id=f"all of {name}")
            for name, changes in (("gpt2", DROPOUT), ("gemma2", {}), ("mixtral", {}))
        ),
    ],
)
def test_activation_checkpointing_is_bitwise_equal(
    pool: RankPool, name: str, changes: Mapping[str, Any], policies: Mapping[int, Sequence[str]]
) -> None:
    layouts = {}
    for stage, tried in policies.items():
        (recipe,) = recipes([STAGES[stage]], "fp32").values()
        for policy in ("none", *tried):
            memory = Memory(activation_checkpointing=policy, compile="never")  # type: ignore[arg-type]
            layouts[f"zero {stage} {policy}"] = replace(recipe, memory=memory)
    found = train(pool, WORLD, Case(name, family(name), layouts, changes))
    for stage, tried in policies.items():
        for policy in tried:
            assert_bitwise_equal(found[f"zero {stage} none"], found[f"zero {stage} {policy}"])


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("llama", (STAGES[0], STAGES[3])),
        *(pytest.param(name, STAGES, marks=pytest.mark.grid) for name in ("llama", "mixtral")),
    ],
    ids=["llama", "llama at all", "mixtral at all"],
)
def test_bf16_compute_stays_near_fp32(pool: RankPool, name: str, stages: Sequence[Zero]) -> None:
    """Loose on purpose: bf16 has 8 bits. All stages sum the same bf16 gradients in fp32, so they agree closely."""
    found = train(pool, WORLD, Case(name, family(name), recipes(stages, "bf16")))
    expected = expect(Case(name, family(name), recipes(stages, "fp32")))
    for evidence in found.values():
        assert {weight.dtype for weight in evidence.weights.values()} == {torch.float32}
        assert evidence.losses == pytest.approx(expected.losses, rel=1e-2)
        assert evidence.norms == pytest.approx(expected.norms, rel=5e-2)
        assert worst_error(compare(evidence, found["zero 0"])) < 1e-3


def test_a_rank_without_any_label_equals_one_process(pool: RankPool, stages: Sequence[Zero]) -> None:
    """Of four sequences one has no label in each step; it is all that its rank gets."""
    recipe = small_recipe("fp64", world=4, sequences=4, clip_norm=CLIP)
    layouts = {f"zero {zero.stage}": replace(recipe, zero=zero) for zero in stages}
    assert_equal(pool, 4, [Case("llama", family("llama"), layouts)])


@pytest.mark.parametrize(
    "ways",
    [((1, 0), (4, 3)), pytest.param(tuple(product((1, 2, 4), (0, 3))), marks=pytest.mark.grid)],
    ids=["few", "all"],
)
def test_dropout_is_the_same_in_every_layout(pool: RankPool, ways: Sequence[tuple[int, int]]) -> None:
    """Masks are drawn for a microbatch of the global batch, whichever rank computes it."""
    changes = {"resid_pdrop": 0.3, "attn_pdrop": 0.2, "embd_pdrop": 0.1}
    layouts = {
        f"{world} ranks, zero {stage}": small_recipe("fp64", world, 4 // world, sequences=8, zero=Zero(stage=stage))
        for world, stage in ways
    }
    found = train(pool, 4, Case("gpt2", family("gpt2"), layouts, changes))
    alone = "1 ranks, zero 0"
    without, reference = train(pool, 1, Case("gpt2", family("gpt2"), {alone: layouts[alone]})), found[alone]
    assert all(worst_error(compare(each, reference)) < 1e-9 for each in found.values())
    assert worst_error(compare(reference, without[alone])) > 1e-2
