"""Jobs on a real cluster: every run ends where an undisturbed one would, bitwise, or stops as documented."""

import json
import re
import time
from concurrent.futures import Future

import pytest
import torch
import yaml

from framework.faults import read_log
from framework.track.goodput import TimePart, read_account
from framework.track.sample_ledger import find_ledger_problems, read_lineage
from tests.slurm.cluster import SEQUENCES, STEPS, Desk, wait_for, wandb_segments
from tests.slurm.ledger import read_starts
from tests.slurm.scenarios import left_over, run_scenarios

# The scenarios that a test is about, by name; `rotates`: it runs on one day of the week, with others about as long together.
needs = pytest.mark.needs
rotates = pytest.mark.grid


@pytest.fixture(scope="module")
def evidence(desk: Desk, request: pytest.FixtureRequest) -> dict[str, Future]:
    """Of the scenarios that the chosen tests need."""
    marks = [mark for item in request.session.items for mark in item.iter_markers("needs")]
    return run_scenarios(desk, {"local_references", *(name for mark in marks for name in mark.args)})


@pytest.fixture(scope="module")
def reference(evidence):
    """The undisturbed run's losses, by ranks."""
    return evidence["local_references"].result()["losses"]


def assert_equals_undisturbed(desk: Desk, run: str, ranks: int, reference) -> None:
    assert desk.losses(run) == reference[ranks]
    mine, theirs = desk.weights(run), desk.weights(f"local{ranks}")
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


@needs("layouts")
def test_one_two_and_three_nodes_train_as_the_local_launch_does(evidence, reference):
    losses = evidence["layouts"].result()["losses"]
    assert losses == reference
    assert [step for step, _ in losses[3]] == list(range(1, STEPS + 1))


@needs("layouts")
def test_dry_run_shows_to_the_byte_what_is_submitted(evidence):
    found = evidence["layouts"].result()
    assert found["shown"] == found["written"] == found["queued"]
    assert "srun --nodes=2 --ntasks=2" in found["shown"]
    assert not found["dry_run_left_a_folder"]


@rotates(part=0)
@needs("time_limit")
def test_time_limits_leave_the_curve_as_it_was(desk, evidence, reference):
    found = evidence["time_limit"].result()
    assert found["ends"][-1] == 0
    assert len(found["ends"]) >= 3
    assert set(found["ends"][:-1]) == {85}
    assert max(found["delays_s"]) < 20
    assert_equals_undisturbed(desk, "limit", 2, reference)
    assert len({start["job"] for start in desk.starts("limit")}) == 1
    segments = wandb_segments(desk.folder("limit"), "limit")
    assert len(segments) == len(found["ends"])
    assert [step for steps in segments for step in steps] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param("limit", marks=[rotates(part=0), needs("time_limit")]),
        pytest.param("killed", marks=needs("killed_ranks")),
    ],
)
def test_goodput_adds_up_over_requeues_and_kills(desk, evidence, run):
    """From the submission to the last end, by the clock of the script."""
    evidence["time_limit" if run == "limit" else "killed_ranks"].result()
    account, history = read_account(desk.folder(run)), desk.history(run)
    launches = json.loads((desk.folder(run) / "run.json").read_text())["launches"]
    submitted_s = time.mktime(time.strptime(launches[0]["time"][:19], "%Y-%m-%d %H:%M:%S"))
    wall_s = history[-1]["time"] - submitted_s
    assert account.wall_s == pytest.approx(wall_s, rel=0.02, abs=3)  # these clocks have whole seconds
    assert min(account.seconds.values()) >= 0
    assert len(account.rows) == len(desk.starts(run))
    assert (
        account.seconds[TimePart.OFF] < 1
    )  # from the last word to the requeue, whose moment SLURM tells in whole seconds
    if run == "limit":
        assert account.seconds[TimePart.QUEUE] > 2  # SLURM has each requeue wait
        assert account.seconds[TimePart.RECOVERY] == account.seconds[TimePart.LOST] == 0
    else:
        assert account.seconds[TimePart.RECOVERY] > 1
        assert account.seconds[TimePart.LOST] > 0


@needs("killed_ranks")
def test_kills_leave_one_curve_in_wandb(desk, evidence):
    evidence["killed_ranks"].result()
    segments = wandb_segments(desk.folder("killed"), "killed")
    assert [step for steps in segments for step in steps] == list(range(1, STEPS + 1))


@rotates(part=1)
@needs("chain")
def test_a_chain_of_three_jobs_is_one_run(desk, evidence, reference):
    found = evidence["chain"].result()
    assert len(found["queued"]) == 3
    assert [state for _, state in found["queued"]].count("PENDING") >= 2
    assert len(set(found["jobs"])) == len(found["jobs"]) == 3
    if desk.ends("chain")[-1] != 0:  # a slow machine: the third was cut as well, and said how to go on
        assert "the chain is at its end: go on with  meshwright submit run.id=chain" in desk.log("chain")
        desk.wait_until_gone(desk.resume("chain", "launch.chain=1", 'launch.time="00:10:00"'))
    assert_equals_undisturbed(desk, "chain", 1, reference)


