"""What tensor and sequence parallelism leave of activations: a layer's by the formula, the logits' by their share."""

import json
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from framework.comm.algorithms import Pending, then
from framework.comm.collectives import start_all_to_all
from framework.comm.connect import Mesh, connect
from framework.data.pack import Microbatch
from framework.mesh.topology import Topology
from framework.model.chunked_loss import ChunkedLoss, LogitMap
from framework.model.load import build_meta
from framework.model.loss import TokenLoss
from framework.parallel.experts import rows
from framework.plan.layer_widths import layer_widths
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Parallel, Recipe
from framework.train.build import build
from framework.train.step import TrainingRun, train_step
from framework.verify.layout import share
from tests.families import build_config, family
from tests.grid import IN_TURN
from tests.ranks.parity import CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.test_expert_volume import route_evenly

pytestmark = IN_TURN

WIDTHS = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4}
CONTEXT = 64


def layout(precision: str, tp: int, sequence: bool, memory: Memory) -> Recipe:
    recipe = small_recipe(precision, 4, 1, 8, None, parallel=Parallel(tp=tp, sequence=sequence))
    batch = replace(recipe.batch, context=CONTEXT, sequences_per_microbatch=2 * tp)
    return replace(recipe, memory=replace(memory, compile="never"), batch=batch)


KEEP, REGATHER, RECOMPUTE = Memory(), Memory(gathered_inputs="regather"), Memory("full")
LAYOUTS = {
    "whole": layout("bf16", 1, True, KEEP),
    "divided": layout("bf16", 4, True, REGATHER),
    "gathered inputs": layout("fp32", 4, True, KEEP),
    "replicated outside": layout("bf16", 4, False, KEEP),
    "checkpointed": layout("bf16", 4, True, RECOMPUTE),
}
MORE = {
    f"{precision} tp={tp} sequence={sequence} {memory}": layout(precision, tp, sequence, memory)
    for precision, tp, (sequence, memory) in product(
        ("fp32", "bf16"), (1, 2, 4), ((True, KEEP), (True, REGATHER), (False, KEEP))
    )
}


def measure_kept(
    rank: int, world: int, rendezvous: str, recipes: dict[str, Recipe], name: str, widths: dict[str, int]
) -> dict[str, int]:
    """Body: bytes that three layers keep for backward more than two do."""
    found = {}
    for number, (label, recipe) in enumerate(recipes.items()):
        kept = []
        for num_layers in (2, 3):
            case = Case("", family(name), {label: recipe}, widths | {"num_hidden_layers": num_layers})
            mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}-{num_layers}", rank)
            kept.append(keep(case, recipe, mesh))
            mesh.close()
        found[label] = kept[1] - kept[0]
    return found


def keep(case: Case, recipe: Recipe, mesh: Mesh) -> int:
    """Bytes of distinct storages that a microbatch's forward keeps, without parameters."""
    run = build(make_plan(recipe, case.config), mesh)
    kept: list[Tensor] = []  # alive until the end, so that no address comes twice

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    tokens = torch.randint(3, 97, (recipe.batch.sequences_per_step or 0, CONTEXT))
    batch = replace(case.batches()[0], input_ids=tokens, labels=tokens)
    with saved_tensors_hooks(pack, lambda x: x):
        train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
    of_parameters = {buffer.full.untyped_storage().data_ptr() for buffer in run.buffers}
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    return sum(num_bytes for address, num_bytes in storages.items() if address not in of_parameters)


@pytest.mark.grid  # of a mixture: below
@pytest.mark.parametrize("recipes", [LAYOUTS, MORE], ids=["all", "more"])
def test_a_layer_keeps_what_the_formula_says(pool: RankPool, recipes: dict[str, Recipe]) -> None:
    config = build_config(family("llama"), **WIDTHS)
    expected = {label: make_plan(recipe, config).activations.layer_bytes for label, recipe in recipes.items()}
    for found in pool.run(4, measure_kept, recipes, "llama", WIDTHS, timeout_s=300):
        assert found == pytest.approx(expected, rel=0.1)
    if recipes is not MORE:
        # Equal tokens in a group of ranks: nothing is left whole, and four times the tokens are divided by four.
        assert expected["divided"] == pytest.approx(expected["whole"], rel=0.01)


