"""What a job's script makes of the checkpoints and of its history, without a cluster: its functions, run by bash."""

import json
import re
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from framework.checkpoint.held import LINEAGE_FILE, RunLineage
from framework.checkpoint.node_memory import run_memory
from framework.commands import submit
from framework.errors import RunError
from framework.launch.directory import RunDirectory
from framework.launch.parts import RunPart
from framework.launch.resume import resume_recipe
from framework.lease import Lease
from framework.recipe.compose import compose

SCRIPT = (Path(__file__).parents[2] / "slurm" / "job.sh").read_text()


def call(function, run, *arguments, before=""):
    """What a function of the script prints, for job 7 of the run in `run`. before: functions that it calls."""
    name = function.rpartition(" ")[2]
    body = before + re.search(rf"^{name}\(\) {{.*?^}}$", SCRIPT, re.M | re.S)[0]
    words = ["bash", "-euc", f"run=$0 history=$0/history job=7\n{body}\n{function} $*", str(run), *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def note_chain(run, jobs="7\n8\n"):
    """What `submit` notes of a chain."""
    (run / "slurm").mkdir(exist_ok=True)
    (run / "slurm" / "jobs").write_text(jobs)


def function_of(name):
    """The words that define a function of the script."""
    return re.search(rf"^{name}\(\) \{{.*?^\}}$", SCRIPT, re.M | re.S)[0]


@pytest.mark.parametrize(
    ("starts", "step", "count"),
    [
        ((), 0, 0),
        ((0, 0), 0, 2),
        ((0, 20), 20, 1),
        ((0, 20, 20, 40), 40, 1),
        ((0, 40, 20), 20, 2),  # the checkpoint of step 40 was damaged: that start was one from step 20
        ((20, 40, 20, 40, 20), 20, 5),  # again and again: no progress
        ((20, 40, 20, 40), 40, 1),  # one of step 40 was made again, and may be whole
        ((100, 20, 40, 60), 60, 1),  # the ground lost is won back step by step
    ],
)
def test_a_start_counts_as_progress_only_from_a_newer_checkpoint(tmp_path, starts, step, count):
    lines = [f"2026-11-20T04:54:58+0000 job=7 restart=0 start from={start} nodes=n1" for start in starts]
    others = ["2026-11-20T04:54:58+0000 job=6 restart=0 start from=0 nodes=n1"]
    ends = ["2026-11-20T04:54:59+0000 job=7 restart=0 end code=1 step=0"]
    (tmp_path / "history").write_text("\n".join(others + [text for line in lines for text in (line, *ends)]) + "\n")
    assert call("starts_without_progress", tmp_path, str(step)) == str(count)


def test_what_is_set_aside_unfinished_or_emptied_is_no_checkpoint(tmp_path):
    assert call("newest_step", tmp_path) == "0"
    for name in ("step-00000020", "step-00000040.bad", "step-00000050.bad.1", "step-00000060.tmp.123", "step-00000100"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}")
    assert call("newest_step", tmp_path) == "100"
    (tmp_path / "checkpoints" / "step-00000100" / "manifest.json").unlink()
    assert call("newest_step", tmp_path) == "20"


def test_a_start_from_what_nodes_held_is_progress_of_a_run_that_keeps_copies(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-00000020"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    assert call("copies=1; newest_step", tmp_path) == "20"
    lineage = RunLineage().begin(0, "a", 0, 0).begin(50, "b", 20, 20)
    (tmp_path / LINEAGE_FILE).write_text(json.dumps(asdict(lineage)))
    assert call("copies=1; newest_step", tmp_path) == "50"
    assert call("copies=0; newest_step", tmp_path) == "20"


def test_what_an_object_store_has_is_known_by_the_note_beside_the_run(tmp_path):
    (tmp_path / "checkpoints.url").write_text("s3://bucket/runs/run\n")
    assert call("newest_step", tmp_path) == "0"
    (tmp_path / "checkpoints.json").write_text('{"committed_step": 120}')
    assert call("newest_step", tmp_path) == "120"


def test_the_script_forgets_the_folder_that_nodes_have(tmp_path):
    run = tmp_path / "a run's"
    run.mkdir()
    stubs = (
        'srun() { echo "${@: -1}"; }; timeout() { "${@:2}"; }; scontrol() { echo $3; }; SLURM_JOB_NODELIST=n1; copies=1'
    )
    said = call("forget_copies", run, before=f"field() {{ echo n1; }}; {stubs}\n")
    assert said == str(run_memory(run))


@pytest.mark.parametrize(("copies", "node"), [(1, "n2"), (0, "")])
@pytest.mark.parametrize("way", ["requeue why", "go_on_in_chain why"])
def test_nodes_that_are_given_away_hold_nothing(tmp_path, way, copies, node):
    """Those that the job still has: n1 was lost."""
    given = (
        f"run=$0 job=7 slurm_job=7 code=0 copies={copies} SLURM_JOB_NODELIST=n[1-2]\n"
        "say() { :; }; refuse_if_stale() { :; }; start_soon() { :; }; squeue() { echo 8; }\n"
        'field() { echo n2; }; scontrol() { if [ $2 = hostnames ]; then echo $3; fi; }; timeout() { "${@:2}"; }\n'
        'srun() { while [[ $1 == --* ]]; do case $1 in --nodelist=*) echo "${1#*=}" ;; esac; shift; done; }'
    )
    note_chain(tmp_path)
    functions = ("forget_copies", "requeue", "waiting_in_chain", "go_on_in_chain")
    words = [given, *(function_of(name) for name in functions), way]
    done = subprocess.run(["bash", "-uc", "\n".join(words), str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, node), done


@pytest.mark.parametrize(
    ("code", "holder", "waits", "done"),
    [
        (86, "6", "6", ""),  # one too many: all of it is that job's
        (86, "6", "", "forgets cancels"),  # that job is over
        (86, "7", "7", "forgets cancels"),
        (86, "", "", "forgets cancels"),  # `submit` had it last
        (88, "7", "7", "forgets cancels"),
    ],
)
def test_a_job_that_is_one_too_many_takes_nothing_from_the_one_that_runs(tmp_path, code, holder, waits, done):
    (tmp_path / "request-save").touch()
    (tmp_path / "lease").write_text(json.dumps({"epoch": 4, "host": "n1", "job": holder, "restart": 0}) + "\n")
    given = (
        f"run=$0 job=7 jobs_in_chain=3 copies=1; say() {{ :; }}; forget_copies() {{ echo forgets; }}\n"
        f"squeue() {{ case $* in *PENDING*) echo 8 ;; *) echo {waits} ;; esac; }}; scancel() {{ echo cancels; }}"
    )
    note_chain(tmp_path)
    words = [
        given,
        *(function_of(name) for name in ("is_of_another_job", "waiting_in_chain", "stop")),
        f"stop {code} why",
    ]
    ended = subprocess.run(
        ["bash", "-uc", "\n".join(words), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout.split()) == (code, done.split()), ended
    assert (tmp_path / "request-save").exists() == (not done)


@pytest.mark.parametrize(("step", "newest", "ends"), [(20, 20, True), (0, 0, True), (20, 40, False)])
def test_a_job_that_ran_out_of_memory_is_started_again_only_after_progress(step, newest, ends):
    """Without a newer checkpoint it would end in the same way, as often as launch.retries allows."""
    branch = re.search(r"^    89\) .*?;;$", SCRIPT, re.M | re.S)[0]
    words = f"newest_step() {{ echo {newest}; }}\nstop() {{ echo stop $1; }}\nstep={step} code=89\ncase $code in\n{branch}\nesac"
    said = subprocess.run(["bash", "-euc", words], capture_output=True, text=True, check=True).stdout.strip()
    assert said == ("stop 89" if ends else "")


@pytest.mark.parametrize(
    ("now", "goes_on"),
    [
        ('{"epoch": 3, "job": "6", "restart": 0, "step": 0}', True),  # as it was when the script began
        ('{"epoch": 4, "job": "7", "restart": 1, "step": 0}', True),  # the script's own ranks
        ('{"epoch": 4, "job": "7", "restart": 2, "step": 0}', False),
        ('{"epoch": 5, "job": "", "restart": 0, "step": 0}', False),  # a launch by hand
        ("", False),
    ],
)
def test_a_script_that_was_held_for_dead_does_nothing(tmp_path, now, goes_on):
    """A requeue would end the start that has the run now."""
    body = re.search(r"^refuse_if_stale\(\) {.*?^}$", SCRIPT, re.M | re.S)[0]
    (tmp_path / "lease").write_text(now + "\n")
    begin = "run=$0 job=7 restart=1 lease_at_begin='" + '{"epoch": 3, "job": "6", "restart": 0, "step": 0}' + "'"
    words = f'{begin}\nsay() {{ echo "$*"; }}\n{body}\nrefuse_if_stale\necho goes on'
    done = subprocess.run(["bash", "-uc", words, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.endswith("goes on\n")) == ((0, True) if goes_on else (86, False))
    assert goes_on or "held for dead" in done.stdout


@pytest.mark.parametrize(("at_begin", "is_back"), [("x", False), ("", False), ("", True)])
def test_a_lease_that_cannot_be_read_is_no_reason_to_end(tmp_path, at_begin, is_back):
    """EIO, as for /proc/self/mem: who has the run is not known, now or when the script began."""
    body = re.search(r"^refuse_if_stale\(\) {.*?^}$", SCRIPT, re.M | re.S)[0]
    (tmp_path / "lease").symlink_to("/proc/self/mem")
    (tmp_path / "whole").write_text('{"epoch": 3, "job": "6", "restart": 0, "step": 0}\n')
    back = 'mv "$run/whole" "$run/lease"' if is_back else ":"
    given = f"run=$0 job=7 restart=1 lease_at_begin={at_begin}\nsay() {{ echo $*; }}; sleep() {{ echo waits; {back}; }}"
    words = ["bash", "-uc", f"{given}\n{body}\nrefuse_if_stale\necho goes on", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("goes on\n")
    assert done.stdout.count("waits") == (1 if is_back else 9)
    assert ("cannot read" in done.stdout) != is_back


@pytest.mark.parametrize("ends", ["requeue it", "go_on_in_chain it", "while_slurm_was_asked"])
def test_a_script_that_froze_before_it_acts_does_nothing(tmp_path, ends):
    """Each of these would be done to the job's new start, or to the chain of it."""
    part = re.search(r"^  state=\$\(field JobState\)$.*?^  fi$", SCRIPT, re.M | re.S)[0]
    (tmp_path / "lease").write_text('{"epoch": 5, "job": "7", "restart": 2, "step": 0}\n')
    given = (
        "run=$0 job=7 restart=1 code=85 lease_at_begin=older near_end= jobs_in_chain=1\n"
        "say() { echo $*; }; newest_step() { echo 20; }; field() { echo COMPLETING; }\n"
        'for name in squeue scancel scontrol start_soon stop forget_copies; do eval "$name() { echo acts; }"; done'
    )
    functions = [function_of(name) for name in ("refuse_if_stale", "requeue", "waiting_in_chain", "go_on_in_chain")]
    words = [given, *functions, f"while_slurm_was_asked() {{\n{part}\n}}", ends]
    done = subprocess.run(["bash", "-uc", "\n".join(words), str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, "acts" in done.stdout) == (86, False), done


@pytest.mark.parametrize(
    ("reason", "released"),
    [
        ("launch failed requeued held", True),
        ("launch_failed_requeued_held", True),  # newer SLURM's word
        ("JobHeldUser", False),
        ("Resources", False),
    ],
)
def test_a_requeued_job_that_a_node_has_refused_is_released(reason, released):
    """A node that was frozen still held the former start: SLURM drains it and holds the job. A user's hold stays."""
    given = (
        'job=7 slurm_job=7\nsbatch() { sh -c "squeue() { echo \\"\\$state\\"; }; scontrol() { echo \\$*; }; ${@: -1}"; }\n'
        f'export state="{reason}"'
    )
    functions = [function_of(name) for name in ("brief_job", "start_soon")]
    words = "\n".join([given, *functions, "start_soon"]).replace("seq 240", "seq 1").replace("sleep 0.5", ":")
    done = subprocess.run(["bash", "-uc", words], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == (["release 7"] if released else []), done


def test_a_run_that_was_asked_to_stop_is_not_requeued(tmp_path):
    """85 says that the run can go on; who asked it to stop does not want that now."""
    (tmp_path / "request-stop").touch()
    part = re.search(r"^  if \[ -e \"\$run/request-stop\".*?^  if \[ -n \"\$asked\" \][^\n]*$", SCRIPT, re.M | re.S)[0]
    stop = function_of("stop")
    given = "run=$0 code=85 asked= go_on=submit jobs_in_chain=1\nsay() { echo $*; }\nnewest_step() { echo 20; }"
    given += "\nforget_copies() { :; }"
    done = subprocess.run(
        ["bash", "-euc", f"{given}\n{stop}\n{part}", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (85, "ended with 85 at step 20, as it was asked to: submit")
    assert not (tmp_path / "request-stop").exists()


@pytest.mark.parametrize(
    ("code", "near_end", "waiting", "said"),
    [
        (85, "", "8", (85, "saved at step 20; the next job of the chain goes on")),
        (85, "", "", (85, "saved at step 20, and the chain is at its end: submit")),
        (1, "yes", "8", (1, "ended with 1 near the time limit, at step 20; the next job of the chain goes on")),
        (143, "yes", "", (143, "ended with 143 near the time limit, at step 20, and the chain is at its end: submit")),
        (87, "yes", "8", (0, "requeue bad nodes are left out from now on: n1")),
        (1, "", "8", (0, "again")),  # launch.retries are for that
    ],
)
def test_a_chain_goes_on_from_any_end_near_the_time_limit(tmp_path, code, near_end, waiting, said):
    """Requeued instead, the job would train beside the next one of its chain."""
    (tmp_path / "slurm").mkdir(exist_ok=True)
    (tmp_path / "slurm" / "bad-nodes").write_text("n1\n")
    part = re.search(r"^  if [^\n]*\"\$jobs_in_chain\" -gt 1 \]; then$.*?(?=^  failures=)", SCRIPT, re.M | re.S)[0]
    functions = re.findall(r"^(?:waiting_in_chain|stop|go_on_in_chain)\(\) \{.*?^\}$", SCRIPT, re.M | re.S)
    note_chain(tmp_path)
    given = [
        f"run=$0 job=7 code={code} near_end={near_end} go_on=submit jobs_in_chain=3",
        "say() { echo $*; }; newest_step() { echo 20; }; scancel() { :; }; refuse_if_stale() { :; }; forget_copies() { :; }",
        f"squeue() {{ echo {waiting}; }}",
        "requeue() { echo requeue $1; exit 0; }",
    ]
    words = ["bash", "-euc", "\n".join([*given, *functions, part, "echo again"]), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == said


@pytest.mark.parametrize("end", ["stop 0 why", "stop 88 why", "go_on_in_chain why"])
@pytest.mark.parametrize(
    ("noted", "ended", "cancelled"),
    [
        ("7\n8\n9\n", (), ["8", "9"]),
        ("7\n8\n9\n", ("8",), ["9"]),
        ("7\n", (), []),
        ("", (), []),
        (None, (), []),  # of a run that was not submitted
    ],
)
def test_a_chain_that_ends_touches_its_own_jobs_alone(tmp_path, end, noted, ended, cancelled):
    """A run of the same id in another folder has jobs 18 and 19 in the queue, which bear the same name."""
    if noted is not None:
        note_chain(tmp_path, noted)
    queue = [job for job in ("8", "9", "18", "19") if job not in ended]
    given = (
        f"run=$0 job=7 code=0 jobs_in_chain=3 copies=0 go_on=submit SLURM_JOB_NAME=run queue='{' '.join(queue)}'\n"
        "say() { :; }; forget_copies() { :; }; refuse_if_stale() { :; }; scontrol() { :; }\n"
        "squeue() { local asked; for word; do case $word in --job=*) asked=,${word#*=}, ;; esac; done\n"
        '  for job in $queue; do if [[ -z ${asked:-} || $asked == *,$job,* ]]; then echo "$job"; fi; done; }\n'
        "scancel() { for word; do case $word in --name=*) echo $queue ;; --*) ;; *) echo $word ;; esac; done; }"
    )
    words = [given, *(function_of(name) for name in ("waiting_in_chain", "stop", "go_on_in_chain")), end]
    done = subprocess.run(["bash", "-uc", "\n".join(words), str(tmp_path)], capture_output=True, text=True, check=False)
    goes_on = end.startswith("go_on") and cancelled
    assert done.stdout.split() == ([] if goes_on else cancelled)


def test_submit_notes_the_jobs_of_a_chain_before_the_next_is_queued(tmp_path, monkeypatch):
    run, noted = RunDirectory.create(tmp_path, "x", "run"), []
    note_chain(run.path, "3\n4\n")  # of a former submission

    def submit_script(script, after):
        noted.append(run.jobs.read_text().split())
        return str(7 + len(noted))

    monkeypatch.setattr(submit, "submit_script", submit_script)
    recipe = compose(["launch=slurm", "launch.chain=3", "launch.nodes=1", "launch.ranks_per_node=1"]).require()
    assert submit._queue(run, Lease(run.path), RunPart(recipe, 0, None, ()), []) == 0
    assert noted == [[], ["8"], ["8", "9"]]
    assert run.jobs.read_text().split() == run.read_record()["launches"][-1]["jobs"] == ["8", "9", "10"]


@pytest.mark.parametrize("accepted", [0, 1])
def test_a_refused_submission_leaves_its_recipe_and_its_jobs_on_record(tmp_path, monkeypatch, accepted):
    run, queued = RunDirectory.create(tmp_path, "x", "run"), []
    note_chain(run.path, "")
    (run.path / "checkpoints.json").write_text('{"committed_step": 1}')  # it has trained
    recipe = compose(["launch=slurm", "launch.chain=2", "launch.nodes=1", "launch.ranks_per_node=1"]).require()
    former, lease = RunPart(recipe, 0, None, ()), Lease(run.path)
    former.write(run, lease)
    former.note(run, lease, [])

    def submit_script(script, after):
        if len(queued) == accepted:
            raise RunError("sbatch refused the job: Invalid partition")
        queued.append(str(7 + len(queued)))
        return queued[-1]

    monkeypatch.setattr(submit, "submit_script", submit_script)
    typo = RunPart(replace(recipe, launch=replace(recipe.launch, partition="lagre")), 0, None, ())
    typo.write(run, lease)
    with pytest.raises(RunError, match="sbatch refused"):
        submit._queue(run, lease, typo, ["launch.partition=lagre"])
    assert run.last_launch["jobs"] == queued
    resumed, changes = resume_recipe(run, ["launch.partition=large"], [])
    assert (resumed.launch.partition, changes) == ("large", {"launch.partition": ("lagre", "large")})


def test_a_field_is_of_the_first_job_that_slurm_shows(tmp_path):
    """An older SLURM shows all tasks of an array."""
    stub = "scontrol() { echo ' JobState=RUNNING A=1'; echo ' JobState=PENDING A=2'; }; slurm_job=7_0"
    assert call(f"{stub}; field", tmp_path, "JobState") == "RUNNING"


@pytest.mark.parametrize(
    ("had", "all_of_them"),
    [("(null)", "n1,n2"), ("", "n1,n2"), ("n[4-6]", "n[4-6],n1,n2"), ("n4,n1", "n4,n1,n2"), ("n2,n1", "n2,n1")],
)
def test_bad_nodes_join_those_that_the_user_excluded(tmp_path, had, all_of_them):
    stubs = f"field() {{ echo '{had}'; }}; scontrol() {{ tr , '\\n' <<< $3; }}\n"
    assert call("and_excluded", tmp_path, "n1,n2", before=stubs) == all_of_them


@pytest.mark.parametrize(
    ("said", "seconds"), [("2026-11-21T04:54:51", "1795236891"), ("", ""), ("Unknown", ""), ("N/A", "")]
)
def test_moments_of_a_job_are_unix_seconds_or_nothing(tmp_path, monkeypatch, said, seconds):
    """`date` without a date would be midnight."""
    monkeypatch.setenv("TZ", "UTC")
    assert call("seconds_of", tmp_path, "SubmitTime", before=f"field() {{ echo {said}; }}\n") == seconds