@needs("killed_ranks")
def test_killed_ranks_are_started_again_in_the_same_job(desk, evidence, reference):
    found = evidence["killed_ranks"].result()
    assert max(found["vanish_s"]) < 30
    assert [start["restart"] for start in found["starts"]] == [0, 0, 0]
    assert [start["from"] for start in found["starts"]] == [0, 20, 60]
    assert found["ends"][-1] == 0
    assert_equals_undisturbed(desk, "killed", 2, reference)


@rotates(part=2)
@needs("hung_rank")
def test_a_stopped_rank_is_named_and_the_run_starts_again(desk, evidence, reference):
    found = evidence["hung_rank"].result()
    assert re.search(
        r"\[rank 0\] step \d+ hangs: rank 1 \[pp0 dp1 cp0 tp0\] on \S+, pid \d+, does not answer", found["log"]
    )
    assert found["vanish_s"] < 5 + 10 + 10  # its deadline, the report, and what SLURM takes to kill a stopped process
    assert [start["from"] for start in found["starts"]] == [0, 20]
    assert found["ends"] == [1, 0]
    assert_equals_undisturbed(desk, "hung", 2, reference)


@rotates(part=5)
@needs("copies")
def test_a_killed_rank_is_started_again_from_what_the_nodes_hold(desk, evidence, reference):
    found = evidence["copies"].result()
    steps = [int(step) for step in re.findall(r"going on from step (\d+), which the memory", found["log"])]
    assert len(steps) == 2
    assert all(low <= step for low, step in zip((25, 65), steps, strict=True)), "copies of the last steps"
    assert found["ends"][-1] == 0
    assert found["starts"][2]["from"] >= steps[0], "what was held is progress"
    assert not found["left"]
    assert_equals_undisturbed(desk, "copies", 2, reference)


@needs("preemption")
def test_a_preempted_run_resumes_at_its_step(desk, evidence, reference):
    found = evidence["preemption"].result()
    assert found["ends"] == [85, 0]
    assert found["vanish_s"] < 30
    assert [start["restart"] for start in found["starts"]] == [0, 1]
    assert found["at"] <= found["starts"][1]["from"] <= found["at"] + 6
    assert_equals_undisturbed(desk, "yields", 1, reference)


@needs("cancelled")
def test_a_cancelled_run_has_saved_and_stays_away(desk, evidence, reference):
    found = evidence["cancelled"].result()
    assert (found["state"], found["starts"], found["ends"]) == ("CANCELLED", 1, [85])
    assert found["vanish_s"] < 30
    assert "which waits or runs" in found["refusal"]
    assert "meshwright submit run.id=cancelled" in found["status"]
    assert 30 <= found["resumed"]["from"] <= 40
    assert_equals_undisturbed(desk, "cancelled", 2, reference)


@needs("node_loss")
def test_a_run_survives_the_loss_of_its_node(desk, evidence, reference):
    found = evidence["node_loss"].result()
    assert found["vanish_s"] < 30
    assert "PENDING" in found["status"]
    assert "saved    step 20" in found["status"]
    assert [(start["restart"], start["from"]) for start in found["starts"]] == [(0, 0), (1, 20)]
    assert_equals_undisturbed(desk, "power", 1, reference)


@rotates(part=2)
@needs("frozen_node")
def test_a_node_that_thaws_writes_nothing_into_a_run_that_goes_on_elsewhere(desk, evidence, reference):
    found = evidence["frozen_node"].result()
    assert found["changed"] == []
    assert "restart 0 was held for dead, and the run was taken over" in found["log"]
    assert [note for note in found["notes"] if note[0] == 0] == [(0, "start", 0)], "of the script that thawed"
    assert found["notes"][1] == (1, "start", 20)
    # The thawed srun ends the step of its number, 0, which is now one of the new start: SLURM tells them not apart.
    assert found["ends"] in ([0], [137, 0])
    assert found["vanish_s"] < 60
    assert_equals_undisturbed(desk, "frozen", 1, reference)


