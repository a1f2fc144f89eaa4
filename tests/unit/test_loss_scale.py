"""The loss scale halves after a step that was not finite, doubles after 2,000 that were, and a checkpoint has it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from framework.checkpoint.commit import Retention
from framework.checkpoint.save import Saver
from framework.comm.connect import connect
from framework.data.pack import Microbatch
from framework.monitor.watchdog import Watchdog
from framework.plan.plan import make_plan
from framework.recipe.schema import LearningRateSchedule, Optim, Precision, Train
from framework.track.report import RunInfo, StepReport
from framework.train.beside_optimizer import GROWTH_STEPS, INITIAL, LARGEST, LossScale
from framework.train.build import build
from framework.train.loop import Loop, SavePolicy
from framework.train.reports import Reporter
from framework.train.state import RunState, restore, saved_entries
from framework.verify.plain import PlainLossScale
from tests.families import build_config, family
from tests.ranks.parity import CONTEXT, small_recipe, topology_of
from tests.saving import save_checkpoint

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(True), torch.tensor(False)


def make_scale(precision: Precision | None = None) -> LossScale:
    return LossScale(precision or Precision("fp16"), torch.float32, CPU)


def test_each_step_that_is_not_finite_halves_it() -> None:
    scale = make_scale()
    for _ in range(3):
        scale.update(BAD)
    assert scale.read() == (INITIAL / 8, 0)


def test_it_doubles_after_so_many_finite_steps_in_a_row() -> None:
    scale = make_scale()
    for _ in range(GROWTH_STEPS - 1):
        scale.update(GOOD)
    scale.update(BAD)
    for _ in range(GROWTH_STEPS - 1):
        scale.update(GOOD)
    assert scale.read() == (INITIAL / 2, GROWTH_STEPS - 1)
    scale.update(GOOD)
    assert scale.read() == (INITIAL, 0)


def test_it_never_becomes_infinite() -> None:
    scale = make_scale()
    scale.restore(LARGEST, GROWTH_STEPS - 1)
    scale.update(GOOD)
    assert scale.read() == (LARGEST, 0)


@pytest.mark.parametrize(("precision", "value"), [(Precision("fp16", loss_scale=96.0), 96.0), (Precision("bf16"), 1.0)])
def test_a_fixed_scale_stays_and_leaves_nothing_in_a_checkpoint(precision: Precision, value: float) -> None:
    scale = make_scale(precision)
    for is_finite in (GOOD, BAD):
        scale.update(is_finite)
    assert scale.value == value
    assert scale.read() == (None, 0)


def test_it_goes_on_from_a_checkpoint_as_if_never_stopped() -> None:
    torch.manual_seed(0)
    steps = (torch.rand(3 * GROWTH_STEPS) > 2e-4).unbind()
    assert not all(steps)
    through, first, second = make_scale(), make_scale(), make_scale()
    for is_finite in steps:
        through.update(is_finite)
    for is_finite in steps[:2500]:
        first.update(is_finite)
    scale, clean = first.read()
    assert scale is not None
    second.restore(scale, clean)
    for is_finite in steps[2500:]:
        second.update(is_finite)
    assert second.read() == through.read()


def test_the_oracle_follows_the_same_rule() -> None:
    torch.manual_seed(0)
    ours, plain = make_scale(), PlainLossScale(Precision("fp16"))
    for is_finite in (torch.rand(3 * GROWTH_STEPS) > 2e-4).unbind():
        weight = torch.zeros(2, requires_grad=True)
        weight.grad = torch.full((2,), 1.0 if is_finite else torch.inf)
        plain.unscale([weight])
        assert plain.take() == bool(is_finite)
        ours.update(is_finite)
        assert ours.value == plain.value


def start_loop(steps: int, reports: list[StepReport]) -> Loop:
    """A run in fp16 on one rank, from the beginning."""
    # At a constant rate: a schedule would know how many steps there are.
    optim = Optim(lr=1e-2, schedule=LearningRateSchedule("constant"))
    small = small_recipe("fp32", 1, 1, 2)
    recipe = replace(small, train=Train(steps=steps), precision=Precision("fp16"), optim=optim)
    config = build_config(family("llama"))
    config.use_cache = False
    plan = make_plan(recipe, config)
    run = build(plan, connect(topology_of(recipe, config), CPU))
    rows = torch.arange(2 * CONTEXT).view(2, CONTEXT) % 97
    loader: Any = SimpleNamespace(batch=lambda samples: [Microbatch(rows, rows, None)], is_growing=False)
    observers: Any = SimpleNamespace(report=reports.append)
    info, saver = RunInfo("r", {}, steps), Saver(Path(), run.mesh.axis("world"), Retention(1))
    watchdog = Watchdog()
    policy = SavePolicy(recipe.checkpoint, recipe.train.steps, saver)
    reporter = Reporter(run, plan, info, observers, saver, watchdog)
    return Loop(run, RunState("r", ""), plan, loader, policy, reporter, watchdog)


def train(loop: Loop) -> None:
    list(loop.steps())
    loop.begin_save()


def test_a_resumed_run_has_the_scale_and_its_clean_steps_and_reports_it(tmp_path: Path) -> None:
    reports: list[StepReport] = []
    through, first, second = start_loop(3, reports), start_loop(2, []), start_loop(3, [])
    for loop in (through, first):
        loop.run.loss_scale.restore(2.0**10, GROWTH_STEPS - 2)
    train(through)
    train(first)
    state = first.state.to_json()
    save_checkpoint(tmp_path, 2, list(saved_entries(first.run)), state, first.run.mesh.axis("world"), keep=1)
    second.state = restore(second.run, tmp_path)
    train(second)
    assert [each.loss_scale for each in reports] == [2.0**10, 2.0**10, 2.0**11]
    assert state["loss_scale"] == 2.0**11
    assert second.state == through.state
    for buffer, other in zip(through.run.buffers, second.run.buffers, strict=True):
        assert torch.equal(buffer.master, other.master)