def test_layers_of_another_form_have_no_formula() -> None:
    for name in ("gpt2", "gpt_oss", "qwen2_moe", "deepseek_v3", "llama4_text", "phi3"):
        assert layer_widths(build_meta(build_config(family(name)))) is None


# --- mixtures of experts

MIXTURE_WIDTHS = WIDTHS | {"num_local_experts": 8, "num_experts": 8, "moe_intermediate_size": 96, "head_dim": 16}
MIXTURE_WIDTHS |= {"intermediate_size": 96, "mlp_only_layers": []}  # type: ignore[dict-item]


def mixture_layout(precision: str, parallel: Parallel, memory: Memory = KEEP) -> Recipe:
    recipe = layout(precision, parallel.tp, parallel.sequence, memory)
    return replace(recipe, parallel=parallel)


MIXTURES = {
    "divided": mixture_layout("fp32", Parallel(ep=4)),
    "divided, padded": mixture_layout("fp32", Parallel(ep=4, expert_padding=2.0)),
    "divided, in halves": mixture_layout("bf16", Parallel(ep=2, expert_overlap=True)),
    "whole under sequences": mixture_layout("bf16", Parallel(tp=2, ep=4)),
    "whole, replicated rows": mixture_layout("fp32", Parallel(tp=2, ep=2, sequence=False)),
    "slices": mixture_layout("fp32", Parallel(tp=2, ep=2, expert_tp=2), REGATHER),
    "slices, all on a rank": mixture_layout("bf16", Parallel(tp=2)),
}


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        pytest.param("mixtral", ("slices",), id="mixtral"),
        *(
            pytest.param(name, tuple(MIXTURES), marks=pytest.mark.grid, id=f"{name} in all")
            for name in ("mixtral", "qwen3_moe")
        ),
    ],
)
def test_a_mixture_keeps_what_the_formula_says_of_a_uniform_router(
    pool: RankPool, name: str, labels: tuple[str, ...]
) -> None:
    """The mean over ranks: what one rank's experts get more than the mean, another's get less."""
    config, recipes = build_config(family(name), **MIXTURE_WIDTHS), {label: MIXTURES[label] for label in labels}
    expected = {label: make_plan(recipe, config).activations.layer_bytes for label, recipe in recipes.items()}
    found = pool.run(4, measure_kept, recipes, name, MIXTURE_WIDTHS, timeout_s=300)
    mean = {label: sum(each[label] for each in found) / len(found) for label in recipes}
    assert mean == pytest.approx(expected, rel=0.1)


# --- the peak while a mixture computes


def peak_layout(precision: str, parallel: Parallel, memory: Memory) -> Recipe:
    """512 tokens of a rank: enough for rows to be more than parameters and their gradients."""
    recipe = mixture_layout(precision, parallel, memory)
    batch = replace(recipe.batch, sequences_per_step=32, sequences_per_microbatch=8 * parallel.tp)
    return replace(recipe, batch=batch)


NARROW = MIXTURE_WIDTHS | {"num_experts_per_tok": 8, "moe_intermediate_size": 96}
WIDE = MIXTURE_WIDTHS | {"num_experts_per_tok": 4, "moe_intermediate_size": 352}
PEAKS = {
    "divided": peak_layout("fp32", Parallel(ep=2), KEEP),
    "divided, checkpointed": peak_layout("bf16", Parallel(ep=4), RECOMPUTE),
    "padded": peak_layout("bf16", Parallel(ep=2, expert_padding=1.5), KEEP),
    "whole under sequences": peak_layout("bf16", Parallel(tp=2, ep=2), KEEP),
    "slices, checkpointed": peak_layout("fp32", Parallel(tp=2, ep=2, expert_tp=2), RECOMPUTE),
}
REPEATS = 3


