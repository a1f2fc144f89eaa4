"""What a job's script does when nodes are lost: the script itself is run, with small programs in the place of SLURM's.

The job has n1, n2 and so on, and its script is on n1. Programs leave what they are asked in a folder of notes, and read from it
what they are to do: `dead` has nodes on which nothing starts, `ends` how each start of the ranks ends. REFUSED_S
is for how long after that the controller refuses every step.
"""

import re
import subprocess
from dataclasses import replace

import pytest

from framework.launch.slurm import render
from framework.recipe.schema import Batch, Launch, Recipe
from tests.grid import IN_TURN

pytestmark = [pytest.mark.waits, IN_TURN]

PROGRAMS = {
    "srun": """name= node=
for word; do case $word in --job-name=*) name=${word#*=} ;; --nodelist=*) node=${word#*=} ;; esac; done
case $name in
  try) [ $(($(date +%s) - $(cat "$NOTES/ended"))) -lt "$REFUSED_S" ] && exit 1
        grep -qxF "$node" "$NOTES/signalled" && exit 138
        if grep -qxF "$node" "$NOTES/dead"; then exit 1; fi ;;
  guard) echo "$node" >> "$NOTES/guards"; exec sleep 15 ;;
  ranks) echo "$node" >> "$NOTES/starts"
         read -r code bad lost < <(sed -n "$(wc -l < "$NOTES/starts")p" "$NOTES/ends")
         [ "$bad" = - ] || echo "$bad" >> "$RUN/slurm/bad-nodes"
         [ "$lost" = - ] || echo "$lost" >> "$NOTES/dead"
         date +%s > "$NOTES/ended"
         echo "${code#hangs}" > "$MESHWRIGHT_OUTCOME"
         case $code in hangs*) exec sleep 60 ;; esac
         exit "$code" ;;
esac""",
    "scontrol": """case "$*" in
  "show hostnames "*) tr , '\\n' <<< "$3" ;;
  "show hostlist "*) echo "$3" ;;
  requeue*) echo "$*" >> "$NOTES/requeues" ;;
  *) echo "$*" >> "$NOTES/asked"
     moments="EndTime=2099-01-01T00:00:00 PreemptTime=None"
     echo "JobId=7 JobState=RUNNING $moments NodeList=$(cat "$NOTES/nodes") ExcNodeList=$EXCLUDED" ;;
esac""",
    "squeue": "echo '7.0 ranks'",
    "scancel": 'echo "$*" >> "$NOTES/cancelled"',
    "sbatch": 'echo "$*" >> "$NOTES/soon"',
}


