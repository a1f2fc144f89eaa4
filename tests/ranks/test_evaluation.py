"""Scores of tasks are those of lm-evaluation-harness, and of a stock model alone, in every layout; training does not notice."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from framework.comm.connect import connect
from framework.data.tasks import Task, keep_tasks, open_task
from framework.data.tokenize import load_tokenizer, save_tokenizer
from framework.model import objective
from framework.model.hub import find_folder
from framework.model.load import load_config
from framework.plan.plan import make_plan
from framework.recipe.schema import Eval, Memory, Model, Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.step import evaluate, train_step
from framework.train.validation import Validation, open_evaluation
from framework.verify.evidence import keep_double, make_batches
from framework.verify.layout import owned_weights, share
from tests.families import family
from tests.grid import IN_TURN
from tests.lm_eval_figures import CONTEXT, FIGURES, write_model, write_tasks
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, small_recipe
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

# Chunks of 7 tokens where the head computes its own loss.
DROPOUT = {"resid_pdrop": 0.3, "attn_pdrop": 0.2, "embd_pdrop": 0.1}
Sabotage = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that makes a folder with `model`, `data/tokenizer` and `tasks`, once for each of its arguments."""
    made: dict[str, Path] = {}

    def make(name: str = "llama", **changes: Any) -> Path:
        if name not in made:
            root = made[name] = tmp_path_factory.mktemp(name)
            write_model(root / "model", name == "bos", family("llama" if name == "bos" else name), **changes)
            (root / "data").mkdir()
            save_tokenizer(load_tokenizer(str(root / "model")), root / "data" / "tokenizer")
            write_tasks(root / "tasks")
        return made[name]

    return make


def recipe_of(
    root: Path,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    zero: int = 0,
    chunked: bool = False,
    schedule: str = "1f1b",
) -> Recipe:
    parallel = Parallel(tp=tp, pp=pp, cp=cp, ep=ep)
    recipe = small_recipe("fp64", dp * tp * pp * cp, 2, 8, None, Zero(stage=zero), parallel)
    return replace(
        recipe,
        model=Model(weights=str(root / "model")),
        batch=replace(recipe.batch, context=CONTEXT),
        memory=Memory(compile="never", chunked_loss=chunked),
        pipeline=Pipeline(schedule=schedule),  # type: ignore[arg-type]
        eval=Eval([str(root / "tasks")], every_steps=1),
    )


def score(
    rank: int, world: int, rendezvous: str, recipe: Recipe, tokenizer: Path, sabotage: Sabotage = nullcontext
) -> tuple[dict[str, float], np.ndarray]:
    """Body: scores by name, and of each request its log-probability and the number of its tokens that are not greedy."""
    config = load_config(recipe.model, find_folder)
    plan = make_plan(recipe, config)
    mesh = connect(plan.topology, CPU, rendezvous, rank)
    evaluation = open_evaluation(plan, tokenizer, mesh)
    run = build(plan, mesh)
    seen: list[np.ndarray] = []
    with keep_double(torch.float64), sabotage(), listening(seen):
        scores = evaluate(run, plan, evaluation)
    run.close()
    mesh.close()
    return scores, seen[0]


def score_apart(
    rank: int, world: int, rendezvous: str, recipe: Recipe, tokenizer: Path
) -> tuple[dict[str, float], np.ndarray]:
    """Body: the same where only the first rank's node sees the tokenizer, and the tasks' tokens beside it."""
    return score(rank, world, rendezvous, recipe, tokenizer / "unseen" if rank else tokenizer)


def listening(seen: list[np.ndarray]) -> AbstractContextManager[Any]:
    """Note what a validation finds about its documents."""
    original = Validation.score_documents

    def note(self: Validation, *args: Any) -> np.ndarray:
        seen.append(original(self, *args))
        return seen[-1]

    return patch.object(Validation, "score_documents", note)


def score_alone(root: Path, **layout: Any) -> tuple[dict[str, float], np.ndarray]:
    return score(0, 1, "", recipe_of(root, **layout), root / "data" / "tokenizer")


def list_tasks_of(root: Path) -> list[Task]:
    return [open_task(each) for each in keep_tasks([str(root / "tasks")], root / "data" / "tokenizer", CONTEXT)]