def assert_each_sequence_once(desk: Desk, run: str) -> None:
    """Each step trains on its own sequences, all of them and none twice, and a step that is taken again on those it had."""
    starts = desk.starts(run)
    ledger = read_starts(desk.folder(run), [start["time"] for start in starts])
    last: dict[int, dict[int, str]] = {}
    for start, steps in zip(starts, ledger, strict=True):
        assert min(steps) == start["from"] * SEQUENCES
        for cursor, sequences in steps.items():
            # A start that is killed may have begun its last step on some of its ranks only.
            before = last.get(cursor, {})
            assert all(before.get(number, digest) == digest for number, digest in sequences.items())
            last[cursor] = sequences
    assert sorted(last) == list(range(0, STEPS * SEQUENCES, SEQUENCES))
    assert [number for cursor in sorted(last) for number in sorted(last[cursor])] == list(range(STEPS * SEQUENCES))


@rotates(part=3)
@needs("spare_node")
def test_a_spare_node_takes_the_place_of_a_lost_one_in_the_same_job(desk, evidence, reference):
    found = evidence["spare_node"].result()
    assert (found["state"], found["ends"][-1]) == ("COMPLETED", 0)
    assert [(start["restart"], start["nodes"]) for start in found["starts"]] == [(0, "n[6-7]"), (0, "n[6,8]")]
    assert found["starts"][1]["from"] == 20
    assert_equals_undisturbed(desk, "spare", 2, reference)
    assert_each_sequence_once(desk, "spare")


@rotates(part=4)
@needs("fewer_nodes")
def test_a_run_goes_on_with_fewer_nodes_and_later_with_more(desk, evidence, reference):
    found = evidence["fewer_nodes"].result()
    assert [(start["job"], start["nodes"]) for start in found["starts"]] == [
        (found["jobs"][0], "n[9-10]"),
        (found["jobs"][0], "n9"),
        (found["jobs"][1], "n[9-10]"),
    ]
    assert [start["restart"] for start in found["starts"]] == [0, 0, 0]
    assert found["starts"][1]["from"] == 20
    assert found["ends"][-1] == 0
    losses = dict(desk.losses("fewer"))
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(dict(reference[2]), rel=1e-5)
    assert [losses[step] for step in range(1, 21)] == [loss for _, loss in reference[2][:20]]
    assert_each_sequence_once(desk, "fewer")


@rotates(part=5)
@needs("first_node_lost")
def test_a_job_that_keeps_its_nodes_is_requeued_where_its_first_is_lost(desk, evidence, reference):
    """SLURM leaves such a job to itself: without the guard it would hold its other nodes until the time limit."""
    found = evidence["first_node_lost"].result()
    assert [(start["restart"], start["nodes"]) for start in found["starts"]] == [(0, "n[11-12]"), (1, "n12")]
    assert "the node of this script is lost: n11; requeued" in found["log"]
    assert dict(desk.losses("headless")) == pytest.approx(dict(reference[2]), rel=1e-5)


@rotates(part=4)
@needs("crash_for_ever")
def test_a_crash_that_returns_is_stopped_and_its_evidence_kept(desk, evidence):
    found = evidence["crash_for_ever"].result()
    assert [start["from"] for start in found["starts"]] == [0, 5, 5]
    assert found["state"] == "FAILED"
    assert "stopped: 2 starts from step 5, none with a newer checkpoint" in found["status"]
    assert [step for step, _ in desk.losses("crashes")][:7] == list(range(1, 8))
    assert (desk.folder("crashes") / "checkpoints" / "step-00000005").is_dir()


@rotates(part=5)
@needs("all_damaged")
def test_a_run_whose_checkpoints_are_all_damaged_stops_and_does_not_start_over(evidence):
    found = evidence["all_damaged"].result()
    assert len(found["files"]) >= 2
    assert found["ends"] == [85, 86]
    assert (found["state"], found["exit"], found["restarts"]) == ("FAILED", "86:0", "1")
    log = found["log"]
    assert f"all {len(found['files'])} checkpoints in" in log
    assert "never starts over by itself" in log
    for file in found["files"]:
        assert f"{file.parent.name}: {file} has" in log
    assert "86, a mistake in the input: not started again" in log
    assert found["after"] == found["before"]
    assert found["curve_after"] == found["curve"]
    assert "are damaged, and a run that has saved never starts over" in found["status"]
    assert found["again"].code == 86
    assert "never starts over by itself" in found["again"].err


@rotates(part=4)
@needs("unreadable")
def test_a_checkpoint_that_cannot_be_read_for_a_while_is_not_condemned(desk, evidence, reference):
    found = evidence["unreadable"].result()
    assert "EIO, Input/output error" in found["log"]
    first, *failed, last = found["ends"]
    assert (first, last) == (137, 0)
    assert set(failed) == {1}
    assert [start["from"] for start in found["starts"]] == [0] + [20] * (len(found["starts"]) - 1)
    assert not list((desk.folder("unreadable") / "checkpoints").glob("*.bad*"))
    assert_equals_undisturbed(desk, "unreadable", 1, reference)


