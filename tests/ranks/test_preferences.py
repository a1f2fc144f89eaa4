"""Losses of preferences are the published formulas in every layout: loss, metrics, gradients, norm and weights, in fp64 to 1e-9.

The oracle (`verify/plain.py`) puts every answer into a row of its own, sums its log-probabilities one by one and
compares one pair after another.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from framework.comm.connect import connect
from framework.data.loader import Loader, open_data, validation_batches
from framework.data.prepare import prepare
from framework.errors import DataError
from framework.model import objective
from framework.model.hub import find_folder
from framework.model.load import load_config
from framework.plan.plan import make_plan
from framework.recipe.method_schema import NONE, PROBE, WANTED
from framework.recipe.schema import (
    Adapter,
    LossSettings,
    Memory,
    Model,
    Parallel,
    ParameterGroup,
    Precision,
    Recipe,
    Zero,
)
from framework.train.build import build
from framework.train.rank import _sequences
from framework.train.reference import add_reference, freeze, identify
from framework.train.step import score, train_step
from framework.verify.compare import compare
from framework.verify.evidence import TokenBatch, keep_double, make_batches
from framework.verify.layout import initial_weights, run_layout, share
from scripts.bench.foresight_memory import Allocations
from tests.families import build_config, family
from tests.grid import IN_TURN, few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, STEPS, Case, assert_equal, expect, small_recipe, topology_of, worst_error
from tests.ranks.pool import RankPool
from tests.unit.test_preferences import make_pairs, make_recipe

pytestmark = IN_TURN

SEQUENCES, CONTEXT = 12, 26
SETTINGS = {
    "dpo": LossSettings("dpo", 0.3, reference="FOLDER"),
    "base": LossSettings("dpo", 0.3, reference="base"),
    "ipo": LossSettings("ipo", 0.2, reference="FOLDER"),
    "simpo": LossSettings("simpo", 2.0, 0.7),
    "orpo": LossSettings("orpo", 0.4),
    "kto": LossSettings("kto", 0.2, reference="FOLDER"),
    "kto of base": LossSettings("kto", 0.2, reference="base"),
}


@dataclass(frozen=True)
class PairCase(Case):
    """A case whose rows are pairs of answers, some of them none."""

    def batches(self) -> list[TokenBatch]:
        return make_batches(self.config, STEPS, SEQUENCES, CONTEXT, 11, loss=self.recipe.loss)


def recipe_of(
    name: str, zero: int = 0, tp: int = 1, pp: int = 1, cp: int = 1, dp: int = 1, count: int = 2, chunked: bool = False
) -> Recipe:
    loss = SETTINGS[name]
    recipe = small_recipe(
        "fp64", dp * tp * pp * cp, count, SEQUENCES, None, Zero(stage=zero), Parallel(tp=tp, pp=pp, cp=cp)
    )
    return replace(
        recipe,
        loss=loss,
        batch=replace(recipe.batch, context=CONTEXT),
        data=replace(recipe.data, pack="best_fit"),
        adapter=Adapter("lora", 3) if loss.reference == "base" else Adapter(),
        memory=replace(Memory(compile="never"), chunked_loss=chunked),
    )


def case_of(recipe: Recipe, **changes: Any) -> PairCase:
    return PairCase("pairs", family("llama"), {"": recipe}, **changes)


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_are_their_formulas(name: str) -> None:
    case, recipe = case_of(recipe_of(name, count=3)), recipe_of(name, count=3)
    mesh = connect(topology_of(recipe, case.config), CPU)
    found = run_layout(make_plan(recipe, case.config), case.batches(), mesh)
    mesh.close()
    rows = compare(found, expect(case))
    assert worst_error(rows) < 1e-9, rows


FACTORS: list[list[Any]] = [[*SETTINGS], [0, 3], [1, 2], [1, 2], [1, 2], [1, 2], [1, 3], [False, True]]
ROWS = cover_pairs(FACTORS, lambda name, zero, tp, pp, cp, dp, count, chunked: 1 < tp * pp * cp * dp <= 4)
SHOWN = [("dpo", 3, 1, 1, 2, 1, 2, False), ("kto of base", 0, 2, 1, 1, 1, 1, True), ("orpo", 3, 1, 2, 1, 1, 3, False)]


@pytest.mark.parametrize("row", [*SHOWN, *(pytest.param(row, marks=pytest.mark.grid) for row in ROWS)], ids=str)
def test_losses_are_their_formulas_in_any_layout(pool: RankPool, row: tuple[Any, ...]) -> None:
    recipe = recipe_of(*row)
    assert_equal(pool, recipe.launch.ranks, [case_of(recipe)])


def test_answers_that_change_places_show() -> None:
    case = case_of(recipe_of("dpo"))
    mesh = connect(topology_of(case.recipe, case.config), CPU)
    plan = make_plan(case.recipe, case.config)
    with patch.object(objective, "_margin", lambda rewards: rewards[..., 1] - rewards[..., 0]):
        swapped = run_layout(plan, case.batches(), mesh)
    mesh.close()
    assert worst_error(compare(swapped, expect(case))) > 1e-3


def count_scoring(rank: int, world: int, rendezvous: str, recipe: Recipe) -> int:
    """Body: the most bytes that the frozen model's forwards over a step's microbatches hold behind one of them."""
    case = case_of(recipe)
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    microbatches = share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh)
    allocations, found = Allocations(), [0]
    for stage in run.stages.values():
        validate = stage.validate

        def counted(*args: Any, validate: Any = validate) -> Any:
            outputs = validate(*args)
            found.append(allocations.count(set()))
            return outputs

        stage.validate = counted  # type: ignore[method-assign]
    with allocations:
        score(run, microbatches, with_adapters=False)
    run.close()
    mesh.close()
    return max(found)


@pytest.mark.grid
def test_hidden_states_that_references_hold_are_planned(pool: RankPool) -> None:
    """With few layers on a rank a pipeline has most in the forwards of the reference, whose messages nothing answers."""
    recipe = recipe_of("base", pp=3, count=12)
    recipe = replace(recipe, memory=replace(recipe.memory, activation_checkpointing="full"))
    plan = make_plan(recipe, case_of(recipe).config)
    found = pool.run(3, count_scoring, recipe, timeout_s=300)
    for rank in (0, 1):
        held = plan.memory(rank).phases["forward"]
        assert held["communication"] == plan.activations.hidden_bytes * (12 + rank)
        assert found[rank] == pytest.approx(held["communication"], abs=64)


def find_metrics(rank: int, world: int, rendezvous: str, recipe: Recipe) -> dict[str, float | None]:
    """Body: the metrics of a step."""
    case = case_of(recipe)
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    microbatches = share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh)
    with keep_double(torch.float64):
        values = train_step(run, microbatches, 0, 0.1).read()
    names = run.objective.metrics
    run.close()
    mesh.close()
    return dict(zip(names, values.metrics, strict=True))


def expect_metrics(recipe: Recipe) -> dict[str, float]:
    """The metrics of the same step, one answer after another. Adapters begin without effect."""
    case, loss = case_of(recipe), recipe.loss
    batch, config = case.batches()[0], case.config
    weights = initial_weights(config, recipe.train.seed, CPU)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.load_state_dict({name: each.double() for name, each in weights.items()}, strict=False)
    assert batch.position_ids is not None and batch.answers is not None  # noqa: PT018
    found: list[tuple[int, float, float, float]] = []  # kind, log p, log p of the reference, tokens
    for row in range(SEQUENCES):
        starts = (batch.position_ids[row] == 0).nonzero().flatten().tolist()
        kinds = [int(each) for each in batch.answers.kinds[row] if each]
        for place, kind in enumerate(kinds):
            part = slice(starts[place], [*starts, CONTEXT][place + 1])
            with torch.no_grad(), keep_double(torch.float64):
                log_p = model(input_ids=batch.input_ids[row, part][None]).logits[0].double().log_softmax(-1)
            own = [float(log_p[t, label]) for t, label in enumerate(batch.labels[row, part].tolist()) if label != -100]
            of_reference = sum(own) if loss.reference == "base" else float(batch.answers.reference[row, place])
            found.append((kind, sum(own), of_reference, len(own)))

    def reward(each: tuple[int, float, float, float]) -> float:
        _, p, reference, length = each
        reference = reference if loss.needs_reference else 0.0
        return loss.beta * (p - reference) / (1.0 if loss.name in ("dpo", "kto") else length)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    counted = [each for each in found if each[0] == PROBE or loss.name != "kto"]
    kl = mean([p - reference for _, p, reference, _ in counted])
    limits = [loss.beta * max(kl, 0.0) if loss.name == "kto" else reward(each) for each in found[1::2]]
    right = [(reward(each) > limit) == (each[0] == WANTED) for each, limit in zip(found[::2], limits, strict=True)]
    of_kind = {kind: mean([reward(each) for each in found if each[0] == kind]) for kind in (1, 2)}
    metrics = {
        "reward_chosen": of_kind[1],
        "reward_rejected": of_kind[2],
        "reward_accuracy": mean([float(each) for each in right]),
    }
    return metrics | ({"kl": kl} if loss.needs_reference else {})


@pytest.mark.parametrize(
    ("name", "layout"),
    few_of(
        [(name, layout) for name in SETTINGS for layout in ({"cp": 2}, {"tp": 2, "pp": 2, "zero": 3}, {"dp": 2, "count": 3})],
        lambda name, layout: name in ("dpo", "kto") and "cp" in layout,
    ),
)  # fmt: skip
def test_metrics_are_means_over_the_batch(pool: RankPool, name: str, layout: dict[str, int]) -> None:
    recipe = recipe_of(name, **layout)
    for found in pool.run(recipe.launch.ranks, find_metrics, recipe, timeout_s=300):
        assert found == pytest.approx(expect_metrics(recipe), rel=1e-9, abs=1e-12)


def compare_references(rank: int, world: int, rendezvous: str, recipe: Recipe, folder: str) -> list[bool]:
    """Body: whether the reference's numbers of a data set, stored, are those of the frozen model under an adapter that has been
    trained, to the bit; and whether a second start reads the stored ones, which the first rank's node alone sees."""
    plan = make_plan(recipe, load_config(recipe.model, find_folder))
    mesh = connect(plan.topology, CPU, rendezvous, rank)
    prepared = open_data(recipe, plan.config, mesh.axis("world"))
    keys = _sequences(plan, mesh)
    stored = replace(plan, recipe=replace(recipe, loss=replace(recipe.loss, reference=folder)))
    read_rows = partial(validation_batches, prepared, seed=recipe.train.seed, **keys)
    parts: list[int] = []
    unseen = patch("framework.train.reference._read", side_effect=FileNotFoundError)
    with unseen if rank else nullcontext():
        for _ in range(2):
            add_reference(stored, prepared, mesh, read_rows, lambda: parts.append(1))
    # One part for each split, and none at the second start.
    run, equal = build(plan, mesh), [len(parts) == 2]
    with Loader(prepared, seed=recipe.train.seed, num_microbatches=2, **keys) as loader:
        for step in range(3):
            microbatches = loader.batch(step * loader.sequences_per_step)
            # On all ranks: those without the last stage compute, and have no result.
            both = [score(run, microbatches, with_adapters=each) for each in (False, True)]
            for microbatch, log_p, with_adapters in zip(microbatches, *both, strict=False):
                assert microbatch.pairs is not None and microbatch.pairs.reference is not None  # noqa: PT018
                there = microbatch.pairs.kinds != NONE
                equal.append(torch.equal(microbatch.pairs.reference[there], log_p.double()[there]))
                equal.append(step == 0 or not torch.equal(with_adapters, log_p))
            train_step(run, microbatches, step, 0.1)
    run.close()
    mesh.close()
    return equal


