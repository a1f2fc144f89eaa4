"""Who is behind when a run hangs: whoever all others wait for, at the end of whatever chain, and never one that waits."""

from dataclasses import replace

import pytest

from framework.monitor import hang
from framework.monitor.hang import (
    SAVES,
    TRAINING,
    Alarm,
    Answer,
    Culprits,
    RankStatus,
    ThreadStatus,
    Wait,
    find_culprits,
    write_report,
)
from framework.monitor.progress import Phase


def line_of(rank, phase=Phase.STEP, step=41, seconds=125.0, saves_s=None):
    return RankStatus(rank, f"n{rank}", 100 + rank, f"pp0 dp{rank} cp0 tp0", phase, step, seconds, "", saves_s)


def alarm_of(rank=0, phase=Phase.STEP, lane=TRAINING):
    return Alarm(rank, lane, phase, 41, 125.0, 120.0, "launch.step_deadline_s")


def waits(rank, ranks, *, number=7, axis="world", name="all_reduce", phase=Phase.STEP, message=False):
    wait = Wait(axis, name, "gradient of layers.3", number, tuple(ranks), message)
    return Answer(line_of(rank, phase), {TRAINING: ThreadStatus(wait, {f"{axis} {name}": number}, ("a.py:1 in wait",))})


def busy(rank, number=6, axis="world", phase=Phase.STEP, step=41):
    lane = ThreadStatus(None, {f"{axis} all_reduce": number}, ("model.py:12 in forward", "step.py:3 in train_step"))
    return Answer(line_of(rank, phase, step), {TRAINING: lane})


WORLD = (0, 1, 2, 3)


def test_a_rank_that_does_not_answer_is_behind():
    answers = {rank: waits(rank, WORLD) for rank in (0, 2, 3)} | {1: None}
    assert find_culprits(answers, alarm_of()) == Culprits(silent=(1,))
    report = write_report(alarm_of(), answers, {1: line_of(1, seconds=3.0)})
    assert report.startswith("step 41 hangs: rank 1 [pp0 dp1 cp0 tp0] on n1, pid 101, does not answer\n")
    assert "Last seen in step 41, for 3 s" in report
    assert "ranks 0, 2-3 wait in all_reduce of gradient of layers.3 over world" in report
    assert "launch.step_deadline_s" in report


def check_rank_that_computes():
    answers = {rank: waits(rank, WORLD) for rank in (0, 2, 3)} | {1: busy(1)}
    report = write_report(alarm_of(), answers, {})
    assert report.startswith("step 41 hangs: rank 1 [pp0 dp1 cp0 tp0] on n1, pid 101, is behind\n")
    assert "is in step 41 for 125 s, waits for no other rank. It is at\n  model.py:12 in forward" in report
    return report


def test_a_rank_that_computes_is_behind_and_its_stack_is_said():
    assert "a.py" not in check_rank_that_computes(), "the stack of a rank that waits says nothing"


def test_sabotaged_a_judge_that_does_not_see_who_waits_blames_the_wrong_rank(monkeypatch):
    monkeypatch.setattr(hang, "_edges", lambda *_: iter(()))
    monkeypatch.setattr(hang, "_wait_of", lambda *_: None)
    with pytest.raises(AssertionError):
        check_rank_that_computes()


@pytest.mark.parametrize("rank", [0, 1])
def test_whoever_sounds_the_alarm_the_same_rank_is_behind(rank):
    answers = {0: waits(0, (0, 1)), 1: busy(1, phase=Phase.DATA)}
    assert find_culprits(answers, alarm_of(rank)).ranks == (1,)


def test_two_ranks_that_hang_are_both_named():
    answers = {0: waits(0, WORLD), 1: None, 2: busy(2), 3: waits(3, WORLD)}
    assert find_culprits(answers, alarm_of()) == Culprits(silent=(1,), busy=((2, TRAINING),))
    assert "ranks 1 do not answer, ranks 2 are behind" in write_report(alarm_of(), answers, {})