@needs("users_mistake")
def test_a_users_mistake_is_said_once_and_not_tried_again(evidence):
    found = evidence["users_mistake"].result()
    assert (found["starts"], found["ends"]) == (1, [86])
    assert "86, a mistake in the input: not started again" in found["log"]
    assert found["log"].count("longer than the 8 positions of the model") == 1  # the other rank has one line
    assert found["log"].count("ends as well") == 1


@rotates(part=2)
@needs("bad_node")
def test_a_bad_node_is_left_out(evidence):
    found = evidence["bad_node"].result()
    assert found["ends"] == [87, 87]
    first, second = (start["nodes"] for start in found["starts"])
    assert first != second
    assert found["excluded"] == f"n[4-13],{first},{second}"  # what the recipe excludes stays out


@rotates(part=1)
@needs("array")
def test_a_sweep_is_an_array_with_a_limit(evidence):
    found = evidence["array"].result()
    assert found["at_once"] == 2
    recipes = [yaml.safe_load(text) for text in found["recipes"]]
    assert [recipe["optim"]["lr"] for recipe in recipes] == [1e-3, 2e-3, 3e-3, 4e-3]
    assert {recipe["track"]["wandb"]["group"] for recipe in recipes} == {"sweep-sweep-001"}
    assert [[step for step, _ in losses] for losses in found["losses"]] == [list(range(1, 16))] * 4
    assert len({json.dumps(losses) for losses in found["losses"]}) == 4
    assert found["status"].count(", done") == 4


@rotates(part=3)
@needs("second_job")
def test_a_second_job_of_a_running_run_is_refused_and_harms_nothing(desk, evidence, reference):
    found = evidence["second_job"].result()
    assert found["refusal"].code == 86
    assert "which waits or runs" in found["refusal"].err
    assert (found["first"], found["second"]) == ("COMPLETED", "FAILED"), found["log"]
    assert "in use by process" in found["log"]
    assert found["is_untouched"]
    assert_equals_undisturbed(desk, "doubled", 1, reference)


@rotates(part=3)
@needs("signals")
def test_signals_to_one_rank_in_start_up_validation_and_save_leave_the_curve_as_it_was(desk, evidence):
    found = evidence["signals"].result()
    *asked, died, last = found["ends"]
    assert (asked, last) == ([85, 85, 85], 0), found["log"]
    assert died not in (0, 85)
    first, built, validated, saved, again = (start["from"] for start in found["starts"])
    assert first == 0
    assert 1 <= built < 10  # all ranks stop at the end of a step
    assert 30 < validated < 40
    assert 60 < saved < 70
    assert again == saved  # the save of step 80 was killed before its commit
    kinds = [record["fault"].split()[0] for record in read_log(desk.folder("signals"))]
    assert kinds == ["term", "term", "term", "kill"]
    assert desk.losses("signals") == desk.losses("local-validated")
    lineages = [read_lineage(desk.folder(run)) for run in ("signals", "local-validated")]
    assert find_ledger_problems(lineages[0], STEPS * 12, lineages[1]) == []


@rotates(part=1)
@needs("launcher")
def test_a_run_survives_the_death_of_its_launcher(desk, evidence, reference):
    found = evidence["launcher"].result()
    assert found["ends"][-1] == 0, found["log"]
    assert_equals_undisturbed(desk, "launcher", 2, reference)


@rotates(part=0)
@needs("script")
def test_a_run_whose_script_was_killed_goes_on_when_it_is_submitted_again(desk, evidence, reference):
    found = evidence["script"].result()
    assert found["state"] in ("FAILED", "NODE_FAIL", "CANCELLED"), found["log"]
    assert found["starts"][-1]["from"] >= 20
    assert_equals_undisturbed(desk, "script", 2, reference)


@rotates(part=6)
@needs("node_daemon")
def test_a_run_does_not_notice_that_its_slurmd_dies_and_comes_back(desk, evidence, reference):
    found = evidence["node_daemon"].result()
    assert (len(found["starts"]), found["ends"]) == (1, [0])
    assert_equals_undisturbed(desk, "daemon", 1, reference)


@rotates(part=6)
@needs("controller")
def test_a_rank_that_dies_while_the_controller_is_dead_is_started_again(desk, evidence, reference):
    found = evidence["controller"].result()
    assert [start["from"] for start in found["starts"]][:2] == [0, 20], found["log"]
    assert found["ends"][-1] == 0, found["log"]
    assert_equals_undisturbed(desk, "controller", 2, reference)


@needs("torchrun")
def test_torchrun_starts_the_same_run(evidence, reference):
    found = evidence["torchrun"].result()
    assert found["losses"] == reference[2], found["log"]


def test_nothing_is_left_running(desk, evidence):
    for future in evidence.values():
        future.result()
    wait_for(lambda: not left_over(desk), "the end of all processes", 30, lambda: "\n".join(left_over(desk)))