@pytest.fixture
def job(tmp_path):
    """Runs the script of a recipe for `nodes` of a job; returns the nodes of each start, and the folder of notes.

    ends: of each start `CODE BAD LOST`: how it ends, a node that a rank finds bad, one that is lost meanwhile, or `-`.
    """
    programs, notes, run = tmp_path / "bin", tmp_path / "notes", tmp_path / "run"
    for folder in (programs, notes, run):
        folder.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (run / "lease").write_text('{"epoch": 1, "job": "", "restart": 0, "step": 0}\n')

    def start(text, nodes, ends, *, signalled="", **variables):
        for name, lines in (("nodes", nodes), ("ends", "\n".join(ends)), ("dead", ""), ("signalled", signalled)):
            (notes / name).write_text(lines + "\n" * bool(lines))
        around = {
            "PATH": f"{programs}:/usr/bin:/bin", "NOTES": str(notes), "RUN": str(run), "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_NAME": "x", "SLURMD_NODENAME": "n1", "EXCLUDED": "(null)",
            "REFUSED_S": "0",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", text.replace("node_patience_s=15", "node_patience_s=1")],
            env=around | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        starts = (notes / "starts").read_text().split()
        assert len(starts) == len(ends), done
        return starts, done, notes

    return start


def script(tmp_path, nodes, spares, counts=None):
    launch = Launch(kind="slurm", ranks=None, nodes=nodes, spares=spares, ranks_per_node=1, gres=None)
    recipe = replace(Recipe(), batch=Batch(sequences_per_step=12), launch=launch)
    return render(recipe, tmp_path / "run", tmp_path, counts=counts).text


@pytest.mark.parametrize(
    ("nodes", "spares", "had", "ends", "starts"),
    [
        (2, 1, "n1,n2,n3", ["1 - n2", "0 - -"], ["n1,n2", "n1,n3"]),  # a spare one takes its place
        (2, 1, "n1,n2,n3", ["1 - n3", "0 - -"], ["n1,n2", "n1,n2"]),  # the spare one was lost
        (2, 2, "n1,n2,n3,n4", ["1 - n2", "1 - n3", "0 - -"], ["n1,n2", "n1,n3", "n1,n4"]),
        ((1, 2), 0, "n1,n2", ["1 - n2", "0 - -"], ["n1,n2", "n1"]),  # fewer
        ((1, 4), 0, "n1,n2,n3", ["0 - -"], ["n1,n2,n3"]),  # what SLURM gave
        ((1, 3), 1, "n1,n2,n3", ["1 - n2", "1 - n3", "0 - -"], ["n1,n2", "n1,n3", "n1"]),
        ((1, 2), 0, "n1,n2", ["137 - -", "0 - -"], ["n1,n2", "n1,n2"]),  # a rank died, the nodes are well
        (2, 1, "n1,n2,n3", ["87 n1 -", "0 - -"], ["n1,n2", "n2,n3"]),  # a bad node, even the one of the script
    ],
)
def test_ranks_start_again_on_the_nodes_that_answer(tmp_path, job, nodes, spares, had, ends, starts):
    found, done, notes = job(script(tmp_path, nodes, spares), had, ends)
    assert (found, done.returncode) == (starts, 0), done.stdout + done.stderr
    assert not (notes / "requeues").exists()


def test_a_number_of_nodes_without_a_layout_is_not_used(tmp_path, job):
    """Of five nodes four train; of the three that are left in the end two, for three cannot."""
    found, done, _ = job(script(tmp_path, (1, 6), 0, (1, 2, 4, 6)), "n1,n2,n3,n4,n5", ["1 - n2", "1 - n3", "0 - -"])
    assert found == ["n1,n2,n3,n4", "n1,n3,n4,n5", "n1,n4"], done.stdout


@pytest.mark.parametrize(("excluded", "in_front"), [("(null)", ""), ("n[7-9]", "n[7-9],")])
def test_with_too_few_nodes_the_job_is_requeued_without_the_bad_ones(tmp_path, job, excluded, in_front):
    """Nor on those that its user has left out: the new list takes the place of the old one."""
    _, done, notes = job(script(tmp_path, 2, 1), "n1,n2,n3", ["87 n1 -", "87 n2 -"], EXCLUDED=excluded)
    assert (notes / "requeues").read_text() == "requeue 7\n"
    assert f" 'ExcNodeList={in_front}n1,n2'; exit" in (notes / "soon").read_text()
    assert "{1.." not in (notes / "soon").read_text(), "sbatch runs it by sh, where that is one word"
    assert "too few nodes are left, the run needs 2; requeued" in done.stdout


def test_the_last_task_of_an_array_means_itself_alone(tmp_path, job):
    """Its job has the array's number, by which SLURM means all tasks: a requeue would restart each of them."""
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    _, _, notes = job(script(tmp_path, 2, 1), "n1,n2,n3", ["87 n1 -", "87 n2 -"], **task)
    assert (notes / "requeues").read_text() == "requeue 7_3\n"
    assert "--job=7_3 " in (notes / "soon").read_text()
    assert "update JobId=7_3 " in (notes / "soon").read_text()
    assert set((notes / "asked").read_text().splitlines()) == {"--oneliner show job 7_3"}
    assert not re.search(r"(?:scontrol|squeue|scancel).*\$job\b", script(tmp_path, 2, 1))


def test_a_node_that_a_signal_reached_is_not_lost(tmp_path, job):
    """What asks the ranks to save and end reaches all steps of a job, and may end the one that tries a node."""
    found, _, _ = job(script(tmp_path, (1, 2), 0), "n1,n2", ["1 - -", "0 - -"], signalled="n2")
    assert found == ["n1,n2", "n1,n2"]


def test_nodes_are_not_lost_where_the_controller_refuses_every_step(tmp_path, job):
    """As for some seconds after it was restarted: srun fails at once then for all nodes, that of the script included."""
    found, done, _ = job(script(tmp_path, 2, 1), "n1,n2,n3", ["137 - -", "0 - -"], REFUSED_S="5")
    assert found == ["n1,n2", "n1,n2"], done.stdout + done.stderr
    assert "so SLURM does not answer: asks again" in done.stdout
    assert "leaves out" not in done.stdout


def test_ranks_that_wait_for_a_lost_node_are_ended(tmp_path, job):
    """srun returns only once all its ranks have, those of a lost node when SLURM notices: minutes later."""
    found, done, notes = job(script(tmp_path, 2, 1), "n1,n2,n3", ["hangs1 - n2", "0 - -"])
    assert found == ["n1,n2", "n1,n3"], done.stdout + done.stderr
    assert (notes / "cancelled").read_text() == "--quiet --signal=KILL 7.0\n"


def test_a_guard_is_on_another_node_than_the_script(tmp_path, job):
    _, _, notes = job(script(tmp_path, 2, 1), "n1,n2,n3", ["1 - n3", "0 - -"])
    assert (notes / "guards").read_text().split() == ["n3", "n2"]


@pytest.mark.parametrize(
    ("nodes", "restarts", "requeues"),
    [
        ("n2", 0, True),
        ("n1,n2", 0, False),  # another node is lost
        ("n2", 1, False),  # the guard's node was frozen and thaws: the job runs elsewhere by now
    ],
)
def test_the_guard_requeues_a_job_without_its_first_node(tmp_path, nodes, restarts, requeues):
    text = script(tmp_path, 2, 1)
    functions = re.findall(
        r"^(?:say|field|brief_job|start_soon|guard_job)\(\) \{.*?^\}$|^(?:say|field)\(\) \{.*\}$", text, re.M | re.S
    )
    (tmp_path / "run").mkdir()
    mocks = (
        f"sleep() {{ if [ -e {tmp_path}/slept ]; then exit; fi; touch {tmp_path}/slept; kill -USR1 $$; return 138; }}\n"
        f"scontrol() {{ case $2 in hostnames) tr , '\\n' <<< $3 ;; job) echo ' NodeList={nodes} Restarts={restarts}' ;;\n"
        "*) echo $* ;; esac; }\n"
        "sbatch() { :; }; scancel() { echo cancel; }"
    )
    words = "\n".join([*functions, mocks, f"run={tmp_path}/run job=7 slurm_job=7", "guard_job n1 0"])
    words = words.replace("scontrol --oneliner show job", "scontrol show job")
    done = subprocess.run(["bash", "-uc", words], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout.strip() == "requeue 7") == requeues, done
    assert (tmp_path / "run" / "job.log").exists() == requeues


@pytest.mark.grid
@pytest.mark.parametrize(
    ("line", "instead", "starts"),
    [
        ("  leave_out_lost_nodes\ndone", "done", ["n1,n2", "n1,n2"]),  # nobody looks whether nodes answer
        ("most=${most:-$((${#all[@]} - 1))}", "most=3", ["n1,n2,n3", "n1,n3"]),  # the spare one trains
        ('| grep -vxFf "$left_out"', "", ["n1,n2", "n1,n2"]),  # what is left out is started on again
    ],
)
def test_sabotage_of_the_script_is_seen(tmp_path, job, line, instead, starts):
    """Whole, the script starts on n1,n2 and then on n1,n3: a case of the test above."""
    text = script(tmp_path, (1, 3), 1)
    assert line in text
    found, _, _ = job(text.replace(line, instead), "n1,n2,n3", ["1 - n2", "0 - -"])
    assert found == starts


def test_a_run_of_fixed_nodes_has_none_of_it(tmp_path):
    text = script(tmp_path, 2, 0)
    assert not re.search("no-kill|left_out|guard", text)
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in text


def test_sbatch_is_asked_for_the_range_and_the_spares(tmp_path):
    text = script(tmp_path, (1, 4), 2, (2, 4))
    assert "#SBATCH --nodes=4-6\n#SBATCH --cpus-per-task=1\n" in text
    assert "#SBATCH --no-kill\n" in text
    assert "ntasks-per-node" not in text.partition("run=")[0]  # with it SLURM gives the least of the range
    assert "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=1\n" in script(tmp_path, 2, 1)