def start_of(root: Path, recipe: Recipe) -> tuple[Recipe, str]:
    """A recipe beside a small pretrained model and prepared pairs in `root`; and the model's folder."""
    texts = make_recipe(root, make_pairs(40))
    tokenizer = prepare(texts, 1, progress=False).tokenizer
    folder = root / "model"
    torch.manual_seed(3)
    config = build_config(family("llama"), vocab_size=320, max_position_embeddings=256)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    model = Model(weights=str(folder), tokenizer=str(tokenizer))
    data = replace(texts.data, bpe_vocab=None, chat_template=None, pack="best_fit")
    batch = replace(recipe.batch, context=200, sequences_per_step=4, sequences_per_microbatch=1)
    recipe = replace(recipe, model=model, data=data, batch=batch, adapter=Adapter("lora", 3), loss=SETTINGS["base"])
    recipe = replace(recipe, precision=Precision("fp32", "fp32", "fp32"))
    prepare(recipe, 1, progress=False)
    return recipe, str(folder)


@pytest.mark.parametrize(
    "layout", few_of([{}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2, "zero": 3}], lambda layout: "zero" in layout)
)
def test_stored_references_are_the_live_ones_to_the_bit(pool: RankPool, layout: dict[str, int], tmp_path: Path) -> None:
    whole = recipe_of("base", **layout)
    recipe, folder = start_of(tmp_path, whole)
    for equal in pool.run(whole.launch.ranks, compare_references, recipe, folder, timeout_s=300):
        assert all(equal), equal


