"""Sabotage: drop the one line that enforces a law, and the comparison with one process fails. What cannot fail proves nothing.

Each sabotage patches one function, inside the ranks of one body; the oracle beside them stays whole.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from framework.comm.collectives import Pending
from framework.comm.communicator import Communicator
from framework.model import initial, stage
from framework.model.initial import draw_unit, seed_for
from framework.model.objective import count_tokens
from framework.parallel.zero import gradients
from framework.parallel.zero.buffers import GradientState, MainGradView, UnitBuffer
from framework.recipe.schema import Zero
from framework.train import step
from framework.train.stage import RankStage
from framework.verify.compare import NUM_REFERENCES, ErrorRow, compare, exceeds, judge
from framework.verify.evidence import Evidence, perturb
from framework.verify.layout import initial_weights
from framework.verify.oracle import run_oracle
from tests.families import family
from tests.laws.sabotage import Errors, Sabotage, errors_of, train_each, whole
from tests.ranks.parity import Case, small_recipe, train_layouts, worst_error
from tests.ranks.pool import RankPool
from tests.ranks.spare_model import SPARE

WORLD = 2
ACCUMULATION = 2
SEQUENCES = 12
TOLERANCE = 1e-9
# A broken law must show far beyond the tolerance, not at its edge.
VISIBLE = 1e-4


# --- law 3: the loss is a local sum over the global number of loss tokens


def count_tokens_of_the_rank() -> Any:
    """The number of loss tokens is not summed over ranks."""

    return patch.object(step, "start_all_reduce", lambda x, axis: Pending())


def average_microbatches() -> Any:
    """Each microbatch's mean counts alike, however many of its tokens do (Hugging Face's Trainer until 2024)."""
    whole = RankStage._part_of_loss

    def mean(stage: RankStage, microbatch: int, output: Any, *sums: Tensor) -> Tensor:
        inputs = stage.inputs
        own = count_tokens(inputs.microbatches[microbatch].labels, None).sum() * WORLD * ACCUMULATION
        stage.start_step(replace(inputs, num_tokens=own))
        loss = whole(stage, microbatch, output, *sums)
        stage.start_step(inputs)
        return loss

    return patch.object(RankStage, "_part_of_loss", mean)


def balance_each_microbatch_fully() -> Any:
    """A router's load-balancing loss is added for each microbatch rather than averaged over them."""
    whole = RankStage.start_step
    return patch.object(
        RankStage, "start_step", lambda stage, inputs: whole(stage, replace(inputs, num_microbatches=1))
    )


# --- law 1: gradients are summed over microbatches, uses and ranks


def keep_the_last_microbatch() -> Any:
    """A later microbatch's gradient replaces the former ones."""
    whole = MainGradView.add

    def overwrite(place: MainGradView, gradient: Tensor) -> None:
        place.state = GradientState.REDUCED
        whole(place, gradient)

    return patch.object(MainGradView, "add", overwrite)


def forget_the_head_of_a_tied_weight() -> Any:
    """A tied embedding gets the gradient of its use as an embedding only."""
    whole = MainGradView.add_matmul

    def without_head(place: MainGradView, left: Tensor, right: Tensor) -> None:
        if "embed" not in place._slot.name:
            whole(place, left, right)

    return patch.object(MainGradView, "add_matmul", without_head)


def send_no_gradients() -> Any:
    """Replicas keep their own sums."""
    return patch.object(gradients, "start_all_reduce", lambda x, axis, label, wire: Pending())


def scatter_without_adding() -> Any:
    """A shard is made of its rank's own gradients."""

    def keep_own(part: Tensor, full: Tensor, axis: Communicator, label: str, wire: Any) -> Pending:
        part.copy_(full.view(axis.size, -1)[axis.rank])
        return Pending()

    return patch.object(gradients, "start_reduce_scatter", keep_own)


# --- law 2: every element counts once in the norm


def count_replicas_in_the_norm() -> Any:
    """Every rank counts all that it holds."""
    return patch.object(UnitBuffer, "counted_elements", lambda buffer, values: [values])


def count_the_norm_of_the_rank() -> Any:
    """Norms are not summed over the world."""

    return patch.object(step, "all_reduce", lambda x, axis, label: None)


