"""Microbatches of validation go into bubbles, take no time there, and change nothing of what was there before."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import ScheduleError
from framework.parallel.pipeline import simulate as filling
from framework.parallel.pipeline.lower import RECEIVES, SENDS, lower
from framework.parallel.pipeline.pipeline import forward_only
from framework.parallel.pipeline.schedules import SCHEDULES, make_schedule
from framework.parallel.pipeline.simulate import (
    Action,
    ActionKind,
    Costs,
    Schedule,
    Timed,
    fill_bubbles,
    peak_live,
    simulate,
    unit_costs,
    validate,
)
from tests.unit.test_pipeline_schedules import assert_ends_even_if_messages_block, drawn_schedules

LEAST_ROUNDING = 1 + 1e-9


def without(schedule: Schedule, kind: ActionKind) -> list[tuple[Action, ...]]:
    return [tuple(each for each in rank if each.kind is not kind) for rank in schedule.actions]


@given(drawn_schedules(), st.data())
def test_filled_schedules_are_sound_and_take_no_longer(schedule: Schedule, data: st.DataObject) -> None:
    stages = schedule.num_stages
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    backwards = [each * data.draw(st.sampled_from((1.0, 1.7))) for each in sizes]
    costs = Costs(sizes, backwards, sizes, data.draw(st.sampled_from((0.0, 0.5))))
    filled = fill_bubbles(schedule, costs)
    validate(filled)
    assert without(filled, ActionKind.VALIDATION) == list(schedule.actions)
    assert simulate(filled, costs).length <= simulate(schedule, costs).length * LEAST_ROUNDING
    assert peak_live(filled) == peak_live(schedule)
    fewer = fill_bubbles(schedule, costs, min(filled.num_validation, 1))
    assert fewer.num_validation == min(filled.num_validation, 1)
    lowered = lower(filled, costs, "microbatch", "microbatch").ranks
    assert_ends_even_if_messages_block(lowered, filled)
    for stage in range(1, stages):
        moved = filled.rank_of_stage[stage] != filled.rank_of_stage[stage - 1]
        for microbatch in range(schedule.num_microbatches, schedule.num_microbatches + filled.num_validation):
            ends = Action(stage - 1, SENDS[0], microbatch), Action(stage, RECEIVES[0], microbatch)
            assert [sum(end in rank for rank in lowered) for end in ends] == [moved, moved]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_gpipes_bubbles_hold_two_for_each_rank_but_one(ranks: int) -> None:
    """While the last rank begins its backwards the first ones wait, and while the first ends them the last ones do."""
    for count in (1, 2, 7, 32):
        filled = fill_bubbles(make_schedule("gpipe", ranks, count), unit_costs(ranks))
        assert filled.num_validation == 2 * (ranks - 1)
        timeline = simulate(filled, unit_costs(ranks))
        assert timeline.length == 3 * (count + ranks - 1)


def test_the_bubbles_of_1f1b_hold_some_and_those_of_equal_split_backwards_none() -> None:
    rooms = {
        name: fill_bubbles(schedule, unit_costs(schedule.num_stages)).num_validation
        for name, made in SCHEDULES.items()
        for schedule in [make_schedule(name, 4, 8, made.virtual_stages or 2)]
    }
    assert rooms == {"gpipe": 6, "1f1b": 4, "interleaved": 0, "zb_h1": 0, "zbv": 0, "dualpipe_v": 0}


def test_what_comes_before_a_backward_of_its_stage_does_not_keep_parameters() -> None:
    """Between a forward and its backward a V gives the stage's parameters back, so both gather them."""
    actions = tuple(
        Action(0, kind, at)
        for kind, at in ((ActionKind.FORWARD, 0), (ActionKind.VALIDATION, 1), (ActionKind.BACKWARD, 0))
    )
    lowered = lower(Schedule("mine", 1, (0,), (actions,), 1), unit_costs(1), "microbatch", "step").ranks[0]
    assert [each.kind.value for each in lowered if each.kind in (ActionKind.UNSHARD, ActionKind.RESHARD)] == [
        "UNSHARD", "RESHARD", "UNSHARD", "RESHARD", "UNSHARD", "RESHARD",
    ]  # fmt: skip


def test_a_missing_and_a_misnumbered_validation_are_named() -> None:
    sound = fill_bubbles(make_schedule("gpipe", 2, 2), unit_costs(2))
    with pytest.raises(ScheduleError, match="stage 0 has nothing of validation microbatch 4"):
        validate(Schedule("mine", 2, sound.rank_of_stage, sound.actions, 3))
    with pytest.raises(ScheduleError, match=r"0V2, but there are .* microbatches 2 to 1"):
        validate(Schedule("mine", 2, sound.rank_of_stage, sound.actions))
    validate(forward_only((0, 1, 1, 0), 5))


def test_a_gap_that_is_none_makes_the_step_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: ranks are taken to be idle all the time."""

    def find_gaps(rank: Sequence[Timed], end: float) -> filling.Gaps:
        return ((0.0, end),)

    schedule, costs = make_schedule("1f1b", 4, 8), unit_costs(4)
    monkeypatch.setattr(filling, "_find_gaps", find_gaps)
    assert simulate(fill_bubbles(schedule, costs), costs).length > simulate(schedule, costs).length
