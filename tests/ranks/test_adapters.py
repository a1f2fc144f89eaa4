"""Adapters equal PEFT in one process: losses, gradients, their norm, and weights after three steps, in fp64 to 1e-9."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from framework.comm.connect import connect
from framework.errors import EXIT_DONE
from framework.mesh.layout import Layout
from framework.model.initial import build_buffers
from framework.model.load import build_meta, load_config
from framework.model.peft import add_adapters, read_adapter
from framework.optim.groups import learning_rate
from framework.parallel import layer_matmuls
from framework.parallel.zero import parameters, row_codes
from framework.plan.plan import make_plan
from framework.recipe.schema import Adapter, Memory, Model, Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.state import RunState, restore, saved_entries
from framework.train.step import train_step
from framework.verify.compare import compare
from framework.verify.evidence import Evidence, TokenBatch, keep_double, make_batches
from framework.verify.layout import gather_full, owned_weights, run_layout, share
from framework.verify.plain_rounding import round_base
from scripts.verify_random import Campaign, verify_draws
from tests.families import build_config, family
from tests.grid import IN_TURN, few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import (
    CPU,
    SEQUENCES,
    STEPS,
    Case,
    assert_equal,
    run_cases,
    small_recipe,
    train_layouts,
    worst_error,
)
from tests.ranks.pool import RankPool
from tests.saving import save_checkpoint

pytestmark = IN_TURN

RANK, ALPHA = 3, 5.0


@dataclass(frozen=True)
class Start:
    """A pretrained model and an adapter of PEFT's for it, in folders, with B that is not zero."""

    base: Path
    folder: Path
    adapter: Adapter


def make_start(
    root: Path, name: str, adapter: Adapter, changes: Mapping[str, Any] | None = None, **peft_keys: Any
) -> Start:
    """Written by transformers and PEFT in fp64."""
    config = build_config(family(name), **(changes or {}))
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    base, folder = root / "base", root / "adapter"
    model.save_pretrained(base)
    keys = {"r": adapter.rank, "lora_alpha": adapter.alpha, "use_rslora": adapter.rank_stabilized}
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(**keys, use_dora=adapter.kind == "dora", **peft_keys), autocast_adapter_dtype=False
    )
    for each, parameter in wrapped.named_parameters():
        if "lora_B" in each:
            torch.nn.init.normal_(parameter, std=0.05)
    wrapped.save_pretrained(folder)
    return Start(base, folder, replace(adapter, weights=str(folder)))


def recipe_of(start: Start, recipe: Recipe) -> Recipe:
    return replace(recipe, model=Model(weights=str(start.base)), adapter=start.adapter)


def make_of(start: Start, recipe: Recipe) -> list[TokenBatch]:
    return make_batches(load_config(recipe.model), STEPS, SEQUENCES, recipe.batch.context, 11)


def load_peft(start: Start) -> Any:
    model = AutoModelForCausalLM.from_pretrained(start.base, dtype=torch.float64, experts_implementation="eager")
    # Behind its load from_pretrained has computed rotary tables in fp32.
    for (_, buffer), value in zip(
        model.named_buffers(), build_buffers(model.config, torch.float64).values(), strict=True
    ):
        buffer.copy_(value)
    with torch.no_grad():
        for name, value in round_base(model, start.adapter, dict(model.named_parameters())).items():
            model.get_parameter(name).copy_(value)
    return peft.PeftModel.from_pretrained(model, start.folder, is_trainable=True, autocast_adapter_dtype=False).train()


def train_peft(start: Start, recipe: Recipe, batches: Sequence[TokenBatch]) -> Evidence:
    """PEFT's model, a plain loop. Names in the evidence are PEFT's."""
    wrapped = load_peft(start)
    trained = {name: each for name, each in wrapped.named_parameters() if each.requires_grad}
    ratio = recipe.adapter.b_lr_ratio
    groups = [
        {
            "params": [each],
            "ratio": ratio if "lora_B" in name else 1.0,
            "weight_decay": recipe.optim.weight_decay if each.ndim > 1 else 0.0,
        }
        for name, each in trained.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=recipe.optim.betas, eps=recipe.optim.eps)
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches):
        rate = learning_rate(step, recipe.optim.schedule, recipe.optim.lr, recipe.train.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["ratio"]
        optimizer.zero_grad()
        with keep_double(torch.float64):
            logits = wrapped(input_ids=batch.input_ids, use_cache=False).logits
            loss = (
                F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
                / (batch.labels != -100).sum()
            )
            torch.autograd.backward([loss])
        losses.append(float(loss))
        norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in trained.values()])))
        if step == 0:
            gradients = {name: each.grad.clone() for name, each in trained.items()}
        optimizer.step()
    return Evidence(tuple(losses), tuple(norms), gradients, {name: each.detach() for name, each in trained.items()})


