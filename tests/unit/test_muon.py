"""Muon's arithmetic, its matrices, their owners and their messages, without ranks."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from framework.comm.connect import connect
from framework.errors import ModelError, RecipeError
from framework.model.load import build_meta
from framework.model.shrink import shrink
from framework.model.units import find_units
from framework.optim.groups import group_trained, is_no_weight
from framework.optim.matrices import MatrixForm, count_flops, find_matrices
from framework.optim.muon import group_matrices, orthogonalize, scale_of
from framework.optim.owners import MatrixPart, OwnedValues, assign_owners, measure_balance
from framework.optim.update_rules import RuleOptimizer
from framework.parallel.zero.buffer_plan import BufferPlan, Slot
from framework.plan.forecast_plan import measure_traffic
from framework.plan.plan import make_plan, unconnected
from framework.recipe.check import check_recipe
from framework.recipe.schema import Adapter, Muon, Optim, Parallel, ParameterGroup, Zero
from framework.train.build import build
from framework.verify.plain_optimizers import PlainMuon
from framework.verify.plain_optimizers import find_matrices as find_plain_matrices
from tests.families import FAMILIES, RECURRENT, STATE_SPACES, STOCK_EXPERTS, build_config, family
from tests.grid import few_of
from tests.ranks.parity import small_recipe

SETTINGS = Muon(dtype="master")
BY_HEADS = Optim(name="muon", muon=Muon(heads=True))


@pytest.mark.parametrize("scale", ["adamw", "original"])
def test_the_oracle_is_torchs_muon(monkeypatch: pytest.MonkeyPatch, scale: str) -> None:
    # torch's iterates in bf16 only; in fp64 the two have to agree in all digits.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 40), (40, 24), (16, 16)]
    first = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    ours, theirs = ([nn.Parameter(each.clone()) for each in first] for _ in range(2))
    optim = Optim(name="muon", lr=0.02, momentum=0.9, muon=replace(SETTINGS, scale=scale))  # type: ignore[arg-type]
    whole = [(0, torch.arange(shape[0])) for shape in shapes]
    plain = PlainMuon(
        [
            {"params": [each], "pieces": [piece], "lr": 0.02, "weight_decay": 0.1}
            for each, piece in zip(ours, whole, strict=True)
        ]
        + [{"params": [nn.Parameter(torch.zeros(1))], "lr": 0.02, "weight_decay": 0.0}],
        optim,
    )
    adjust = "match_rms_adamw" if scale == "adamw" else "original"
    stock = torch.optim.Muon(theirs, lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjust)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator, dtype=torch.float64)
            b.grad = a.grad.clone()
        plain.step()
        stock.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_iterations_in_bf16_are_torchs_within_their_rounding() -> None:
    matrix = torch.randn(3, 48, 32)
    stock = nn.Parameter(torch.zeros(48, 32))
    optimizer = torch.optim.Muon([stock], lr=1.0, momentum=0.0, weight_decay=0.0, nesterov=False)
    stock.grad = matrix[1].clone()
    optimizer.step()
    ours = orthogonalize(matrix.bfloat16().mT, 5)[1].mT.float() * scale_of((48, 32), "original")
    assert (ours + stock.detach()).norm() < 2e-2 * ours.norm()


def test_symmetric_products_by_one_triangle_are_the_same() -> None:
    """A matrix with more rows than a half has: the block above the diagonal is copied."""
    matrices = torch.randn(2, 516, 640, dtype=torch.float64)
    x = matrices / torch.linalg.matrix_norm(matrices, keepdim=True)
    for _ in range(2):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    torch.testing.assert_close(orthogonalize(matrices, 2), x, rtol=1e-12, atol=1e-12)


def test_packed_matrices_split_and_join() -> None:
    weight = torch.arange(12 * 4).view(12, 4)
    for form in (MatrixForm(), MatrixForm(0, 1, (4, 1, 1)), MatrixForm(0, 2, (1, 1, 1)), MatrixForm(1, 2, (1, 1))):
        pieces = form.split(weight)
        assert torch.equal(form.join(pieces), weight)
        assert [tuple(each.shape) for each in pieces] == form.shapes((12, 4))
    interleaved = MatrixForm(0, 6, (1, 1)).split(weight)
    assert torch.equal(interleaved[0], weight[::2])


@pytest.mark.parametrize(
    ("name", "weight", "expected"),
    [
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", 3),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", 2),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", 3),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", 3),
        ("qwen3_moe", "model.layers.1.mlp.experts.gate_up_proj", 2),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", 1),
        ("llama", "model.layers.0.self_attn.q_proj.weight", 1),
    ],
)
def test_matrices_of_a_family(name: str, weight: str, expected: int) -> None:
    model = build_meta(build_config(family(name)), "auto")
    matrices = find_matrices(model, tuple(find_units(model)), {}, Optim(name="muon"))
    assert len(matrices[weight].sizes) == expected
    outside = [
        each for each in ("lm_head.weight", "model.embed_tokens.weight", "transformer.wpe.weight") if each in matrices
    ]
    assert outside == []


@pytest.mark.parametrize(
    ("name", "weight", "expected"),
    [
        ("llama", "model.layers.0.self_attn.k_proj.weight", MatrixForm(0, blocks=2)),
        ("llama", "model.layers.0.self_attn.o_proj.weight", MatrixForm(1, blocks=4)),
        ("llama", "model.layers.0.mlp.up_proj.weight", MatrixForm()),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", MatrixForm(0, blocks=8)),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", MatrixForm(0, 1, (1, 1))),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", MatrixForm(1, blocks=12)),
        ("gpt2", "transformer.h.0.attn.c_proj.weight", MatrixForm(0, blocks=4)),
        ("falcon", "transformer.h.0.self_attention.query_key_value.weight", MatrixForm(0, blocks=9)),
        ("deepseek_v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", MatrixForm()),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", MatrixForm(0, 1, (6, 10), 4)),
    ],
)
def test_heads_of_a_family(name: str, weight: str, expected: MatrixForm) -> None:
    model = build_meta(build_config(family(name)), "auto")
    assert find_matrices(model, tuple(find_units(model)), {}, BY_HEADS)[weight] == expected


SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("model_type", "more", "weight", "expected"),
    [
        # Layers have heads of their own.
        (
            "laguna",
            {"num_key_value_heads": 2, "head_dim": 8, "num_attention_heads_per_layer": [4, 8], "num_experts": 4},
            "model.layers.1.self_attn.o_proj.weight",
            MatrixForm(1, blocks=8),
        ),
        # Queries beside gates.
        (
            "qwen3_next",
            {"num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2, "num_experts": 4},
            "model.layers.0.self_attn.q_proj.weight",
            MatrixForm(0, 1, (1, 1), 4),
        ),
        # Experts that tp does not slice.
        (
            "gemma4_text",
            {"num_key_value_heads": 2, "head_dim": 8, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
            | {
                "moe_intermediate_size": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                "global_head_dim": 16,
            },
            "model.layers.1.self_attn.q_proj.weight",
            MatrixForm(0, blocks=4),
        ),
    ],
)
def test_heads_of_layers_are_those_of_the_oracle(
    model_type: str, more: dict[str, Any], weight: str, expected: MatrixForm
) -> None:
    config = CONFIG_MAPPING[model_type](**SMALL, **more)
    model = build_meta(config, "auto")
    found = find_matrices(model, tuple(find_units(model)), {}, BY_HEADS)
    assert found[weight] == expected
    oracle = find_plain_matrices(model, config, BY_HEADS)
    for name, form in found.items():
        assert len(oracle[name]) == form.blocks * len(form.sizes), name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz has those of a recurrent mixer"),
        ("diffllama", "model.layers.0.self_attn.o_proj reads them in pairs"),
    ],
)
def test_heads_that_nothing_tells_apart_are_refused(name: str, reason: str) -> None:
    model = build_meta(build_config(family(name)), "auto")
    with pytest.raises(ModelError, match=f"optim.muon.heads: .*{reason}.*Set it to false"):
        find_matrices(model, tuple(find_units(model)), {}, BY_HEADS)


ORACLES = {each.name: each for each in (*FAMILIES, *STOCK_EXPERTS, *STATE_SPACES, *RECURRENT)}
# Packed in ways of their own; and families that are none of those, in small copies.
PACKED = (
    "codegen",
    "dbrx",
    "falcon",
    "falcon_grouped",
    "gpt_bigcode",
    "jamba",
    "mpt",
    "granitemoehybrid",
    "llama4_text",
)
OTHERS = ("minimax", "modernbert-decoder", "moshi", "zamba2")


@pytest.mark.parametrize("name", few_of([*ORACLES, *OTHERS], lambda name: name in PACKED))
@pytest.mark.parametrize("heads", [False, True])
def test_the_oracle_cuts_weights_as_a_run_does(name: str, heads: bool) -> None:
    config = build_config(ORACLES[name]) if name in ORACLES else shrink(CONFIG_MAPPING[name]())
    optim, model = Optim(name="muon", muon=Muon(heads=heads)), build_meta(config, "auto")
    try:
        forms = find_matrices(model, tuple(find_units(model)), {}, optim)
    except ModelError as error:
        assert heads, error  # noqa: PT017
        return
    oracle = find_plain_matrices(model, config, optim)
    shapes = {each: tuple(model.get_parameter(each).shape) for each in forms}
    forms = {each: form for each, form in forms.items() if not is_no_weight(each, shapes[each])}
    assert oracle.keys() == forms.keys()
    for each, form in forms.items():
        *_, a, b = shapes[each]
        numbers = torch.arange((a, b)[form.dim]).view((-1, 1) if form.dim == 0 else (1, -1))
        pieces = [piece for block in numbers.chunk(form.blocks, form.dim) for piece in form.split(block)]
        found = [(len(shapes[each]) - 2 + form.dim, sorted(piece.flatten().tolist())) for piece in pieces]
        expected = [(dim, sorted(indices.tolist())) for dim, indices in oracle[each]]
        assert len(found) == len(expected) == 1 or sorted(found) == sorted(expected), each


@pytest.mark.parametrize(("name", "tp"), [("gpt2", 1), ("llama", 2), ("llama", 4)])
def test_each_head_is_whole_on_a_rank_of_tp_and_has_its_owner_there(name: str, tp: int) -> None:
    settings, num_shards = replace(SETTINGS, heads=True), 3
    recipe = small_recipe("fp64", num_shards * tp, zero=Zero(stage=3), parallel=Parallel(tp=tp))
    plan = make_plan(replace(recipe, optim=Optim(name="muon", muon=settings)), build_config(family(name)))
    forms = {each.parameter: each.matrix for each in plan.groups if each.matrix is not None}
    # Each element is its number.
    numbered = {each: torch.arange(plan.whole.get_parameter(each).numel()) for each in forms}
    blocks = [
        (form, block.flatten())
        for each, form in forms.items()
        for block in numbered[each].view(plan.whole.get_parameter(each).shape).chunk(form.blocks, form.dim)
    ]

    def find(buffer: BufferPlan, slot: Slot, low: int, high: int) -> OwnedValues:
        whole = numbered[slot.name].view(slot.layout.shape)
        for dim, runs in enumerate(slot.layout.runs):
            whole = whole.index_select(dim, torch.cat([torch.arange(*run) for run in runs]))
        return OwnedValues(whole.flatten()[low - slot.start : high - slot.start], *[torch.zeros(0)] * 2, 0.0, 0.0)

    cpu = torch.device("cpu")
    for index in range(tp):
        held: list[list[torch.Tensor]] = [[] for _ in blocks]
        owned: list[MatrixPart] = []
        for rank in range(index, num_shards * tp, tp):
            buffers, axes = plan.of_rank(rank).buffers, unconnected(plan.topology, rank)
            (group,) = group_matrices(buffers, plan.groups, axes, settings, cpu, find)
            owned += group.owned
            parts = [part for weight in group.weights for part in weight.cut(weight.own.value)]
            for own, part in zip(held, parts, strict=True):
                own.append(part)
            for weight in group.weights:
                assert torch.equal(weight.join(weight.cut(weight.own.value)), weight.own.value)
        is_here = [len(torch.cat(own)) == len(whole) for own, (_, whole) in zip(held, blocks, strict=True)]
        for own, (form, whole), here in zip(held, blocks, is_here, strict=True):
            assert form.blocks == 1 or torch.equal(torch.cat(own), whole if here else whole[:0])
        num_heads = sum(form.blocks > 1 and here for (form, _), here in zip(blocks, is_here, strict=True))
        assert 0 < num_heads >= sum(each.weight.form.blocks > 1 for each in owned)


# By model: the matrices of its layers, (number, rows, columns), and those of attention by heads.
MATRICES = {
    "Llama 3.1 8B": [(96, 14336, 4096), (64, 4096, 4096), (64, 1024, 4096)],
    "8B by heads": [(96, 14336, 4096), (32 * 48, 128, 4096), (32 * 32, 4096, 128)],
    "Llama 3.1 70B": [(240, 28672, 8192), (160, 8192, 8192), (160, 1024, 8192)],
    "70B by heads": [(240, 28672, 8192), (80 * 80, 128, 8192), (80 * 64, 8192, 128)],
}
LATENTS = [(61, 1536, 7168), (61, 576, 7168)]
OF_EXPERTS = [(58 * 256 * 3, 2048, 7168), (58 * 3, 2048, 7168), (58, 256, 7168), (9, 18432, 7168)]
MATRICES["DeepSeek-V3"] = [(61, 24576, 1536), (61, 32768, 512), (61, 7168, 16384), *LATENTS, *OF_EXPERTS]
MATRICES["V3 by heads"] = [(7808, 192, 1536), (15616, 128, 512), (7808, 7168, 128), *LATENTS, *OF_EXPERTS]


# Work of the busiest owner over the mean, for each number of owners: the table of docs/optimizers.md.
OWNERS = (8, 32, 64, 128, 256, 512, 1024)
BUSIEST = {
    "Llama 3.1 8B": (224, 1.00, 1.00, 1.06, 1.06, 2.1, 4.2, 8.5),
    "8B by heads": (2656, 1.00, 1.00, 1.32, 1.32, 2.6, 5.3, 10.6),
    "Llama 3.1 70B": (560, 1.00, 1.01, 1.01, 1.01, 1.17, 1.7, 3.4),
    "70B by heads": (11760, 1.00, 1.06, 1.06, 1.06, 1.06, 2.1, 4.3),
    "DeepSeek-V3": (45090, *[1.00] * 7),
    "V3 by heads": (76139, *[1.00] * 7),
}


@pytest.mark.parametrize("model", few_of(MATRICES, lambda model: "V3" not in model))
def test_owners_have_equal_work(model: str) -> None:
    costs = [count_flops((a, b), 5) for number, a, b in MATRICES[model] for _ in range(number)]
    num_matrices, *ratios = BUSIEST[model]
    assert len(costs) == num_matrices
    for num_owners, expected in zip(OWNERS, ratios, strict=True):
        assert measure_balance(costs, None, num_owners) == pytest.approx(expected, rel=0.02), num_owners


# Ranks that share a matrix where one each is not enough, by the number of ranks.
SHARED = {"Llama 3.1 8B": {256: 2, 512: 4, 1024: 8}, "Llama 3.1 70B": {256: 2, 512: 4, 1024: 8}, "DeepSeek-V3": {}}


@pytest.mark.parametrize("model", few_of(SHARED, lambda model: "V3" not in model))
def test_ranks_of_a_node_that_share_matrices_have_equal_work(model: str) -> None:
    matrices = MATRICES[model]
    alone = sum(number * count_flops((a, b), 5) for number, a, b in matrices)
    for num_owners in (1 << power for power in range(3, 11)):
        for shared in (1, 2, 4, 8):
            costs = [count_flops((a, b), 5, shared) for number, a, b in matrices for _ in range(number)]
            balance = measure_balance(costs, None, num_owners, team=shared)
            if balance <= 1.1:
                break
        assert balance <= 1.1
        assert shared == SHARED[model].get(num_owners, 1)
        # They do little twice.
        assert shared * sum(costs) < 1.05 * alone


def test_a_plan_shares_large_matrices_where_owners_have_few() -> None:
    config = CONFIG_MAPPING["llama"](hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, vocab_size=64)
    recipe = replace(small_recipe("bf16", 16, 1, 16, zero=Zero(stage=3)), optim=Optim(name="muon"))
    for world, tp, stated, expected in ((16, 1, "auto", 4), (16, 2, "auto", 4), (2, 1, "auto", 1), (16, 1, 2, 2)):
        batch = replace(recipe.batch, sequences_per_microbatch=16 * tp // world)
        plan = make_plan(
            replace(
                recipe,
                batch=batch,
                parallel=Parallel(tp=tp),
                launch=replace(recipe.launch, ranks=world),
                optim=Optim(name="muon", muon=Muon(ranks_per_matrix=stated)),  # type: ignore[arg-type]
            ),
            config,
        )
        assert plan.topology.size("matrix") == expected
        axes = [unconnected(plan.topology, rank) for rank in range(world)]
        groups = [
            group_matrices(
                plan.of_rank(rank).buffers, plan.groups, axes[rank], plan.recipe.optim.muon, torch.device("meta")
            )
            for rank in range(world)
        ]
        loads = [of_rank[-1].loads[0] for of_rank in groups]
        assert all(
            loads[rank] == of_rank[-1].loads[0] and of_rank[-1].loads[peer - rank] == loads[peer]
            for rank, of_rank in enumerate(groups)
            for peer in range(world)
        )
        assert stated != "auto" or max(loads) * world / sum(loads) <= 1.1


def test_ranks_that_share_a_matrix_hold_parts_of_it() -> None:
    recipe = replace(small_recipe("fp32", 6, zero=Zero(stage=3)), optim=Optim(name="muon"))
    recipe = replace(recipe, parallel=Parallel(tp=2))
    for stated, is_refused in (("auto", False), (1, False), (2, False), (6, False), (3, True), (4, True)):
        muon = Muon(ranks_per_matrix=stated)  # type: ignore[arg-type]
        found = check_recipe(replace(recipe, optim=replace(recipe.optim, muon=muon)), {})
        assert ("optim.muon.ranks_per_matrix" in {problem.key for problem in found}) is is_refused


def test_matrices_that_muon_does_not_update_are_no_owners_work() -> None:
    config = CONFIG_MAPPING["llama"](hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, vocab_size=64)
    recipe = small_recipe("bf16", 16, 1, 16, zero=Zero(stage=3))
    recipe = replace(recipe, optim=Optim(name="muon"))
    mlp = {"mlp": ParameterGroup(pattern=r"mlp\.", optimizer="adamw")}
    moved = replace(recipe, optim=replace(recipe.optim, groups=mlp))
    frozen = replace(recipe, model=replace(recipe.model, freeze=[r"mlp\."]))
    found = [make_plan(each, config) for each in (recipe, moved, frozen)]
    every, *rest = [plan.shape.sharing(plan.candidate) for plan in found]
    assert rest[0] == rest[1] != every
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in found[1].shape.forms} == {
        *("q_proj", "k_proj", "v_proj", "o_proj")
    }


def test_stages_of_a_node_do_not_share_matrices() -> None:
    recipe = replace(small_recipe("fp32", 8, zero=Zero(stage=3, shard_within="node")), parallel=Parallel(pp=2))
    for stated, is_refused in ((4, False), (8, True)):
        found = check_recipe(replace(recipe, optim=Optim(name="muon", muon=Muon(ranks_per_matrix=stated))), {})
        assert ("optim.muon.ranks_per_matrix" in {problem.key for problem in found}) is is_refused


# Of a stage of DeepSeek-V3 with four layers, (number, rows, columns): attention; shared experts and routers.
ATTENTION = ((4, 1536, 7168), (4, 24576, 1536), (4, 576, 7168), (4, 32768, 512), (4, 7168, 16384))
BESIDE = ((8, 2048, 7168), (4, 7168, 2048), (4, 256, 7168))


@pytest.mark.parametrize("dp", [16, 32, 64])
def test_owners_of_experts_even_out_what_attention_costs_a_few(dp: int) -> None:
    dense = [count_flops((a, b), 5) for number, a, b in (*ATTENTION, *BESIDE) for _ in range(number)]
    pair, down = 2 * count_flops((2048, 7168), 5), count_flops((7168, 2048), 5)
    loads = [0] * dp
    for owner, cost in zip(assign_owners(dense, loads), dense, strict=True):
        loads[owner] += cost
    uneven = max(loads) + 128 * (pair + down) * 8 // dp
    for place in range(8):  # of ep; ranks with the same experts are 8 apart
        costs = [pair] * 128 + [down] * 128
        for owner, cost in zip(assign_owners(costs, loads[place::8]), costs, strict=True):
            loads[place + 8 * owner] += cost
    assert max(loads) * dp / sum(loads) < 1.05
    assert dp < 64 or uneven * dp / sum(loads) > 1.5


def test_every_matrix_has_one_owner_and_bytes_are_theory() -> None:
    recipe = replace(small_recipe("fp64", 4, zero=Zero(stage=3)), optim=Optim(name="muon", muon=SETTINGS))
    plan = make_plan(recipe, build_config(family("llama")))
    groups = []
    for rank in range(4):
        axes = unconnected(plan.topology, rank)
        groups += group_matrices(plan.of_rank(rank).buffers, plan.groups, axes, SETTINGS, torch.device("meta"))
    numel = sum(plan.whole.get_parameter(each.parameter).numel() for each in plan.groups if each.optimizer == "muon")
    sent = sum(num for group in groups for num in group.bytes_sent.values())
    # There and back all but what owners hold themselves: about (n - 1) / n of n ranks.
    assert 2 * numel * 8 * 0.6 < sent < 2 * numel * 8
    assert sent % 16 == 0
    of_ranks = [sum(group.bytes_sent.values()) for group in groups]
    assert max(of_ranks) < 1.5 * sent / 4
    assert [measure_traffic(plan, rank)["matrices"] for rank in range(4)] == of_ranks


@pytest.mark.parametrize(
    "parallel", [Parallel(ep=2), Parallel(ep=2, tp=2), Parallel(ep=4)], ids=("ep2", "ep2 tp2", "ep4")
)
def test_experts_even_out_what_their_owners_have_of_the_rest(parallel: Parallel) -> None:
    recipe = replace(
        small_recipe("fp64", 4, zero=Zero(stage=3), parallel=parallel), optim=Optim(name="muon", muon=SETTINGS)
    )
    # One matrix of attention is dearer than any other.
    plan = make_plan(
        recipe,
        build_config(
            family("qwen3_moe"), num_hidden_layers=1, mlp_only_layers=[], num_experts=8, num_attention_heads=16
        ),
    )
    ranks = range(4)
    groups = [
        group_matrices(
            plan.of_rank(rank).buffers, plan.groups, unconnected(plan.topology, rank), SETTINGS, torch.device("meta")
        )
        for rank in ranks
    ]
    own = [[sum(part.flops(SETTINGS.steps) for part in group.owned) for group in of_rank] for of_rank in groups]
    # All see the same owners.
    for rank in ranks:
        assert groups[rank][-1].loads == {
            peer - rank: sum(own[peer]) for peer in ranks if peer - rank in groups[rank][-1].loads
        }
    if parallel.ep == 2:  # else each expert is on one rank only
        dense, experts = (max(loads) for loads in zip(*own, strict=True))
        assert max(map(sum, own)) < dense + experts


def move_momentum_in_each_step() -> AbstractContextManager[Any]:
    """DeepSpeed's 8432: momentum takes gradients that are not finite, and keeps them."""

    def ignore(self: RuleOptimizer, closure: None = None) -> None:
        taken, self.found_inf = self.found_inf, None
        step(self, closure)
        self.found_inf = taken

    step = RuleOptimizer.step
    return patch.object(RuleOptimizer, "step", ignore)


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_skipped_step_moves_neither_weights_nor_momentum(is_planted: bool) -> None:
    recipe = replace(small_recipe("fp64", 1), optim=Optim(name="muon", muon=SETTINGS))
    plan = make_plan(recipe, build_config(family("llama")))
    mesh = connect(plan.topology, torch.device("cpu"))
    run = build(plan, mesh)
    one, states = torch.ones((), dtype=torch.float64), []
    for gradient, skip in ((1.0, False), (torch.nan, True)):
        for shard in run.optimizer.shards:
            shard.gradient.fill_(gradient)
        with move_momentum_in_each_step() if is_planted else nullcontext():
            run.optimizer.step(1e-2, one, torch.tensor(skip), 0)
        shards = run.optimizer.shards
        moving = [each for each in shards if run.optimizer.has_state(each, "momentum_buffer")]
        momentum = [run.optimizer.state(each, "momentum_buffer") for each in moving]
        states.append(torch.cat([*(each.value for each in shards), *momentum]))
    run.close()
    mesh.close()
    assert states[0].isfinite().all()
    assert torch.equal(*states) is not is_planted