def measure_peaks(
    rank: int, world: int, rendezvous: str, recipes: dict[str, Recipe], widths: dict[str, int]
) -> dict[str, int]:
    """Body: the most bytes that forward and backward of one layer have."""
    found = {}
    for number, (label, recipe) in enumerate(recipes.items()):
        case = Case("", family("qwen3_moe"), {label: recipe}, widths | {"num_hidden_layers": 1})
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, case.config), mesh)
        tokens = torch.randint(3, 97, (recipe.batch.sequences_per_step or 0, CONTEXT))
        batch = replace(case.batches()[0], input_ids=tokens, labels=tokens)
        microbatches = share(batch, recipe.batch.sequences_per_microbatch, mesh)
        with route_evenly(), let_go_of_rows():
            train_step(run, microbatches, 0, 1e-3)
            found[label] = min(measure_step(run, microbatches) for _ in range(REPEATS))
        mesh.close()
    return found


def let_go_of_rows() -> AbstractContextManager[Any]:
    """gloo's threads hold what they have sent until they run the next time: let them, behind every transfer, so that what is
    measured is ours. On a busy machine they may still be late, so the least of some steps counts."""

    def start(*arguments: Any) -> Pending:
        return then(start_all_to_all(*arguments), lambda: sleep(0.02))

    return patch.object(rows, "start_all_to_all", start)


def measure_step(run: TrainingRun, microbatches: list[Microbatch]) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        train_step(run, microbatches, 1, 1e-3)
    return peak_of(profile)


@pytest.mark.grid  # half a minute: transfers are waited for, so that gloo gives its memory back
@pytest.mark.parametrize("widths", [NARROW, WIDE], ids=["narrow", "wide"])
def test_the_peak_while_a_mixture_computes_is_what_is_stated(pool: RankPool, widths: dict[str, int]) -> None:
    """When backward has come to the layer, the head's own activations have gone."""
    config = build_config(family("qwen3_moe"), **widths)
    stated = {}
    for label, recipe in PEAKS.items():
        activations = make_plan(recipe, config).activations
        kept = activations.layer_bytes + activations.cost_of(activations.policy).recomputed
        stated[label] = kept + activations.transient_bytes
        # What is kept alone would not meet it.
        assert activations.transient_bytes > 0.12 * kept
    ranks = pool.run(4, measure_peaks, PEAKS, widths, timeout_s=300)
    # Evenly routed, all hold as much: the least is that of which gloo's threads were in time.
    assert {label: min(found[label] for found in ranks) for label in PEAKS} == pytest.approx(stated, rel=0.1)


# --- logits

TOKENS, WORDS, HIDDEN, CHUNK = 512, 4096, 8, 64


def measure_logits(rank: int, world: int, rendezvous: str) -> dict[int | None, int]:
    """Body: the most bytes that logits, loss and their backward held at once, by tokens of a chunk; None: not in chunks."""
    mesh = connect(Topology(tp=world), CPU, rendezvous, rank)
    tp, found = mesh.axis("tp"), {}
    for chunk in (CHUNK, None):
        x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
        head = nn.Linear(HIDDEN, WORDS // world, bias=False)
        labels = torch.randint(0, WORDS, (1, TOKENS))
        loss_of = TokenLoss(tp, WORDS) if chunk is None else ChunkedLoss(head, (), LogitMap((), ()), tp, WORDS, chunk)
        loss_of.expect(labels)
        with torch.profiler.profile(profile_memory=True) as profile:
            loss_of(head(x), labels, torch.tensor(TOKENS)).backward()
        found[chunk] = peak_of(profile)
    mesh.close()
    return found


def peak_of(profile: torch.profiler.profile) -> int:
    """The most bytes allocated on the CPU at once, above what there was at the start."""
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    sizes = sorted((each["ts"], each["args"]["Bytes"]) for each in events if each["name"] == "[memory]")
    held = peak = 0
    for _, num_bytes in sizes:
        held += num_bytes
        peak = max(peak, held)
    return peak


def test_no_rank_ever_holds_more_logits_than_its_share_and_chunked_none_but_a_chunks(pool: RankPool) -> None:
    world = 4
    share, chunk = TOKENS * WORDS * 4 // world, CHUNK * WORDS * 4 // world
    hidden = 2 * TOKENS * HIDDEN * 4 + 2 * WORDS // world * HIDDEN * 4  # dX, its copies; dW and one of its parts
    numbers = 16 * TOKENS * 8
    for found in pool.run(world, measure_logits):
        assert share < found[None] <= 2 * share + numbers + hidden
        assert 2 * chunk < found[CHUNK] <= 2 * chunk + numbers + hidden