def test_a_chain_of_waits_is_followed_to_its_end():
    """A pipeline: rank 0 waits for a message of 1, which waits with its tensor-parallel peer 2, who waits for 3."""
    answers = {
        0: waits(0, (1,), name="receive", number=0, message=True),
        1: waits(1, (1, 2), axis="tp"),
        2: waits(2, (3,), name="receive", number=0, message=True),
        3: busy(3),
    }
    assert find_culprits(answers, alarm_of()).ranks == (3,)


def test_a_rank_that_has_come_and_works_on_is_not_waited_for():
    """Ranks 0 and 2 are in the call of rank 1, which has gone on to the next one: rank 3 is missing."""
    answers = {rank: waits(rank, WORLD, number=7) for rank in (0, 2)}
    answers |= {1: waits(1, WORLD, number=8), 3: busy(3, number=6)}
    assert find_culprits(answers, alarm_of()).ranks == (3,)


def test_ranks_that_took_different_paths_wait_in_a_circle():
    answers = {0: waits(0, (0, 1), axis="tp"), 1: waits(1, (0, 1), axis="dp")}
    assert find_culprits(answers, alarm_of()) == Culprits()
    assert "they have taken different paths" in write_report(alarm_of(), answers, {})


def test_a_collective_that_all_have_come_to_is_the_networks_fault():
    answers = {rank: waits(rank, WORLD) for rank in WORLD}
    assert find_culprits(answers, alarm_of()).busy == ()
    assert "all ranks have come to all_reduce of gradient of layers.3 over world" in write_report(
        alarm_of(), answers, {}
    )


def test_a_rank_that_never_came_to_connect_is_named():
    connects = {rank: waits(rank, WORLD, name="connect", number=1, phase=Phase.CONNECT) for rank in (0, 1, 3)}
    assert find_culprits(connects | {2: None}, alarm_of(phase=Phase.CONNECT)).silent == (2,)
    assert "rank 2 does not answer and has not said a word" in write_report(alarm_of(), connects | {2: None}, {2: None})
    plans = Answer(line_of(2, Phase.LIBRARIES, None), {TRAINING: ThreadStatus(None, {})})
    assert find_culprits(connects | {2: plans}, alarm_of(phase=Phase.CONNECT)).ranks == (2,)


def gpu(rank, wait, started, recent, ahead=None, behind="", size=4):
    """A rank with a GPU, which waits in `wait` = (axis, name, number, label); recent: labels by number of its reduce_scatters."""
    found = wait and Wait(wait[0], wait[1], wait[3], wait[2], WORLD[:size])
    labels = {f"shard reduce_scatter {number}": label for number, label in recent.items()}
    return Answer(
        line_of(rank), {TRAINING: ThreadStatus(found, started, ("step.py:3 in read",), ahead or {}, behind, labels)}
    )


UNITS = {410: "layers.5", 411: "layers.4", 412: "layers.3"}
SCATTERS = ("shard", "reduce_scatter", 412, "layers.3")
HELD = gpu(
    0,
    SCATTERS,
    {"shard reduce_scatter": 413, "world all_reduce": 8},
    UNITS | {413: "layers.2"},
    {"world all_reduce": 1},
)


def test_a_host_that_has_not_started_what_devices_wait_in_is_named_with_the_call():
    answers = {rank: replace(HELD, line=line_of(rank)) for rank in (0, 1, 3)}
    answers[2] = gpu(2, None, {"shard reduce_scatter": 411, "world all_reduce": 7}, UNITS)
    assert find_culprits(answers, alarm_of()) == Culprits(busy=((2, TRAINING),))
    report = write_report(alarm_of(), answers, {})
    told = "rank 2 [pp0 dp2 cp0 tp0] has not started reduce_scatter 412 over shard (layers.3), that ranks 0-1, 3 have started"
    assert told in report.splitlines()


