"""What is reported of experts: in reported steps only, by layer, and nothing of a dense model. What a rate of biases refuses."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from framework.checkpoint.commit import Retention
from framework.checkpoint.save import Saver
from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.data.pack import Microbatch
from framework.errors import ModelError
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Axis
from framework.model.experts import ExpertsForm
from framework.model.load import build_meta
from framework.model.mixtures import ExpertLoad, Mixture, MixtureLoad, find_mixtures, read_loads
from framework.model.routers import RoutedTokens
from framework.model.shrink import shrink
from framework.model.units import find_units
from framework.monitor.watchdog import Watchdog
from framework.plan.plan import make_plan
from framework.recipe.schema import Model, Track, Train
from framework.track.report import RunInfo, StepReport
from framework.train.beside_optimizer import RouterBiases
from framework.train.build import build
from framework.train.loop import Loop, SavePolicy
from framework.train.reports import Reporter
from framework.train.state import RunState
from tests.families import build_config, family, needs_newer_transformers
from tests.ranks.parity import CONTEXT, CPU, small_recipe, topology_of

SEQUENCES = 4
MIXTURE = Mixture("layers.1", "experts", 3, "", 0, ExpertsForm("gate_up_proj", True, True, False), "")
ALONE = Communicator(Axis("world", 1, 0))


def report_steps(name: str) -> list[StepReport]:
    """Reports of three steps on one rank, of which every second is asked for."""
    recipe = replace(
        small_recipe("fp32", 1, 2, SEQUENCES), train=Train(steps=3), track=Track(every_steps=2), model=Model()
    )
    config = build_config(family(name))
    config.use_cache = False
    plan = make_plan(recipe, config)
    run = build(plan, connect(topology_of(recipe, config), CPU))
    rows = torch.arange(2 * CONTEXT).view(2, CONTEXT) % 97
    loader: Any = SimpleNamespace(batch=lambda samples: [Microbatch(rows, rows, None)] * 2, is_growing=False)
    reports: list[StepReport] = []
    observers: Any = SimpleNamespace(report=reports.append)
    info, saver = RunInfo("r", {}, 3), Saver(Path(), ALONE, Retention(1))
    watchdog = Watchdog()
    policy = SavePolicy(recipe.checkpoint, recipe.train.steps, saver)
    reporter = Reporter(run, plan, info, observers, saver, watchdog)
    loop = Loop(run, RunState("r", ""), plan, loader, policy, reporter, watchdog)
    list(loop.steps())
    loop.begin_save()
    return reports


def test_reported_steps_tell_the_load_of_experts_by_layer() -> None:
    reports = report_steps("qwen3_moe")
    assert [each.step for each in reports] == [2, 3]
    for each in reports:
        assert list(each.expert_loads) == list(each.expert_imbalance) == ["layers.1", "layers.2"]
        assert {sum(load) for load in each.expert_loads.values()} == {SEQUENCES * CONTEXT * 3}
        assert each.expert_imbalance_max == max(each.expert_imbalance.values()) >= 1.0
        assert each.expert_imbalance["layers.1"] == max(each.expert_loads["layers.1"]) * 6 / (SEQUENCES * CONTEXT * 3)
        assert each.router_entropy is not None
        assert 0 < each.router_entropy < torch.tensor(6.0).log()
        assert each.dropped_tokens == 0


def test_a_dense_model_has_no_experts_to_report() -> None:
    for each in report_steps("llama"):
        assert (each.expert_imbalance, each.expert_imbalance_max, each.router_entropy) == ({}, None, None)
        assert (each.expert_loads, each.dropped_tokens) == ({}, None)


# --- of one module


def count_rows(tokens: RoutedTokens, chosen: torch.Tensor) -> MixtureLoad:
    model = torch.nn.Module()
    model.experts = Experts()
    load = ExpertLoad([MIXTURE], ALONE, CPU)
    load.watch(model, ["layers.1"], tokens)
    load.start_step(is_reported=True)
    with load.counting():
        model.experts(chosen.float(), chosen)
        load.drop(model.experts, torch.tensor(2))
    model.experts(chosen.float(), chosen)  # recomputed: counted already
    sums = load.sum_over_ranks()
    assert sums is not None
    return read_loads([MIXTURE], sums.flatten().tolist())["layers.1"]


class Experts(torch.nn.Module):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return x


def test_padding_counts_for_nobody_and_dropped_tokens_are_counted() -> None:
    tp = Communicator(Axis("tp", 2, 1))
    layout = TokenLayout(2, 5, tp.axis, is_sharded=True)
    assert (layout.tokens_local, layout.valid_local) == (3, 2)
    chosen = torch.tensor([[0, 1], [0, 2], [2, 2], [1, 0], [1, 3], [2, 2]])  # the third of each sequence is padding
    axes = {"tp": tp, "cp": Communicator(Axis("cp", 1, 0)), "context_tp": tp}
    load = count_rows(RoutedTokens.divided(layout, axes), chosen)
    # Expert 3 is none of the mixture's three.
    assert load == MixtureLoad((3, 3, 1), None, 2)
    assert load.imbalance == pytest.approx(9 / 7)
    assert count_rows(RoutedTokens.whole(layout, axes), chosen[:5]) == MixtureLoad((0, 0, 0), None, 0)
    assert count_rows(RoutedTokens.of_one_rank(), chosen).tokens == (3, 3, 5)


# --- the bias of a router's choice


def biases_of(name: str) -> list[str]:
    model = build_meta(build_config(family(name)))
    return [each.bias for each in find_mixtures(model, find_units(model))]


def test_biases_are_found_where_a_family_has_them() -> None:
    assert biases_of("deepseek_v3") == [f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2)]
    assert biases_of("minimax_m2") == [f"model.layers.{n}.mlp.e_score_correction_bias" for n in (0, 1, 2)]
    assert biases_of("gpt_oss") == ["", "", ""]  # its router's bias is a weight, and trained
    assert biases_of("llama") == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "mixtral",
            "router_bias_rate=0.001 moves the bias .* mixtral models have routers without a correction bias.*auxiliary",
        ),
        ("llama", "llama models have no experts: set model.router_bias_rate=0$"),
    ],
)
def test_a_rate_without_biases_is_refused_by_name(name: str, message: str) -> None:
    recipe = replace(small_recipe("fp32", 1), model=Model(router_bias_rate=0.001))
    with pytest.raises(ModelError, match=message):
        make_plan(recipe, build_config(family(name)))


def test_a_rate_of_frozen_biases_is_refused() -> None:
    values = family("llama").config | {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_layer_start_index": 1}
    recipe = replace(small_recipe("fp32", 1), model=Model(router_bias_rate=0.001, freeze=["moe_statics"]))
    with pytest.raises(ModelError, match=r"moves model\.layers\.1.*, which model.freeze='moe_statics' leaves as it is"):
        make_plan(recipe, build_config(replace(family("llama"), config=values)))
    # Freezing is of parameters: deepseek's bias is a buffer.
    frozen = replace(recipe, model=Model(router_bias_rate=0.001, freeze=["mlp.gate"]))
    assert make_plan(frozen, build_config(family("deepseek_v3"))).mixtures


def move(loads: list[list[float]], is_finite: bool = True) -> list[list[float]]:
    """Biases of two mixtures, of 4 and of 3 experts, after one step of 0.5 from zero."""
    model = torch.nn.Module()
    for name, count in (("wide", 4), ("narrow", 3)):
        model.register_buffer(name, torch.zeros(count))
    mixtures = tuple(replace(MIXTURE, bias=name, num_experts=count) for name, count in (("wide", 4), ("narrow", 3)))
    stage: Any = SimpleNamespace(model=SimpleNamespace(model=model), buffers=[])
    sums = torch.tensor([[*row, 0.0, 0.0, 0.0, 0.0] for row in loads], dtype=torch.float64)
    RouterBiases(0.5, mixtures, {0: stage}, CPU).update(sums, torch.tensor(is_finite))
    return [model.get_buffer(each.bias).tolist() for each in mixtures]


def test_a_bias_moves_against_its_load_and_stays_at_the_mean() -> None:
    # Means are 5 and 10/3, which no load of whole tokens has.
    loads = [[5.0, 9.0, 1.0, 5.0], [3.0, 4.0, 3.0, 0.0]]
    assert move(loads) == [[0.0, -0.5, 0.5, 0.0], [0.5, -0.5, 0.5]]


def test_a_skipped_step_moves_no_bias() -> None:
    assert move([[9.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]], is_finite=False) == [[0.0] * 4, [0.0] * 3]


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe", "afmoe", "hy_v3", "nemotron_h"),
        pytest.param("kolibri1", marks=needs_newer_transformers),
    ],
)
def test_the_bias_that_is_found_decides_who_is_chosen(name: str) -> None:
    config = shrink(CONFIG_MAPPING[name]())
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    mixtures = [each for each in find_mixtures(model, find_units(model)) if each.bias]
    load = ExpertLoad(mixtures, ALONE, CPU)
    load.watch(model, [each.layer for each in mixtures], RoutedTokens.of_one_rank())
    load.start_step(is_reported=True)
    for each in mixtures:
        model.state_dict()[each.bias].flatten()[1] = 50.0
    with torch.no_grad(), load.counting():
        model(input_ids=torch.arange(12).view(2, 6) + 3)
    assert mixtures
    for row in load.sums.tolist():
        assert row[1] == 12