def score_plainly(root: Path) -> np.ndarray:
    """The same numbers by a stock model, one request after another: [2, requests]."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # in fp64
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float64, **eager).eval()
    found = []
    with torch.no_grad(), keep_double(torch.float64):
        for task in list_tasks_of(root):
            starts = [0, *task.ends[:-1]]
            for start, stop in zip(starts, task.ends, strict=True):
                ids = torch.from_numpy(task.tokens[start:stop].astype(np.int64))
                logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
                counts = torch.from_numpy(task.scored[start + 1 : stop] > 0)
                log_p = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0][counts].sum()
                found.append((float(log_p), float((logits.argmax(-1) != ids[1:])[counts].sum())))
    return np.array(found).T


def assert_same(root: Path, found: tuple[dict[str, float], np.ndarray], name: str = "plain") -> None:
    """Scores and log-probabilities are those of lm-evaluation-harness to 1e-6, and of a stock model to 1e-9."""
    figures = json.loads(FIGURES.read_text())[name]
    scores, (log_p, missed) = found
    assert scores == pytest.approx(figures["scores"], rel=1e-6, abs=1e-6)
    tasks = list_tasks_of(root)
    ends = np.cumsum([len(task.ends) for task in tasks])
    for task, part in zip(tasks, np.split(log_p, ends[:-1]), strict=True):
        if task.kind != "text":
            assert part == pytest.approx(np.array(figures["log_p"][task.name]), rel=1e-6), task.name
    assert_plain(root, log_p, missed)


def assert_plain(root: Path, log_p: np.ndarray, missed: np.ndarray) -> None:
    expected = score_plainly(root)
    assert log_p == pytest.approx(expected[0], rel=1e-9)
    assert np.array_equal(missed, expected[1])


@pytest.mark.parametrize("name", ["plain", "bos"])
def test_scores_are_those_of_lm_eval(models: Callable[..., Path], name: str) -> None:
    root = models("llama" if name == "plain" else "bos")
    found = score_alone(root)
    assert 0 < found[0]["last_word/acc"] < 1
    assert_same(root, found, name)


AXES = [{axis: 2} for axis in ("dp", "tp", "pp", "cp")]
SHOWN, MORE = [{"cp": 2}], [{"tp": 2, "pp": 2, "zero": 3, "chunked": True}]
FACTORS: list[list[Any]] = [[1, 2], [1, 2], [1, 2], [1, 2], [0, 1, 3], [False, True], ["1f1b", "gpipe"]]
NAMES = ("dp", "tp", "pp", "cp", "zero", "chunked", "schedule")
PAIRS = [
    dict(zip(NAMES, row, strict=True))
    for row in cover_pairs(FACTORS, lambda dp, tp, pp, cp, *_: 1 < dp * tp * pp * cp <= 4)
]


@pytest.mark.parametrize(
    "layout", [*SHOWN, *(pytest.param(each, marks=pytest.mark.grid) for each in [*MORE, *AXES, *PAIRS])], ids=str
)
def test_scores_are_those_of_lm_eval_in_any_layout(
    pool: RankPool, models: Callable[..., Path], layout: dict[str, Any]
) -> None:
    root = models()
    recipe = recipe_of(root, **layout)
    for found in pool.run(recipe.launch.ranks, score, recipe, root / "data" / "tokenizer", timeout_s=300):
        assert_same(root, found)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_moe", {"dp": 2, "ep": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2}),
        ("qwen3_next", {}),
        ("qwen3_next", {"pp": 2}),
    ],
    ids=str,
)
def test_other_families_score_as_they_do_alone(
    pool: RankPool, models: Callable[..., Path], name: str, layout: dict[str, Any]
) -> None:
    """Experts that are divided; and a mixer that carries a state along, whose documents have rows of their own."""
    root = models(name)
    recipe = recipe_of(root, **layout)
    for _, (log_p, missed) in pool.run(recipe.launch.ranks, score, recipe, root / "data" / "tokenizer", timeout_s=300):
        assert_plain(root, log_p, missed)


def forget_places() -> AbstractContextManager[Any]:
    """Every token counts for the first document of its row."""
    original = objective.Statistics._sum_documents

    def add(self: objective.Statistics, *of_tokens: torch.Tensor) -> torch.Tensor:
        assert self.pairs is not None
        pairs = replace(self.pairs, places=torch.zeros_like(self.pairs.places))
        return original(replace(self, pairs=pairs), *of_tokens)

    return patch.object(objective.Statistics, "_sum_documents", add)


def ignore_other_ranks() -> AbstractContextManager[Any]:
    """Each rank of cp keeps the sums of its own tokens."""
    return patch.object(objective, "reduce_from", lambda x, axis: x)


def see_all_documents() -> AbstractContextManager[Any]:
    """Documents of a row are not kept apart."""
    from framework.train.stage import RankStage

    original = RankStage._compute

    def compute(self: RankStage, microbatch: int, received: Any, seed: Any) -> Any:
        kept = self.inputs.microbatches
        self._inputs = replace(
            self.inputs, microbatches=[replace(each, documents=None, position_ids=None) for each in kept]
        )
        return original(self, microbatch, received, seed)

    return patch.object(RankStage, "_compute", compute)


@pytest.mark.parametrize(
    ("sabotage", "layout"),
    [
        (forget_places, {}),
        (see_all_documents, {}),
        pytest.param(ignore_other_ranks, {"cp": 2}, marks=pytest.mark.grid),
    ],
)
def test_planted_bugs_show(
    pool: RankPool, models: Callable[..., Path], sabotage: Sabotage, layout: dict[str, Any]
) -> None:
    root = models()
    recipe = recipe_of(root, **layout)
    (_, (log_p, _)), *_ = pool.run(recipe.launch.ranks, score, recipe, root / "data" / "tokenizer", sabotage)
    assert log_p != pytest.approx(score_plainly(root)[0], rel=1e-3)


def test_nodes_need_not_share_a_folder(pool: RankPool, models: Callable[..., Path]) -> None:
    root = models()
    for found in pool.run(2, score_apart, recipe_of(root, dp=2), root / "data" / "tokenizer"):
        assert_same(root, found)


def train_twice(rank: int, world: int, rendezvous: str, recipe: Recipe, tokenizer: Path) -> list[bool]:
    """Body: whether training with evaluations, in bubbles and between steps, equals training without, to the bit; whether its
    scores are those of the same weights alone."""
    config = load_config(recipe.model, find_folder)
    plan = make_plan(recipe, config)
    mesh = connect(plan.topology, CPU, rendezvous, rank)
    evaluation = open_evaluation(plan, tokenizer, mesh)
    rows = recipe.batch.sequences_per_microbatch
    found, equal = [], []
    for evaluates in (False, True):
        run = build(plan, mesh)
        states = []
        for step, batch in enumerate(make_batches(config, 3, 8, CONTEXT, seed=3)):
            alone = evaluate(run, plan, evaluation) if evaluates and step % 2 else None
            filling = Validation(evaluation.microbatches(plan, mesh) if evaluates else ())
            result = train_step(run, share(batch, rows, mesh), step, 1e-2, validation=filling, is_reported=True)
            states += [result.sums.vector.clone(), torch.get_rng_state()]
            if alone is not None:
                equal.append(evaluation.judge(filling, mesh) == alone)
        weights = {name: values.clone() for name, (_, values) in owned_weights(run).items()}
        found.append([*states, *(weights[name] for name in sorted(weights))])
        run.close()
    mesh.close()
    return equal + [torch.equal(*pair) for pair in zip(*found, strict=True)]


@pytest.mark.parametrize(
    "layout", [{"pp": 2, "zero": 1}, pytest.param({"tp": 2, "dp": 2, "zero": 3}, marks=pytest.mark.grid)], ids=str
)
def test_training_does_not_notice_evaluations(
    pool: RankPool, models: Callable[..., Path], layout: dict[str, Any]
) -> None:
    root = models("gpt2", tie_word_embeddings=True, **DROPOUT)
    recipe = recipe_of(root, **layout)
    for equal in pool.run(recipe.launch.ranks, train_twice, recipe, root / "data" / "tokenizer", timeout_s=300):
        assert len(equal) > 7
        assert all(equal), equal


def test_auto_keeps_evaluations_below_a_hundredth(models: Callable[..., Path]) -> None:
    root = models()
    recipe = replace(recipe_of(root), eval=Eval([str(root / "tasks")]))
    plan = make_plan(recipe, load_config(recipe.model, find_folder))
    mesh = connect(plan.topology, CPU)
    opened = partial(open_evaluation, tokenizer=root / "data" / "tokenizer", mesh=mesh)
    every = opened(plan).every_steps
    rows = -(-opened(plan).packer.sizes[0] // 4) * 4  # type: ignore[union-attr]
    assert rows / 3 / 8 / every <= 0.01 < rows / 3 / 8 / (every - 1)
    longer = replace(recipe, batch=replace(recipe.batch, sequences_per_step=800, sequences_per_microbatch=4))
    assert opened(replace(plan, recipe=longer, derived=make_plan(longer, plan.config).derived)).every_steps < every / 50
    mesh.close()