def test_a_device_that_does_not_come_to_what_its_host_has_started_is_named():
    answers = {rank: replace(HELD, line=line_of(rank)) for rank in (0, 1, 3)}
    started = {"shard reduce_scatter": 413, "world all_reduce": 8}
    answers[2] = gpu(
        2, None, started, UNITS, {"shard reduce_scatter": 3, "world all_reduce": 1}, "reduce_scatter of layers.5"
    )
    assert find_culprits(answers, alarm_of()).ranks == (2,)
    report = write_report(alarm_of(), answers, {})
    assert "(layers.3), but its device has not come to it: it is before reduce_scatter of layers.5" in report


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_has_left_out_a_reduction_is_named_though_all_wait_in_a_cycle(size):
    """Its calls pair with those before: the device of rank 1 is in the step's sum, for which the others' hosts have come."""
    lanes = {TRAINING: replace(HELD.lanes[TRAINING], wait=replace(HELD.lanes[TRAINING].wait, ranks=WORLD[:size]))}
    answers = {rank: Answer(line_of(rank), lanes) for rank in range(size) if rank != 1}
    shifted = {410: "layers.4", 411: "layers.3", 412: "layers.9"}
    started, sums = {"shard reduce_scatter": 412, "world all_reduce": 8}, ("world", "all_reduce", 8, "sums")
    answers[1] = gpu(1, sums, started, shifted, size=size)
    assert find_culprits(answers, alarm_of()).departed == ((1, TRAINING),)
    report = write_report(alarm_of(), answers, {})
    assert report.startswith(
        "step 41 hangs: rank 1 [pp0 dp1 cp0 tp0] on n1, pid 101, has left out what others wait in\n"
    )
    assert "has started reduce_scatter 412 over shard (layers.9), and rank" in report
    # Hosts that do not run ahead, such as gloo's, have come to nothing behind their wait: the labels tell then.
    here = gpu(0, SCATTERS, {"shard reduce_scatter": 412, "world all_reduce": 7}, UNITS, size=size)
    answers |= {rank: replace(here, line=line_of(rank)) for rank in range(size) if rank != 1}
    assert find_culprits(answers, alarm_of()).departed == ((1, TRAINING),)


def test_sabotaged_a_judge_that_takes_hosts_for_devices_blames_nobody(monkeypatch):
    monkeypatch.setattr(hang, "_has_come", hang._has_started)
    with pytest.raises(AssertionError):
        test_a_device_that_does_not_come_to_what_its_host_has_started_is_named()


def saves(rank, wait=None, training=None, phase=Phase.SAVE):
    lane = ThreadStatus(wait, {"world broadcast_object": 3 if wait else 2}, ("save.py:9 in write",))
    return Answer(line_of(rank, phase, saves_s=130.0), {TRAINING: ThreadStatus(training, {}), SAVES: lane})


@pytest.mark.parametrize("lane", [TRAINING, SAVES])
def test_the_rank_whose_disk_hangs_in_a_save_is_behind(lane):
    """The others wait for its file; where the next save is due, so does training. Its own training waits for them."""
    told = Wait("world", "broadcast_object", "", 3, (0, 1, 2))
    answers = {0: saves(0, told), 1: saves(1, None, Wait("batch", "all_reduce", "", 9, (0, 1, 2)), Phase.STEP)}
    answers[2] = saves(2, told)
    assert find_culprits(answers, alarm_of(0, Phase.SAVE, lane)).busy == ((1, SAVES),)
    report = write_report(alarm_of(0, Phase.SAVE, lane), answers, {})
    assert "rank 1 [pp0 dp1 cp0 tp0] on n1, pid 101, is in its save behind training for 130 s" in report
    assert "save.py:9" in report


def test_a_save_that_hangs_does_not_blame_a_rank_that_trains():
    told = Wait("world", "broadcast_object", "", 3, (0, 1))
    answers = {0: saves(0, told, phase=Phase.STEP), 1: saves(1, None, phase=Phase.STEP)}
    assert find_culprits(answers, alarm_of(0, Phase.STEP, SAVES)).ranks == (1,)


def test_what_ranks_say_survives_the_board():
    for said in (waits(3, WORLD), busy(1), HELD, saves(0, Wait("world", "broadcast_object", "", 3, (0, 1)))):
        assert Answer.from_json(said.to_json()) == said
        assert RankStatus.from_json(said.line.to_json()) == said.line
    assert Alarm.from_json(alarm_of().to_json()) == alarm_of()


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1], "0-1"), ([5, 0, 1, 2, 9], "0-2, 5, 9"), (range(1024), "0-1023")]
)
def test_ranks_are_folded(ranks, text):
    assert hang.fold_ranks(list(ranks)) == text
