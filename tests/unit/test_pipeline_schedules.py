"""Every schedule can be run, has the bubble and the memory that its paper states, and is lowered to messages that match."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import ScheduleError
from framework.parallel.pipeline.draw import Panel, draw_grid, save_picture
from framework.parallel.pipeline.lower import RECEIVES, SENDS, lower
from framework.parallel.pipeline.pipeline import balance_ranks, split_by_cost
from framework.parallel.pipeline.schedules import SCHEDULES, make_schedule, read_table, write_table
from framework.parallel.pipeline.simulate import (
    COMPUTE,
    Action,
    ActionKind,
    Costs,
    Schedule,
    Timeline,
    needs,
    peak_live,
    simulate,
    unit_costs,
    validate,
)

STAGES, MICROBATCHES = 16, 64
VIRTUAL = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3, 4), "zb_h1": (1,), "zbv": (2,), "dualpipe_v": (2,)}


def least_microbatches(name: str, ranks: int) -> int:
    return 2 * ranks if name == "dualpipe_v" else 1


def idle(name: str, ranks: int, count: int, virtual: int) -> int | None:
    """Units of time in which a rank is idle, of F = I = W = 1; None where the paper says nothing."""
    match name:
        case "gpipe" | "1f1b":
            return 3 * (ranks - 1)
        case "interleaved":
            # Of a stage, which is 1/V of a rank's layers. The paper has M a multiple of P.
            return 3 * (ranks - 1) if count % ranks == 0 else None
        case "zb_h1":
            # (P - 1)(F + I - W). With fewer microbatches than ranks, one goes there and back, which nothing can fill.
            return ranks - 1 + max(ranks - count, 0)
        case "zbv":
            # None on the rank's own time; P - 1 from the first rank's start to the last one's end. The paper has M >= 2P.
            return ranks - 1 if count >= 2 * ranks - 1 else None
        case _:
            # One action after another. The published formula is of pairs: `test_dualpipe_v_in_pairs_...`.
            return ranks - 1


def peak(name: str, ranks: int, count: int, virtual: int) -> int | None:
    """Most live (stage, microbatch) pairs of any rank."""
    match name:
        case "gpipe":
            return count
        case "1f1b" | "zb_h1":
            return min(ranks, count)
        case "interleaved":
            ahead = (virtual - 1) * ranks + 2 * (ranks - 1)
            return min(ahead + 1, virtual * count) if count % ranks == 0 else None
        case "zbv":
            return 2 * min(ranks, count)
        case _:
            return 2 * ranks + 1


def all_schedules(name: str) -> Iterator[tuple[int, int, int]]:
    for virtual in VIRTUAL[name]:
        for ranks in range(1, STAGES // virtual + 1):
            for count in range(least_microbatches(name, ranks), MICROBATCHES + 1):
                yield ranks, count, virtual


def few_schedules(name: str) -> Iterator[tuple[int, int, int]]:
    """Small ones, and larger ones in which microbatches fill the ranks once, twice, and just not; and the largest."""
    for ranks, count, virtual in all_schedules(name):
        is_small = ranks <= 4 and count <= 10
        is_at_border = ranks in (5, 8) and min(abs(count - ranks), abs(count - 2 * ranks)) <= 1
        if is_small or is_at_border or (ranks == STAGES // virtual and count == MICROBATCHES):
            yield ranks, count, virtual


@pytest.mark.parametrize(
    "schedules", [few_schedules, pytest.param(all_schedules, marks=pytest.mark.grid)], ids=["few", "all"]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_sound_with_its_papers_bubble_and_memory(
    name: str, schedules: Callable[[str], Iterator[tuple[int, int, int]]]
) -> None:
    for ranks, count, virtual in schedules(name):
        schedule = make_schedule(name, ranks, count, virtual)
        where = (name, ranks, count, virtual)
        timeline = validate(schedule)
        standing, live = idle(*where), peak(*where)
        if standing is not None:
            assert timeline.length == 3 * count * virtual + standing, where
        if live is not None:
            assert max(peak_live(schedule)) == live, where


def test_bubble_is_the_papers_fraction() -> None:
    for ranks, count in ((2, 2), (4, 8), (4, 7), (8, 64), (16, 1)):
        expected = Fraction(ranks - 1, count + ranks - 1)
        for name in ("gpipe", "1f1b"):
            timeline = simulate(make_schedule(name, ranks, count), unit_costs(ranks))
            assert timeline.bubble == pytest.approx(float(expected), abs=1e-12)
    for ranks, count, virtual in ((2, 4, 2), (4, 8, 3), (4, 16, 4)):
        timeline = simulate(make_schedule("interleaved", ranks, count, virtual), unit_costs(ranks * virtual))
        # The bubble over the computation is 1/V of 1F1B's, (P - 1)/M.
        expected = Fraction(ranks - 1, virtual * count)
        assert timeline.bubble / (1 - timeline.bubble) == pytest.approx(float(expected), abs=1e-12)


def test_zbv_ranks_are_never_idle_between_their_first_and_last_action() -> None:
    for ranks in range(1, 9):
        for count in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1, 64):
            timeline = simulate(make_schedule("zbv", ranks, count, 2), unit_costs(2 * ranks))
            own = sum(rank[-1].end - rank[0].start for rank in timeline.ranks)
            busy = sum(each.end - each.start for rank in timeline.ranks for each in rank)
            assert busy == pytest.approx(own, rel=1e-12), (ranks, count)


def pair(actions: Sequence[Action]) -> list[tuple[Action, ...]]:
    """Neighbours F and B of a rank's two stages as one: DualPipe's F&B, whose computation hides its messages."""
    blocks: list[tuple[Action, ...]] = []
    for action in actions:
        before = blocks[-1] if blocks else ()
        is_pair = len(before) == 1 and (before[0].kind, action.kind) == (ActionKind.FORWARD, ActionKind.BACKWARD)
        if is_pair and before[0].stage != action.stage:
            blocks[-1] = (*before, action)
        else:
            blocks.append((action,))
    return blocks


def standing_in_pairs(schedule: Schedule, time_of_pair: float) -> float:
    """The longest that a rank is idle where both of a pair begin together and end together; F = I = W = 1."""
    blocks = [pair(actions) for actions in schedule.actions]
    places = {
        action: (rank, at) for rank, line in enumerate(blocks) for at, block in enumerate(line) for action in block
    }
    ends: list[list[float]] = [[] for _ in blocks]
    busy = [0.0] * len(blocks)
    while any(len(ended) < len(line) for ended, line in zip(ends, blocks, strict=True)):
        for rank, (ended, line) in enumerate(zip(ends, blocks, strict=True)):
            block = line[len(ended)] if len(ended) < len(line) else ()
            needed = [places[each] for each in (needs(schedule, action) for action in block) if each is not None]
            if not block or any(at >= len(ends[owner]) for owner, at in needed):
                continue
            time = time_of_pair if len(block) == 2 else 1.0 + (block[0].kind is ActionKind.BACKWARD)
            ended.append(max([ended[-1] if ended else 0.0, *(ends[owner][at] for owner, at in needed)]) + time)
            busy[rank] += time
    return max(ended[-1] for ended in ends) - min(busy)


@pytest.mark.parametrize("time_of_pair", [2.0, 2.5, 3.0])
def test_dualpipe_v_in_pairs_has_the_published_bubble(time_of_pair: float) -> None:
    """(PP/2 - 1)(F&B + B - 3W) on PP/2 ranks with PP stages, whatever the overlap within a pair makes of F&B."""
    for ranks in range(1, 9):
        for count in (2 * ranks, 2 * ranks + 1, 4 * ranks + 3):
            standing = standing_in_pairs(make_schedule("dualpipe_v", ranks, count, 2), time_of_pair)
            assert standing == (ranks - 1) * (time_of_pair + 2 - 3), (ranks, count)


def test_live_microbatches_of_1f1b_fall_from_rank_to_rank() -> None:
    assert peak_live(make_schedule("1f1b", 4, 8)) == [4, 3, 2, 1]
    assert peak_live(make_schedule("gpipe", 4, 8)) == [8, 8, 8, 8]
    assert peak_live(make_schedule("zb_h1", 4, 8)) == [4, 4, 4, 4]


def test_one_rank_accumulates_gradients() -> None:
    assert " ".join(map(str, make_schedule("1f1b", 1, 3).actions[0])) == "0F0 0B0 0F1 0B1 0F2 0B2"


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stages_backwards_are_in_order_of_microbatches(name: str) -> None:
    """So all schedules sum gradients in one order."""
    for virtual in VIRTUAL[name]:
        schedule = make_schedule(name, 4, 11, virtual)
        for actions in schedule.actions:
            for stage in range(schedule.num_stages):
                for kinds in (
                    (ActionKind.FORWARD,),
                    (ActionKind.BACKWARD, ActionKind.INPUT),
                    (ActionKind.BACKWARD, ActionKind.WEIGHT),
                ):
                    found = [each.microbatch for each in actions if each.stage == stage and each.kind in kinds]
                    assert found == sorted(found)


@st.composite
def drawn_schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks, virtual = draw(st.integers(1, 16)), draw(st.sampled_from(VIRTUAL[name]))
    count = draw(st.integers(least_microbatches(name, ranks), 64))
    return make_schedule(name, ranks, count, virtual)


# A frozen stage's backward takes no time; what is measured may also be too short to move a clock on.
TIMES = (0, 0, 1e-20, 1e-9, 1, 2, 5)


@given(drawn_schedules(), st.randoms(use_true_random=False), st.integers(0, 4))
def test_lowered_lists_keep_the_computation_and_match_their_messages(
    schedule: Schedule, rng: Random, message: int
) -> None:
    costs = Costs(*([rng.choice(TIMES) for _ in range(schedule.num_stages)] for _ in range(3)), message)
    assert_lists_fit(schedule, costs)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_stages_whose_backward_takes_no_time_receive_before_they_send(name: str) -> None:
    for frozen in range(1, 4 * VIRTUAL[name][0] + 1):
        schedule = make_schedule(name, 4, 8, VIRTUAL[name][0])
        backward = [float(stage >= frozen) for stage in range(schedule.num_stages)]
        assert_lists_fit(schedule, Costs((1.0,) * schedule.num_stages, backward, backward))


def assert_lists_fit(schedule: Schedule, costs: Costs) -> None:
    """Each rank's list has its computation, with each send behind what it sends and each receive before its use, and ranks have
    the messages between them in one order, which ends even if messages block."""
    whole = lower(schedule, costs, "microbatch", "microbatch")
    lowered = whole.ranks
    for each in whole.messages.values():
        there, here = lowered[each.source], lowered[each.target]
        assert there.index(schedule.actions[each.source][each.after]) < there.index(each.send)
        assert here.index(each.receive) < here.index(schedule.actions[each.target][each.before])
    links: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(lowered):
        assert tuple(each for each in actions if each.kind in COMPUTE) == schedule.actions[rank]
        for each in actions:
            if each.kind in SENDS:
                to = each.stage + (1 if each.kind is ActionKind.SEND_ACTIVATION else -1)
                links.setdefault((rank, schedule.rank_of_stage[to]), []).append(each)
    for rank, actions in enumerate(lowered):
        received: dict[int, list[Action]] = {}
        for each in actions:
            if each.kind in RECEIVES:
                is_activation = each.kind is ActionKind.RECEIVE_ACTIVATION
                sent = Action(each.stage + (-1 if is_activation else 1), SENDS[not is_activation], each.microbatch)
                received.setdefault(schedule.rank_of_stage[sent.stage], []).append(sent)
        for source, messages in received.items():
            assert links.pop((source, rank)) == messages
    assert not links
    assert_ends_even_if_messages_block(lowered, schedule)


def assert_ends_even_if_messages_block(lowered: Sequence[Sequence[Action]], schedule: Schedule) -> None:
    """Every message waits until both its sides have come to it: the strictest that a network could be."""
    positions = [0] * len(lowered)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lowered):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                if action.kind in SENDS:
                    is_activation = action.kind is ActionKind.SEND_ACTIVATION
                    to = action.stage + (1 if is_activation else -1)
                    peer, counterpart = (
                        schedule.rank_of_stage[to],
                        Action(to, RECEIVES[not is_activation], action.microbatch),
                    )
                    if positions[peer] == len(lowered[peer]) or lowered[peer][positions[peer]] != counterpart:
                        break
                    positions[peer] += 1
                elif action.kind in RECEIVES:
                    break
                positions[rank] += 1
                moved = True
    assert all(position == len(actions) for position, actions in zip(positions, lowered, strict=True))


def test_lifetimes_are_in_their_places() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    once = lower(schedule, unit_costs(2), "step", "step").ranks
    assert " ".join(map(str, once[1])) == "1RECV_F0 1UNSHARD0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1WAIT_REDUCE1"
    each = Counter(action.kind for action in lower(schedule, unit_costs(2), "microbatch", "microbatch").ranks[0])
    assert each[ActionKind.UNSHARD] == each[ActionKind.RESHARD] == 3  # F0, F1 B0, B1
    assert each[ActionKind.WAIT_REDUCE] == 2


class TestBadSchedules:
    def test_a_missing_a_double_and_a_misplaced_action_are_named(self) -> None:
        sound = make_schedule("1f1b", 2, 2)
        actions = [list(rank) for rank in sound.actions]
        actions[0][-1] = Action(0, ActionKind.FORWARD, 0)
        actions[1].append(Action(0, ActionKind.BACKWARD, 1))
        with pytest.raises(ScheduleError) as found:
            validate(Schedule("mine", 2, sound.rank_of_stage, tuple(map(tuple, actions))))
        assert "0F0 is there twice" in str(found.value)
        assert "rank 1 has 0B1, but stage 0 is on another rank" in str(found.value)

    def test_a_half_backward_is_no_backward(self) -> None:
        with pytest.raises(ScheduleError, match="stage 0 has F I of microbatch 0, not F B or F I W"):
            validate(Schedule("mine", 1, (0,), ((Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.INPUT, 0)),)))

    def test_a_deadlock_is_reported_with_its_circle_and_the_grid(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.csv"
        path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
        with pytest.raises(ScheduleError) as found:
            read_table(path, 2, 2)
        assert "rank 0 waits before 0B0 for 1B0 of rank 1; rank 1 waits before 1F1 for 0F1 of rank 0" in str(
            found.value
        )
        assert "rank 0: 0F0 >>> 0B0 0F1 0B1" in str(found.value)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("0F0,0B0\n", "has 1 lines with actions; parallel.pp=2 needs one for each rank"),
            ("0F0,0B0\n1F0,1X0\n", "line 2: '1X0' is no action"),
            ("0F0,0B0\n2F0,2B0\n", "nothing of stage 1"),
            ("0F0,0B0\n99999999999F0,2B0\n", "nothing of stage 1"),
            ("0F0,0B0\n1F0,1B0,2F0,2B0\n", "3 stages for 2 ranks"),
            ("0F0,0B0\n1F0,1B0\n", "stage 0 has nothing of microbatch 1"),
        ],
    )
    def test_a_bad_table_is_refused_with_its_reason(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "mine.csv"
        path.write_text(text)
        with pytest.raises(ScheduleError, match=message):
            read_table(path, 2, 2)

    def test_a_picture_is_no_table_and_a_spreadsheet_may_mark_its_encoding(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.csv"
        path.write_bytes(b"\x89PNG\r\n\x1a\n\xff")
        with pytest.raises(ScheduleError, match=r"pipeline.table=.*mine.csv cannot be read: .*can't decode"):
            read_table(path, 2, 1)
        path.write_text("\ufeff0F0,0B0\n1F0,1B0\n", encoding="utf-8")
        assert read_table(path, 2, 1).num_stages == 2

    def test_stages_and_microbatches_that_a_schedule_does_not_have_are_refused(self) -> None:
        for name, virtual in (
            ("gpipe", 2),
            ("1f1b", 2),
            ("zb_h1", 3),
            ("interleaved", 1),
            ("zbv", 1),
            ("dualpipe_v", 3),
        ):
            with pytest.raises(ScheduleError, match=rf"{name} has .* stages on each rank, not {virtual}"):
                make_schedule(name, 2, 8, virtual)
        with pytest.raises(ScheduleError, match="needs 8 microbatches or more, and there are 7"):
            make_schedule("dualpipe_v", 4, 7, 2)


@given(drawn_schedules())
def test_a_table_holds_the_whole_schedule(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule) -> None:
    path = tmp_path_factory.mktemp("tables") / "table.csv"
    write_table(path, schedule)
    found = read_table(path, schedule.num_ranks, schedule.num_microbatches)
    assert (found.actions, found.rank_of_stage) == (schedule.actions, schedule.rank_of_stage)


def test_grid_shows_every_rank_on_one_scale() -> None:
    assert draw_grid(make_schedule("1f1b", 2, 2)).splitlines() == [
        "rank 0  F0 F1 ......B0    ...B1    ",
        "rank 1  ...F0 B0    F1 B1    ......",
    ]
    assert all(len(line) <= 80 for line in draw_grid(make_schedule("zbv", 4, 30, 2), width=80).splitlines())


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_pictures_of_timelines_are_written(tmp_path: Path, ending: str) -> None:
    schedule = make_schedule("zbv", 2, 4, 2)
    path = tmp_path / f"schedule.{ending}"
    panels = [
        Panel("simulated", simulate(schedule, unit_costs(4)), "FLOPs"),
        Panel("none", Timeline(((), ())), "seconds"),
    ]
    save_picture(path, "llama, 4 layers; pp=2, zero 0", panels, 2)
    assert path.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")
    if ending == "svg":  # matplotlib notes each text beside its outlines
        drawn = path.read_text()
        assert all(
            f"<!-- {text} -->" in drawn for text in ("llama, 4 layers; pp=2, zero 0", "FLOPs", "seconds", "rank 1")
        )


class TestCut:
    @given(
        st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 20), st.integers(0, 20), st.integers(1, 5)
    )
    def test_no_other_cut_has_a_faster_slowest_stage(
        self, layers: list[int], first: int, last: int, stages: int
    ) -> None:
        stages = min(stages, len(layers))

        def slowest(cut: list[int]) -> float:
            ends = [sum(cut[: stage + 1]) for stage in range(stages)]
            sums = [sum(layers[end - size : end]) for end, size in zip(ends, cut, strict=True)]
            sums[0] += first
            sums[-1] += last
            return max(sums)

        def cuts(total: int, parts: int) -> Iterator[list[int]]:
            if parts == 1:
                yield [total]
                return
            for size in range(1, total - parts + 2):
                yield from ([size, *rest] for rest in cuts(total - size, parts - 1))

        found = split_by_cost(layers, first, last, stages)
        assert sum(found) == len(layers)
        assert slowest(found) == min(slowest(cut) for cut in cuts(len(layers), stages))

    def test_a_heavy_head_leaves_the_last_stage_fewer_layers(self) -> None:
        assert split_by_cost([1.0] * 12, 0.0, 2.0, 4) == [3, 3, 4, 2]

    @given(st.lists(st.integers(1, 9), min_size=4, max_size=12), st.integers(0, 20), st.integers(0, 20))
    def test_balancing_never_makes_the_slowest_rank_slower(self, layers: list[int], first: int, last: int) -> None:
        ranks = (0, 1, 1, 0)

        def slowest(cut: list[int]) -> int:
            ends = [sum(cut[: stage + 1]) for stage in range(4)]
            sums = [sum(layers[end - size : end]) for end, size in zip(ends, cut, strict=True)]
            return max(sums[0] + first + sums[3] + last, sums[1] + sums[2])

        by_stage = split_by_cost(layers, first, last, 4)
        found = balance_ranks(by_stage, layers, first, last, ranks)
        assert sum(found) == len(layers)
        assert min(found) >= 1
        assert slowest(found) <= slowest(by_stage)

    def test_a_rank_with_both_ends_gets_fewer_layers(self) -> None:
        """Embedding and head are on the first rank of a V."""
        cut = balance_ranks(split_by_cost([1.0] * 16, 0.0, 4.0, 8), [1.0] * 16, 0.0, 4.0, (0, 1, 2, 3, 3, 2, 1, 0))
        assert cut[0] + cut[7] == 2
        assert max(cut[rank] + cut[7 - rank] for rank in range(1, 4)) == 5