def in_our_names(start: Start, recipe: Recipe, tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """PEFT's tensors, by way of the folder that PEFT writes of them."""
    wrapped = load_peft(start)
    with torch.no_grad():
        for name, each in wrapped.named_parameters():
            if name in tensors:
                each.copy_(tensors[name])
    wrapped.save_pretrained(folder)
    model = build_meta(load_config(recipe.model))
    add_adapters(model, recipe.adapter)
    return read_adapter(folder, model, recipe.adapter)


def run_recipes(
    rank: int, world: int, rendezvous: str, recipes: Mapping[str, Recipe], batches: Sequence[TokenBatch]
) -> dict[str, Evidence]:
    """Body: the evidence of each recipe, on as many ranks as it asks for."""
    found = {}
    for number, (label, recipe) in enumerate(recipes.items()):
        plan = make_plan(recipe, load_config(recipe.model))
        if rank < plan.topology.world:
            mesh = connect(plan.topology, CPU, f"{rendezvous}-{number}", rank)
            found[label] = run_layout(plan, batches, mesh)
            mesh.close()
    return found


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def assert_equals_peft(
    pool: RankPool, tmp_path: Path, start: Start, recipes: Mapping[str, Recipe], tolerance: float = 1e-9
) -> None:
    recipes = {label: recipe_of(start, each) for label, each in recipes.items()}
    first = next(iter(recipes.values()))
    batches = make_of(start, first)
    world = max(each.launch.ranks or 1 for each in recipes.values())
    expected = train_peft(start, first, batches)
    gradients = in_our_names(start, first, expected.gradients, tmp_path / "gradients")
    weights = in_our_names(start, first, expected.weights, tmp_path / "weights")
    found = pool.run(world, run_recipes, recipes, batches, timeout_s=300)[0]
    for label in recipes:
        evidence = found[label]
        errors = {f"gradient of {name}": largest(evidence.gradients[name], each) for name, each in gradients.items()}
        errors |= {
            f"{name} after {STEPS} steps": largest(evidence.weights[name], each) for name, each in weights.items()
        }
        errors["losses"] = largest(torch.tensor(evidence.losses), torch.tensor(expected.losses))
        errors["norms"] = largest(torch.tensor(evidence.norms), torch.tensor(expected.norms))
        # Nothing else has a gradient.
        others = evidence.gradients.keys() - gradients.keys()
        assert others, label
        assert not any(bool(evidence.gradients[name].any()) for name in others), label
        wrong = {name: error for name, error in errors.items() if not error <= tolerance}
        assert not wrong, f"{label}\n" + "\n".join(f"  {error:.1e} {name}" for name, error in wrong.items())


def layout(world: int, accumulation: int = 1, zero: int = 0, sequences: int = SEQUENCES, **parallel: Any) -> Recipe:
    return small_recipe("fp64", world, accumulation, zero=Zero(stage=zero), parallel=Parallel(**parallel))


LORA = Adapter("lora", RANK, ALPHA)


# PEFT takes the mlp's names for those of experts in older versions of such families.
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# (family, changes of its config, adapter, PEFT's targets, layouts)
CASES: dict[str, tuple[str, dict[str, Any], Adapter, dict[str, Any], dict[str, Recipe]]] = {
    "lora": (
        "llama", {}, LORA, {"target_modules": "all-linear"},
        {"tp": layout(2, tp=2), "zero 3": layout(2, 3, zero=3)},
    ),
    "dora": (
        "llama", {}, replace(LORA, kind="dora", rank_stabilized=True), {"target_modules": "all-linear"},
        {"tp, zero 3": layout(4, zero=3, tp=2), "pp, tp without sequences": layout(4, 3, pp=2, tp=2, sequence=False)},
    ),
    "experts": (
        "qwen3_moe", {}, replace(LORA, targets=[*ATTENTION, "experts"]),
        {"target_modules": ATTENTION, "target_parameters": EXPERTS},
        {
            "one rank": layout(1),
            "ep": layout(2, ep=2),
            "sliced": layout(2, 3, tp=2),
            "sliced, ep, zero 3": layout(4, zero=3, tp=2, ep=2, expert_tp=2),
            "pp, ep over tp": layout(4, 3, pp=2, tp=2, ep=2),
        },
    ),
    "a linear layer written anew": (
        "falcon", {}, replace(LORA, targets=["query_key_value", "dense_4h_to_h"]),
        {"target_modules": ["query_key_value", "dense_4h_to_h"]}, {"zero 3": layout(2, zero=3)},
    ),
    "few key-value heads": (
        "llama", {"num_key_value_heads": 1}, replace(LORA, targets=["k_proj", "v_proj", "o_proj"]),
        {"target_modules": ["k_proj", "v_proj", "o_proj"]}, {"tp": layout(2, tp=2)},
    ),
    "packed": (
        "phi3", {"num_key_value_heads": 1}, replace(LORA, kind="dora"), {"target_modules": "all-linear"}, {"tp": layout(2, tp=2)},
    ),
    "transposed": (
        "gpt2", {}, replace(LORA, kind="dora", b_lr_ratio=4.0), {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
        {"tp, zero 3": layout(4, zero=3, tp=2)},
    ),
    "transposed experts": (
        "gpt_oss", {}, replace(LORA, targets=["experts"]), {"target_modules": [], "target_parameters": EXPERTS},
        {"sliced": layout(2, tp=2), "ep": layout(2, ep=2)},
    ),
    "whole ends": (
        "llama", {"tie_word_embeddings": False}, replace(LORA, targets=["q_proj"], train=["embed_tokens", "lm_head"]),
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"tp, pp, zero 3": layout(4, zero=3, tp=2, pp=2)},
    ),
}  # fmt: skip

QLORA = replace(LORA, base="nf4")
# Rows that are no multiples of 64, which ranks of `tp` cut within a block: in the 4 bits of the whole weight all the same.
CODED: dict[str, tuple[str, dict[str, Any], Adapter, dict[str, Any], dict[str, Recipe]]] = {
    "nf4": (
        "llama", {}, QLORA, {"target_modules": "all-linear"},
        {
            "one rank": layout(1, 3), "tp, zero 1": layout(4, 3, zero=1, tp=2), "zero 3": layout(2, 3, zero=3),
            "pp, replicas": layout(4, 3, pp=2),
        },
    ),
    "fp8": (
        "gpt2", {}, replace(LORA, base="fp8"), {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
        {"tp, zero 2": layout(4, zero=2, tp=2)},
    ),
    "experts": (
        "qwen3_moe", {}, replace(QLORA, targets=[*ATTENTION, "experts"]),
        {"target_modules": ATTENTION, "target_parameters": EXPERTS},
        {"ep": layout(2, ep=2), "sliced, ep, zero 3": layout(4, zero=3, tp=2, ep=2, expert_tp=2)},
    ),
    "transposed experts": (
        "gpt_oss", {}, replace(QLORA, targets=["experts"]), {"target_modules": [], "target_parameters": EXPERTS},
        {"sliced, zero 3": layout(4, zero=3, tp=2)},
    ),
}  # fmt: skip


BESIDE_PEFT = CASES | {f"base: {name}": each for name, each in CODED.items()}


@pytest.mark.parametrize("name", few_of(BESIDE_PEFT, lambda name: name == "lora"))
def test_adapters_equal_peft(pool: RankPool, tmp_path: Path, name: str) -> None:
    of_family, changes, adapter, keys, layouts = BESIDE_PEFT[name]
    if of_family == "gpt2":
        adapter = replace(adapter, targets=keys["target_modules"])
    start = make_start(tmp_path, of_family, adapter, changes, **keys)
    assert_equals_peft(pool, tmp_path, start, layouts)


# (model, dora, rank-stabilised, base, zero, tp, pp, cp, ep, expert_tp, dp); of "experts" these have adapters as well.
FACTORS: list[list[Any]] = [
    ["llama", "qwen3_moe", "experts"], [False, True], [False, True], ["bf16", "nf4"], [0, 3], [1, 2], [1, 2], [1, 2], [1, 2],
    [1, 2], [1, 2],
]  # fmt: skip


def is_legal(
    name: str, dora: bool, stabilized: bool, base: str, zero: int, tp: int, pp: int, cp: int, ep: int, expert_tp: int, dp: int
) -> bool:  # fmt: skip
    """Up to eight ranks. Experts are sliced over all of tp, and divided among the ranks outside it; they have no dora in PEFT."""
    divides = dp * cp * (tp if expert_tp == 1 else 1) % ep == 0 if name != "llama" else ep == expert_tp == 1
    return 1 < tp * pp * cp * dp <= 8 and expert_tp in (1, tp) and divides and not (dora and name == "experts")


# Of experts' adapters once more: any two of the others meet with them.
ROWS = sorted({*cover_pairs(FACTORS, is_legal), *cover_pairs([["experts"], *FACTORS[1:]], is_legal)})


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.grid
@pytest.mark.parametrize("start", sorted({row[:4] for row in ROWS}), ids=str)
def test_adapters_equal_peft_in_any_layout(eight: RankPool, tmp_path: Path, start: tuple[Any, ...]) -> None:
    name, dora, stabilized, base = start
    adapter = replace(LORA, kind="dora" if dora else "lora", rank_stabilized=stabilized, base=base)
    targets: dict[str, Any] = {"target_modules": "all-linear" if name == "llama" else ATTENTION}
    if name != "llama":
        adapter = replace(adapter, targets=[*ATTENTION, *["experts"] * (name == "experts")])
    if name == "experts":
        targets["target_parameters"] = EXPERTS
    layouts = {}
    for zero, tp, pp, cp, ep, expert_tp, dp in (row[4:] for row in ROWS if row[:4] == start):
        of_experts = {"ep": ep, "expert_tp": expert_tp} if name != "llama" else {}
        recipe = layout(tp * pp * cp * dp, 1 if dp > 1 else 3, zero, tp=tp, pp=pp, cp=cp, **of_experts)
        layouts[f"zero {zero}, tp {tp}, pp {pp}, cp {cp}, ep {ep}, expert_tp {expert_tp}, dp {dp}"] = recipe
    of_family = "llama" if name == "llama" else "qwen3_moe"
    assert_equals_peft(eight, tmp_path, make_start(tmp_path, of_family, adapter, **targets), layouts)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(20))
def test_random_layouts_of_adapters_equal_the_oracle(eight: RankPool, seed: int) -> None:
    """Ten draws of each seed, of any family: docs/verify.md."""
    kind = "dora" if seed % 4 == 3 else "lora"
    assert verify_draws(Campaign(10, seed, overrides=(f"adapter.kind={kind}", "model.freeze=[]")), eight) == EXIT_DONE


# Beside PEFT once more, with B zero at first, as runs begin: the oracle of `meshwright verify`, whose model has merged weights.
def plain_case(name: str, adapter: Adapter, layouts: Mapping[str, Recipe], **changes: Any) -> Case:
    return Case(name, family(name), {label: replace(each, adapter=adapter) for label, each in layouts.items()}, changes)


def test_fresh_adapters_equal_the_oracle(pool: RankPool) -> None:
    layouts = {"tp, zero 3": layout(2, 3, zero=3, tp=2)}
    adapter = replace(LORA, kind="dora", b_lr_ratio=2.0, train=["lm_head"])  # by its second name: it is tied
    assert_equal(pool, 2, [plain_case("llama", adapter, layouts, tie_word_embeddings=True)])


def test_column_layers_drop_the_same_on_any_layout(pool: RankPool) -> None:
    """Of a packed projection, whose keys and values both ranks hold: other masks would have their copies of B drift apart."""
    adapter = replace(LORA, targets=["c_attn"], dropout=0.3)
    layouts = {"one rank": layout(1, 3), "tp": layout(2, 3, tp=2, sequence=False), "sequences": layout(2, 3, tp=2)}
    case = plain_case("gpt_bigcode", adapter, layouts)
    found = pool.run(2, train_layouts, [case], timeout_s=300)
    plain = plain_case("gpt_bigcode", replace(adapter, dropout=0.0), {"one rank": layout(1, 3)})
    without = pool.run(1, train_layouts, [plain], timeout_s=300)[0][plain.name, "one rank"]
    expected = found[0][case.name, "one rank"]
    assert worst_error(compare(expected, without)) > 1e-3
    for of_rank in found:
        for label in ("tp", "sequences"):
            assert worst_error(compare(of_rank[case.name, label], expected)) <= case.tolerance, label


MORE = {
    "full checkpointing, split backwards": Memory(activation_checkpointing="full", compile="never"),
    "regathered": Memory(gathered_inputs="regather", compile="never"),
    "compiled": Memory(compile="always"),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", MORE)
def test_adapters_compose_with_memory(pool: RankPool, name: str) -> None:
    of_pipeline = name.startswith("full")
    found = layout(2, 3, pp=2) if of_pipeline else layout(2, 3, tp=2)
    if of_pipeline:
        found = replace(found, pipeline=Pipeline(schedule="zb_h1"))
    case = plain_case("llama", replace(LORA, train=["norm"]), {name: replace(found, memory=MORE[name])})
    assert_equal(pool, 2, [case])


@pytest.mark.grid
@pytest.mark.parametrize("of", ["llama", "qwen3_moe"])
def test_adapters_compose_with_context_parallelism(pool: RankPool, of: str) -> None:
    targets = ["all-linear", "experts"] if of == "qwen3_moe" else ["all-linear"]
    assert_equal(pool, 2, [plain_case(of, replace(LORA, targets=targets), {"cp": layout(2, zero=3, cp=2)})])


def train_with_a_whole_gradient(rank: int, world: int, rendezvous: str, case: Case) -> Any:
    """Body: as if each rank had all of the gradient of A beside a column layer."""
    whole = layer_matmuls._follow

    def follow(base: Layout, shape: tuple[int, ...], part: str, is_transposed: bool) -> Layout:
        found = whole(base, shape, part, is_transposed)
        return replace(found, partial=()) if part == "lora_A" else found

    with patch.object(layer_matmuls, "_follow", follow):
        return run_cases(rank, world, rendezvous, [case])


@pytest.mark.parametrize("of", ["llama", "qwen3_moe"])
def test_a_gradient_of_a_that_is_not_summed_shows(pool: RankPool, of: str) -> None:
    """qwen3_moe: of its sliced experts alone, Megatron-Bridge 5634."""
    targets = ["experts"] if of == "qwen3_moe" else ["all-linear"]
    case = plain_case(of, replace(LORA, targets=targets), {"tp": layout(2, tp=2)})
    rows = {
        name: each
        for found in pool.run(2, train_with_a_whole_gradient, case, timeout_s=300)
        for name, each in found.items()
    }
    assert max(map(worst_error, rows.values())) > 1e-3


def train_with_scales_of_pieces(rank: int, world: int, rendezvous: str, case: Case) -> Any:
    """Body: as if each rank took the scale of a block from the part of it that it holds."""
    with (
        patch.object(parameters, "widen", lambda box, shape: box),
        patch.object(row_codes, "widen", lambda box, shape: box),
    ):
        return run_cases(rank, world, rendezvous, [case])


def test_scales_of_a_part_of_a_block_show(pool: RankPool) -> None:
    layouts = {"tp": layout(2, tp=2)}
    assert_equal(pool, 2, [plain_case("llama", QLORA, layouts)])
    found = pool.run(2, train_with_scales_of_pieces, plain_case("llama", QLORA, layouts), timeout_s=300)
    assert max(worst_error(each) for rows in found for each in rows.values()) > 1e-3


def save_and_load(rank: int, world: int, rendezvous: str, folder: Path, before: Recipe, after: Recipe) -> list[bool]:
    """Body: a step in one layout, a checkpoint, and the same weights in another layout; whether names and weights are right."""
    config = build_config(family("qwen3_moe"))
    found = []
    weights: dict[str, Tensor] = {}
    for number, recipe in enumerate((before, after)):
        plan = make_plan(recipe, config)
        mesh = connect(plan.topology, CPU, f"{rendezvous}-{number}", rank)
        world_axis = mesh.axis("world")
        run = build(plan, mesh, resumes=number == 1)
        if number == 0:
            (batch,) = make_batches(config, 1, SEQUENCES, recipe.batch.context, 3)
            train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), 0, 0.1).read()
            weights = gather_full(owned_weights(run), world_axis)
            names = {entry.name for entry in saved_entries(run)}
            found.append(all("lora_" in name for name in names))
            save_checkpoint(folder, 1, saved_entries(run), RunState("x", "y", 1).to_json(), world_axis, keep=1)
        else:
            restore(run, folder)
            loaded = gather_full(owned_weights(run), world_axis)
            found.append(all(torch.equal(loaded[name], each) for name, each in weights.items()))
        run.close()
        mesh.close()
    return found


def test_checkpoints_have_adapters_alone_and_load_in_another_layout(pool: RankPool, tmp_path: Path) -> None:
    adapter = replace(LORA, targets=["q_proj", "experts"])
    before = replace(layout(2, zero=3), adapter=adapter)
    after = replace(layout(2, tp=2, ep=2, expert_tp=1), adapter=adapter)
    for found in pool.run(2, save_and_load, tmp_path, before, after, timeout_s=300):
        assert found == [True, True]