def test_ranks_of_tp_with_uneven_slices_order_parameters_alike() -> None:
    recipe = replace(small_recipe("fp64", 2, parallel=Parallel(tp=2)), optim=Optim(name="muon", muon=SETTINGS))
    plan = make_plan(recipe, build_config(family("llama"), hidden_size=12, intermediate_size=7))
    orders = []
    for rank in range(2):
        axes = unconnected(plan.topology, rank)
        (group,) = group_matrices(plan.of_rank(rank).buffers, plan.groups, axes, SETTINGS, torch.device("meta"))
        orders.append([each.shape for each in group.parts])
    assert orders[0] == orders[1]
    names = [[slot.name for buffer in plan.of_rank(rank).buffers for slot in buffer.slots] for rank in range(2)]
    assert names[0] != names[1]


def test_bad_input_is_refused() -> None:
    shapes = {"model.layers.0.q.weight": (4, 4), "model.norm.weight": (4,)}
    optim = Optim(name="muon", groups={"all": ParameterGroup(".", optimizer="muon")})
    with pytest.raises(RecipeError, match=r"optim.groups.all.optimizer=muon takes model.norm.weight"):
        group_trained(shapes, (), optim, (), {"model.layers.0.q.weight": MatrixForm()})
    recipe = small_recipe("fp32", 1)
    offload = replace(recipe.memory, offload=replace(recipe.memory.offload, optimizer=1.0))
    muon = Optim(name="muon")
    refused = {
        "memory.offload.optimizer": replace(recipe, optim=muon, memory=offload),
        "precision.moments": replace(recipe, optim=muon, precision=replace(recipe.precision, moments="bf16")),
        "optim.groups.a.optimizer": replace(recipe, optim=Optim(groups={"a": ParameterGroup("q", optimizer="muon")})),
        "optim.muon.steps": replace(recipe, optim=Optim(muon=Muon(steps=3))),
        "adapter.kind": replace(recipe, optim=muon, adapter=Adapter(kind="lora")),
    }
    for key, each in refused.items():
        assert key in {problem.key for problem in check_recipe(each, {})}