# --- law 5: init belongs to the parameter, not to the rank


def draw_weights_by_rank() -> Any:
    """Each rank draws weights of its own."""

    def draw(model: Any, unit: Any, seed: int, device: torch.device) -> dict[str, Tensor]:
        return draw_unit(model, unit, seed + dist.get_rank(), device)

    return patch.object(initial, "draw_unit", draw)


# --- what stock optimizers do


def decay_what_was_not_reached() -> Any:
    """Parameters without a gradient are updated like all others."""
    return patch.object(step, "_missed_elements", lambda run, missed, reached: [])


# --- dropout belongs to the microbatch, not to the rank


def seed_dropout_by_rank() -> Any:
    """Masks follow the microbatch's number on its rank."""

    def seed(run_seed: int, word: str, at: int, index: int, unit: str) -> int:
        world = dist.get_world_size() if dist.is_initialized() else 1
        return seed_for(run_seed, word, at, index // world, unit)

    return patch.object(stage, "seed_for", seed)


def case(
    name: str = "llama",
    stage: int = 0,
    by_microbatch: bool = False,
    clip: float = 0.05,
    precision: str = "fp64",
    optim: Any = "adamw",
    **changes: Any,
) -> Case:
    recipe = small_recipe(precision, WORLD, ACCUMULATION, SEQUENCES, clip, Zero(stage=stage))
    recipe = replace(recipe, optim=replace(recipe.optim, name=optim))
    return Case(name, SPARE if name == "spare" else family(name), {"": recipe}, changes, by_microbatch)


CASES = {
    "replicas": case(),
    "shards": case(stage=3),
    "router": case("mixtral", by_microbatch=True, output_router_logits=True),
    "tied": case(tie_word_embeddings=True),
    "spare": case("spare", by_microbatch=True, clip=0.01),
    "replicas with lion": case(optim="lion"),
    "spare with lion": case("spare", by_microbatch=True, clip=0.01, optim="lion"),
    "replicas in bf16": case(precision="bf16"),
    "shards in bf16": case(stage=3, precision="bf16"),
}
# What is dropped, the case in which it shows, and the row in which it must.
SABOTAGES = (
    (count_tokens_of_the_rank, "replicas", "loss"),
    (average_microbatches, "replicas", "loss"),
    (balance_each_microbatch_fully, "router", "gradient, step 1"),
    (keep_the_last_microbatch, "replicas", "gradient, step 1"),
    (forget_the_head_of_a_tied_weight, "tied", "gradient, step 1"),
    (send_no_gradients, "replicas", "gradient, step 1"),
    (scatter_without_adding, "shards", "gradient, step 1"),
    (count_replicas_in_the_norm, "replicas", "gradient norm"),
    (count_the_norm_of_the_rank, "shards", "gradient norm"),
    (draw_weights_by_rank, "replicas", "loss"),
    (decay_what_was_not_reached, "spare", "weight, step 3"),
)
# The oracle follows Lion's signs where rounding decides them, and bounds in bf16 are measured: neither may hide what these do.
LION_SABOTAGES = (
    (keep_the_last_microbatch, "replicas with lion", "weight, step 3"),
    (send_no_gradients, "replicas with lion", "weight, step 3"),
    (decay_what_was_not_reached, "spare with lion", "weight, step 3"),
)

BF16_SABOTAGES = (
    (count_tokens_of_the_rank, "replicas in bf16", "gradient norm"),
    (keep_the_last_microbatch, "replicas in bf16", "gradient, step 1"),
    (scatter_without_adding, "shards in bf16", "gradient, step 1"),
    (count_the_norm_of_the_rank, "shards in bf16", "gradient norm"),
)
IN_BF16 = sorted({label for _, label, _ in BF16_SABOTAGES})


def sabotages_of(label: str) -> list[Sabotage]:
    return [sabotage for sabotage, at, _ in (*SABOTAGES, *LION_SABOTAGES, *BF16_SABOTAGES) if at == label]


@pytest.fixture(scope="module")
def errors(pool: RankPool) -> Callable[[str], Errors]:
    """Of a case, found once."""
    return cache(lambda label: errors_of(pool, sabotages_of(label), CASES[label]))


@pytest.mark.parametrize("label", sorted(CASES.keys() - IN_BF16))
def test_whole_code_is_within_the_tolerance(errors: Callable[[str], Errors], label: str) -> None:
    assert max(errors(label)["whole"].values()) < TOLERANCE


@pytest.mark.parametrize(("sabotage", "label", "quantity"), SABOTAGES, ids=[entry[0].__name__ for entry in SABOTAGES])
def test_a_dropped_law_shows(errors: Callable[[str], Errors], sabotage: Sabotage, label: str, quantity: str) -> None:
    assert errors(label)[sabotage.__name__][quantity] > VISIBLE


@pytest.mark.parametrize(
    ("sabotage", "label", "quantity"), LION_SABOTAGES, ids=[entry[0].__name__ for entry in LION_SABOTAGES]
)
def test_a_dropped_law_shows_with_lion_too(
    errors: Callable[[str], Errors], sabotage: Sabotage, label: str, quantity: str
) -> None:
    assert errors(label)[sabotage.__name__][quantity] > VISIBLE


@pytest.fixture(scope="module")
def rows(pool: RankPool) -> Callable[[str], dict[str, dict[str, ErrorRow]]]:
    """Of a case in bf16, by sabotage, each quantity's worst step or parameter beside its bound, as `meshwright verify --dtype
    bf16` has them. How a rank holds its shards is not the oracle's: one truth and its references are for all cases."""
    of = CASES[IN_BF16[0]]
    weights, batches = initial_weights(of.config, of.recipe.train.seed), of.batches()
    truth = run_oracle(of.recipe, of.config, weights, batches, torch.float32)
    references = []
    for seed in range(NUM_REFERENCES):
        rounded = {name: perturb(weight, torch.bfloat16, seed) for name, weight in weights.items()}
        references.append(run_oracle(of.recipe, of.config, rounded, batches, torch.bfloat16))

    def rows_of(label: str) -> dict[str, dict[str, ErrorRow]]:
        found = pool.run(WORLD, train_each, [whole, *sabotages_of(label)], CASES[label])[0]
        return {
            name: {row.quantity: row for row in judge(each, references, truth, "bf16")} for name, each in found.items()
        }

    return cache(rows_of)


@pytest.mark.parametrize("label", IN_BF16)
def test_whole_code_is_within_the_bounds_of_bf16(
    rows: Callable[[str], dict[str, dict[str, ErrorRow]]], label: str
) -> None:
    assert not exceeds(list(rows(label)["whole"].values()), 0.0)


@pytest.mark.parametrize(
    ("sabotage", "label", "quantity"), BF16_SABOTAGES, ids=[entry[0].__name__ for entry in BF16_SABOTAGES]
)
def test_a_dropped_law_shows_at_the_bounds_of_bf16(
    rows: Callable[[str], dict[str, dict[str, ErrorRow]]], sabotage: Sabotage, label: str, quantity: str
) -> None:
    row = rows(label)[sabotage.__name__][quantity]
    assert row.within is not None
    assert row.error > 2 * row.within


def train_sabotaged(
    rank: int, world: int, rendezvous: str, sabotage: Sabotage, cases: list[Case]
) -> dict[tuple[str, str], Evidence]:
    """Body: `train_layouts` under a sabotage, which ends with it."""
    with sabotage():
        return train_layouts(rank, world, rendezvous, cases)


def test_dropout_seeded_by_rank_shows(pool: RankPool) -> None:
    layouts = {f"{world} ranks": small_recipe("fp64", world, 2 // world, sequences=4) for world in (1, 2)}
    dropout = Case("gpt2", family("gpt2"), layouts, {"resid_pdrop": 0.3})
    worst = {}
    for sabotage in (whole, seed_dropout_by_rank):
        one, two = pool.run(WORLD, train_sabotaged, sabotage, [dropout])[0].values()
        worst[sabotage] = worst_error(compare(one, two))
    assert worst[whole] < TOLERANCE
    assert worst[seed_dropout_by_rank] > VISIBLE
