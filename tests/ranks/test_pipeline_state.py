"""What a pipeline saves, reads and goes on with: one checkpoint for every cut, and of pretrained weights a stage's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from framework.checkpoint.commit import newest_checkpoint
from framework.checkpoint.load import Reader
from framework.comm.connect import connect
from framework.model.weights import read_weights
from framework.optim.groups import learning_rate
from framework.parallel.zero import parameters
from framework.plan.plan import make_plan
from framework.recipe.schema import Model, Recipe, Zero
from framework.train.build import build
from framework.train.state import RunState, restore, saved_entries
from framework.train.step import train_step
from framework.verify.compare import TOLERANCES
from framework.verify.evidence import Evidence, keep_double
from framework.verify.layout import gather_full, owned_weights, run_layout, share
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, Case, expect, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.test_pipeline import case_of, recipe_of
from tests.saving import save_checkpoint

pytestmark = IN_TURN


@dataclass(frozen=True)
class Resumed:
    """Losses of the steps after the checkpoint, all weights at the end."""

    losses: tuple[float, ...]
    weights: Mapping[str, Tensor]


def resume(rank: int, world: int, rendezvous: str, case: Case, root: Path) -> Resumed | None:
    """Body: the case's first layout takes a step and saves; its last one goes on to the end. Of ranks in the last."""
    batches, layouts, losses = case.batches(), list(case.layouts.values()), []
    resumed = None
    for number, (recipe, own) in enumerate(((layouts[0], batches[:1]), (layouts[-1], batches[1:]))):
        topology = topology_of(recipe, case.config)
        if rank >= topology.world:
            continue
        mesh = connect(topology, CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, case.config), mesh, resumes=number > 0)
        state = restore(run, root) if number else RunState("run", "data")
        for batch in own:
            lr = learning_rate(state.step, recipe.optim.schedule, recipe.optim.lr, recipe.train.steps)
            microbatches = share(batch, recipe.batch.sequences_per_microbatch, mesh)
            with keep_double(torch.float64):
                losses.append(train_step(run, microbatches, state.step, lr).read().loss)
            state.step += 1
        state.num_updates = run.optimizer.num_updates
        if number == 0:
            save_checkpoint(root, state.step, saved_entries(run), state.to_json(), mesh.axis("world"), keep=1)
        else:
            resumed = Resumed(tuple(losses[-len(own) :]), gather_full(owned_weights(run), mesh.axis("world")))
        mesh.close()
    return resumed


def whole(rank: int, world: int, rendezvous: str, case: Case) -> Evidence:
    """Body: the case's last layout without a pause."""
    recipe = list(case.layouts.values())[-1]
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    evidence = run_layout(make_plan(recipe, case.config), case.batches(), mesh)
    mesh.close()
    return evidence


def layout(pp: int, schedule: str, zero: int, dp: int = 1, tp: int = 1) -> Recipe:
    return recipe_of(pp, schedule, 7, "fp64", dp, Zero(zero), tp)


MOVES = (
    ("gpt2", True, layout(2, "zb_h1", 1, dp=2), layout(1, "1f1b", 0)),
    ("llama", True, layout(1, "1f1b", 2, dp=2), layout(3, "1f1b", 1)),
    ("llama", True, layout(2, "zbv", 3), layout(4, "gpipe", 0)),
    ("gemma2", True, layout(3, "zb_h1", 0), layout(2, "zbv", 2, dp=2)),
    ("qwen3_moe", False, layout(2, "interleaved", 3, tp=2), layout(2, "1f1b", 0, dp=2)),
)


@pytest.mark.parametrize(("name", "tied", "before", "after"), few_of(MOVES, lambda name, *_: name == "gpt2"))
def test_a_checkpoint_of_one_cut_goes_on_in_another(
    pool: RankPool, tmp_path: Path, name: str, tied: bool, before: Recipe, after: Recipe
) -> None:
    case = case_of(name, {"before": before, "after": after}, tie_word_embeddings=tied)
    found = pool.run(4, resume, case, tmp_path)[0]
    expected = expect(case)
    assert found.losses == pytest.approx(expected.losses[1:], rel=TOLERANCES["fp64"])
    for parameter, weight in expected.weights.items():
        error = (found.weights[parameter] - weight).abs().max() / weight.abs().max()
        assert error < TOLERANCES["fp64"], parameter


