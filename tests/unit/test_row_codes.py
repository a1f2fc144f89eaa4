"""Frozen weights kept as codes in blocks of the global rows: the published numbers, equal in every layout, and their bytes."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from framework.mesh.layout import Layout, Shard
from framework.model.adapters import find_coded
from framework.model.load import build_meta, load_config
from framework.model.units import find_units
from framework.parallel.zero.buffer_plan import BufferPlan
from framework.parallel.zero.row_codes import NF4, RowCodec, RowKind, round_rows, widen
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.recipe.schema import Adapter, Parallel, Recipe, Zero
from framework.verify.plain_rounding import _make_nf4, _round
from tests.families import build_config, family
from tests.grid import IN_TURN
from tests.ranks.parity import small_recipe

pytestmark = IN_TURN

QLORA = Adapter("lora", 3, 5.0, base="nf4")


def test_the_numbers_are_quantiles_of_a_normal_distribution() -> None:
    assert torch.equal(torch.tensor(NF4), _make_nf4())


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_rounded_rows_are_the_oracles_and_zeros_stay(kind: RowKind) -> None:
    x = torch.randn(5, 150, generator=torch.Generator().manual_seed(1))
    x[2], x[3, :64] = 0, 0
    found = round_rows(kind, x)
    assert torch.equal(found, _round(x, kind == "nf4"))
    assert not found[2].any()
    # Half of the widest gap between numbers: of the table's, and of 448 and 416.
    assert float((found - x).abs().max()) <= {"nf4": 0.152, "fp8": 16 / 448}[kind] * float(x.abs().max())
    # The largest number of a block is exact, so that what has been rounded stays.
    assert torch.equal(round_rows(kind, found), found)


def lay_out(layout: Layout, dim: int, rank: int, tp: int, segments: tuple[int, ...] = ()) -> Layout:
    return replace(layout, shards=(Shard("tp", dim, rank, tp, segments),)) if tp > 1 else layout


def write_all(codec: RowCodec, owners: int, weights: list[Tensor]) -> Tensor:
    """The message of each owner, written box by box as a load does."""
    messages = torch.zeros(owners, codec.message_bytes(codec.numel), dtype=torch.uint8)
    for owner, (rows, weight) in product(range(owners), zip(codec.rows, weights, strict=True)):
        low, high = (min(max(each, rows.start), rows.stop) for each in (owner * codec.numel, (owner + 1) * codec.numel))
        first = low
        for box in rows.layout.boxes_between(low - rows.start, high - rows.start):
            values = weight[widen(box, rows.layout.shape).slices()]
            codec.write(messages[owner], owner * codec.numel, first, box, rows.layout, values)
            first += box.numel
    return messages


@given(st.sampled_from(["nf4", "fp8"]), st.integers(1, 7), st.integers(1, 3), st.integers(1, 200), st.data())
def test_every_layout_has_the_same_numbers(
    kind: RowKind, owners: int, tp: int, width: int, data: st.DataObject
) -> None:
    weights = [torch.randn(5, width), torch.randn(2, 3, 70)]
    rank = data.draw(st.integers(0, tp - 1))
    layouts = (
        lay_out(Layout((5, width)), data.draw(st.integers(0, 1)), rank, tp),
        lay_out(Layout((2, 3, 70)), 2, rank, tp, (10, 60)),
    )
    total = sum(each.numel_local for each in layouts)
    numel = -(-total // owners)
    codec = RowCodec(kind, layouts, numel + numel % 2)
    messages = write_all(codec, owners, weights)
    out = torch.zeros(owners, codec.numel, dtype=torch.float64)
    codec.decode(messages, out)
    whole = [round_rows(kind, each) for each in weights]
    expected = [
        each[box.slices()].flatten() for each, layout in zip(whole, layouts, strict=True) for box in layout.boxes()
    ]
    assert torch.equal(out.view(-1)[:total].float(), torch.cat(expected))
    own = torch.cat([codec.decode_own(message, owner * codec.numel) for owner, message in enumerate(messages)])
    assert torch.equal(own[:total], torch.cat(expected))


def coded_buffers(recipe: Recipe) -> list[BufferPlan]:
    plan = make_plan(recipe, build_config(family("llama"), hidden_size=128, intermediate_size=256))
    return [buffer for buffer in plan.of_rank(0).buffers if isinstance(buffer.dtypes.codec, RowCodec)]


@pytest.mark.parametrize(("world", "parallel", "zero"), [(1, {}, 0), (2, {"tp": 2}, 1), (4, {}, 3)])
def test_a_rank_keeps_four_bits_and_scales_at_every_stage(world: int, parallel: dict[str, int], zero: int) -> None:
    recipe = small_recipe("fp32", world, zero=Zero(stage=zero), parallel=Parallel(**parallel))
    buffers = coded_buffers(replace(recipe, adapter=QLORA))
    assert buffers
    for buffer in buffers:
        assert buffer.held_bytes(0)["parameters"] == buffer.kept_bytes
        # 4 bits and a scale of 4 bytes for 64 numbers, and the table.
        assert buffer.kept_bytes <= buffer.numel_owned * (0.5 + 4 / 64) + 64 + 64


def test_codes_are_of_the_layers_matrices_alone() -> None:
    model = build_meta(build_config(family("qwen3_moe")))
    found = find_coded(model, find_units(model), ["model.layers.0.self_attn.q_proj.weight"])
    assert not any(
        word in name for name in found for word in ("embed", "lm_head", "norm", "mlp.gate.", "layers.0.self_attn.q_")
    )
    assert {name.split(".", 3)[3] for name in found if ".1." in name} >= {
        "mlp.experts.down_proj",
        "self_attn.o_proj.weight",
    }


def test_a_model_of_70b_beside_an_adapter_fits_eight_gpus_in_4_bits_and_one_alone() -> None:
    found = {}
    for base, ranks in product(("bf16", "nf4"), (1, 8)):
        overrides = [
            "experiment=qlora_llama3_3_70b",
            "data.sources.files.path=x.jsonl",
            f"adapter.base={base}",
            "model.weights=null",
        ]
        composed = compose([*overrides, f"launch.ranks={ranks}", "launch.device=cuda"]).require()
        found[base, ranks] = make_plan(composed, load_config(composed.model)).memory(0).reserved / 2**30
    assert found["nf4", 1] < 60 < 140 < found["bf16", 1]
    assert found["nf4", 8] < 18 < found["bf16", 8]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [(["adapter.base=nf4"], "adapter.base"), (["adapter=lora", "adapter.base=int4"], "adapter.base")],
)
def test_a_base_without_an_adapter_or_of_another_kind_is_refused(overrides: list[str], key: str) -> None:
    assert key in {problem.key for problem in compose(["experiment=quickstart", *overrides]).problems}