def test_a_reference_is_asked_nothing_of_trained_parameters() -> None:
    recipe, config = recipe_of("base"), case_of(recipe_of("base")).config
    groups = {"pairs": ParameterGroup("lora_A", 0.5)}
    adapted = replace(recipe, optim=replace(recipe.optim, groups=groups), train=replace(recipe.train, ema=0.9))
    clipped = replace(recipe_of("dpo"), optim=replace(recipe.optim, qk_clip=100.0))
    for each in (adapted, clipped):
        frozen = make_plan(freeze(make_plan(each, config), is_run=False), config)
        assert len(frozen.groups) == 1


def test_a_reference_is_another_with_another_config(tmp_path: Path) -> None:
    config = case_of(recipe_of("dpo")).config
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    recipe = recipe_of("dpo")
    plan = make_plan(replace(recipe, loss=replace(recipe.loss, reference=str(tmp_path))), config)
    before, again = (identify(plan, str(tmp_path))[1]["key"] for _ in range(2))
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    assert before == again != identify(plan, str(tmp_path))[1]["key"]


def test_a_stored_reference_of_another_hash_is_refused(tmp_path: Path) -> None:
    recipe, folder = start_of(tmp_path, recipe_of("base"))
    plan = make_plan(recipe, load_config(recipe.model, find_folder))
    mesh = connect(plan.topology, CPU)
    prepared = open_data(recipe, plan.config, mesh.axis("world"))
    stored = replace(plan, recipe=replace(recipe, loss=replace(recipe.loss, reference=folder)))
    read_rows = partial(validation_batches, prepared, **_sequences(plan, mesh))
    add_reference(stored, prepared, mesh, read_rows, lambda: None)
    (path,) = prepared.sources[0].folder.glob("reference-*")
    whole = path.read_bytes()
    head, _, data = whole.partition(b"\n")
    damaged = [
        head.replace(b"weights", b"weight_") + b"\n" + data,
        head + b"\n" + data[:-8] + b"12345678",
        data,
        whole[:-8],
    ]
    for changed in damaged:
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"has no log-probabilities of loss.reference for these tokens.*Delete it"):
            add_reference(stored, prepared, mesh, read_rows, lambda: None)
    path.unlink()
    add_reference(stored, prepared, mesh, read_rows, lambda: None)
    assert path.read_bytes() == whole
    mesh.close()