@pytest.mark.parametrize(
    ("schedule", "zero", "dp"),
    few_of([("zbv", 2, 1), ("zbv", 2, 2), ("interleaved", 3, 2), ("zb_h1", 0, 1)], lambda *row: row == ("zbv", 2, 1)),
)
def test_a_resumed_pipeline_is_bitwise_the_one_that_never_paused(
    pool: RankPool, tmp_path: Path, schedule: str, zero: int, dp: int
) -> None:
    case = case_of("llama", {"": layout(2, schedule, zero, dp)}, tie_word_embeddings=True)
    found, expected = pool.run(2 * dp, resume, case, tmp_path)[0], pool.run(2 * dp, whole, case)[0]
    assert found.losses == expected.losses[1:]
    for parameter, weight in expected.weights.items():
        assert torch.equal(found.weights[parameter], weight), parameter


@pytest.mark.parametrize("schedule", few_of(["1f1b", "zbv"], lambda schedule: schedule == "zbv"))
def test_a_tied_embedding_is_stored_once(pool: RankPool, tmp_path: Path, schedule: str) -> None:
    case = case_of("llama", {"": layout(2, schedule, 1)}, tie_word_embeddings=True)
    pool.run(2, resume, case, tmp_path)
    path = newest_checkpoint(tmp_path)
    assert path is not None
    reader = Reader(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config)
    num_values = 3 * sum(parameter.numel() for parameter in model.parameters())  # weights and AdamW's two moments
    assert sum(reader.file(rank).num_bytes for rank in range(2)) == 8 * num_values
    assert not any("lm_head" in entry for entry in reader.manifest.entries)


def import_weights(
    rank: int, world: int, rendezvous: str, case: Case
) -> dict[str, tuple[list[str], Mapping[str, Tensor]]]:
    """Body: of each layout what this rank asked the folder for, and all weights."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        topology = topology_of(recipe, case.config)
        if rank >= topology.world:
            continue
        asked: list[str] = []

        def reading(folder, stock, wanted, asked=asked):
            asked += wanted
            return read_weights(folder, stock, wanted)

        mesh = connect(topology, CPU, f"{rendezvous}-{number}", rank)
        with patch.object(parameters, "read_weights", reading):
            run = build(make_plan(recipe, case.config), mesh)
        found[label] = asked, gather_full(owned_weights(run), mesh.axis("world"))
        mesh.close()
    return found


def layers_of(names: Sequence[str]) -> set[int]:
    return {int(name.split(".layers.")[1].split(".")[0]) for name in names if ".layers." in name}


@pytest.mark.parametrize("tied", few_of([True, False], lambda tied: tied))
def test_of_pretrained_weights_a_rank_reads_those_of_its_stages(pool: RankPool, tmp_path: Path, tied: bool) -> None:
    folder = str(tmp_path)
    case = Case("llama", family("llama"), {}, {"num_hidden_layers": 4, "tie_word_embeddings": tied})
    torch.manual_seed(1)
    stock = AutoModelForCausalLM.from_config(case.config, dtype=torch.float32)
    stock.save_pretrained(folder)
    layouts = {
        schedule: recipe_of(pp, schedule, 4, model=Model(weights=folder)) for pp, schedule in ((2, "zbv"), (3, "1f1b"))
    }
    case = Case(case.name, case.family, layouts, case.changes)
    by_rank = pool.run(3, import_weights, case)
    for label, pp in (("zbv", 2), ("1f1b", 3)):
        asked = [names for names, _ in (of_rank[label] for of_rank in by_rank[:pp])]
        for weights in (of_rank[label][1] for of_rank in by_rank[:pp]):
            for parameter, weight in stock.named_parameters():
                assert torch.equal(weights[parameter], weight), (label, parameter)
        assert sum(len(layers_of(names)) for names in asked) == 4, label
        assert set().union(*(layers_of(names) for names in asked)) == {0, 1, 2, 3}
        has_ends = [any(end in name for name in names for end in ("embed", "lm_head")) for names in asked]
        assert has_ends == ([True, False] if label == "zbv" else [True, False, True])
