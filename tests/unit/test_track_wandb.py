"""wandb mirrors metrics.jsonl and can neither stop nor slow a run, whatever it does."""

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from framework.launch.directory import RunDirectory
from framework.launch.resume import Origin, copy_curves
from framework.lease import Holder, Lease, take
from framework.recipe import schema
from framework.recipe.check import check_recipe
from framework.recipe.compose import compose
from framework.recipe.derive import derive
from framework.track.jsonl import METRICS_FILE, Jsonl, read_records
from framework.track.mirror import CLOSE_TIMEOUT_S, MAX_RANKS_CHARTED, POLL_S, Mirror, chart_values
from framework.track.report import RunInfo, StepReport, save_run_info
from framework.track.trackers import write_sync
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

# Of some hundred reports: a page of memory that is not there, a lock of the kernel's.
SPURIOUS_WAITS = 5
# A wandb that writes down what it is asked; {slots} are filled per test.
FAKE = """
import json, os, time
class errors:
    class Error(Exception): pass
    class UsageError(Error): pass
def Settings(**values): return values
def note(*what):
    with open(os.environ["FAKE_WANDB_LOG"], "a") as log: log.write(json.dumps(what, default=str) + "\\n")
def login(**_):
    {login}
def teardown(): note("teardown")
class Artifact:
    def __init__(self, name, type): self.name = name
    def add_file(self, path, policy, skip_cache): self.text = open(path).read()
def init(mode, **arguments):
    note("init", mode, arguments["id"])
    note("began", arguments.get("resume") or arguments["fork_from"], arguments["group"], arguments["config"].get("branch_of"))
    note("told", arguments["project"], arguments["entity"], arguments["tags"], arguments["config"]["derived"])
    {init}
    return Run()
class Run:
    step, url, dir, tags, id = {step}, {url}, os.path.dirname(os.environ["FAKE_WANDB_LOG"]), None, "r-1"
    def __setattr__(self, name, value): note(name, value)
    def define_metric(self, *names, **options): note("define_metric", *names, options)
    def log(self, values, step, commit):
        {log}
        note("log", step, values["step"], values["loss"])
    def log_artifact(self, artifact): note("artifact", artifact.name, artifact.text)
    def finish(self, exit_code): note("finish", exit_code)
"""


def recipe(mode="offline"):
    return schema.Recipe(track=schema.Track(wandb=schema.Wandb(mode=mode)))


def run_info(mode="offline", start_step=0):
    return RunInfo("r-1", asdict(recipe(mode)), total_steps=100, start_step=start_step)


def report(step):
    return StepReport(step, step * 4, step * 64, 9.0 / step, 1.0, 1e-3, 0.1, 640.0, (320.0, 330.0), 0.0, None, 1 << 20)


def num_waits():
    """How often this thread has left the CPU of its own accord: for a lock, a pipe, a sleep. No load of the machine counts."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def train(run_dir, steps, info, exit_code=0, close_timeout_s=30.0, cuts=None, kind=Mirror):
    """Report each step as training would; returns (what was said, how often a report waited, close in seconds). cuts: before a
    step, go back to one that was done, and train those between again."""
    said: list[str] = []
    save_run_info(run_dir, info)
    jsonl, wandb = Jsonl(run_dir), kind("wandb", run_dir, said.append, close_timeout_s)
    jsonl.open(info)
    wandb.open(info)
    waits = 0
    for step in steps:
        if step in (cuts or {}):
            jsonl.close(0)
            time.sleep(2 * POLL_S)  # the mirror has read what is cut off now
            jsonl.open(replace(info, start_step=cuts[step]))
            for again in range(cuts[step] + 1, step):
                jsonl.report(report(again))
        jsonl.report(report(step))
        before = num_waits()
        wandb.report(report(step))
        waits += num_waits() - before
    start = time.perf_counter()
    wandb.close(exit_code)
    return said, waits, time.perf_counter() - start


@pytest.fixture
def fake_wandb(tmp_path, monkeypatch):
    """Puts a wandb of the test's making before the real one; returns a reader of what it was asked."""
    log = tmp_path / "asked.jsonl"

    def install(login="return True", init="pass", log_body="pass", step=0, url="'https://wandb.example/run'"):
        package = tmp_path / "fake"
        package.mkdir()
        source = FAKE
        for slot, body in (("login", login), ("init", init), ("log", log_body), ("step", str(step)), ("url", url)):
            source = source.replace("{" + slot + "}", body)
        (package / "wandb.py").write_text(textwrap.dedent(source))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), str(Path(__file__).parents[2])]))
        monkeypatch.setenv("FAKE_WANDB_LOG", str(log))

    def asked(what):
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [line[1:] for line in lines if line[0] == what]

    install.asked = asked
    (tmp_path / "run").mkdir()
    install.run_dir = tmp_path / "run"
    return install


def test_every_step_arrives_once_in_order_and_the_run_is_finished(fake_wandb):
    fake_wandb()
    said, _, _ = train(fake_wandb.run_dir, range(1, 21), run_info("online"))
    assert [values[1:] for values in fake_wandb.asked("log")] == [[step, 9.0 / step] for step in range(1, 21)]
    assert fake_wandb.asked("init") == [["online", "r-1"]]
    assert fake_wandb.asked("define_metric") == [["step", {}], ["*", {"step_metric": "step"}]]
    assert fake_wandb.asked("finish") == [[0]]
    assert said == ["wandb: https://wandb.example/run"]


def branch(mode="online"):
    info = run_info(mode)
    return replace(info, config={**info.config, "run": {**info.config["run"], "start_from": "/runs/base-001@3"}})


REFUSES = "if 'fork_from' in arguments: raise errors.Error('forks are a preview')"


@pytest.mark.parametrize(("init", "first"), [("pass", 4), (REFUSES, 1)], ids=["fork", "group"])
def test_a_branch_is_a_fork_of_its_origin_or_in_a_group_with_it(fake_wandb, init, first):
    fake_wandb(init=init)
    (fake_wandb.run_dir / "recipe.yaml").write_text("a: 1")
    said, _, _ = train(fake_wandb.run_dir, range(1, 7), branch())
    assert [values[0] for values in fake_wandb.asked("log")] == list(range(first, 7)), "it has the fork's steps"
    ways = ["base-001?_step=3", "allow"][: 1 + (first == 1)]
    assert fake_wandb.asked("began") == [[way, "base-001", {"run": "base-001", "step": 3}] for way in ways]
    assert said == ["wandb: https://wandb.example/run"]
    assert fake_wandb.asked("artifact") == [["r-1-recipe.yaml", "a: 1"]]
    # A resume, of which wandb has a file, goes on with it.
    segment = fake_wandb.run_dir / "wandb" / "run-1-r-1"
    segment.mkdir(parents=True)
    (segment / "run-r-1.wandb").touch()
    train(fake_wandb.run_dir, range(7, 8), replace(branch(), start_step=6))
    assert fake_wandb.asked("began")[-1][0] == "allow"


def test_a_branch_of_a_run_that_has_gone_back_has_curves_of_its_own(fake_wandb, tmp_path):
    """It forks the curve in which its origin has the step, and its own rewind begins its own second curve."""
    fake_wandb()
    origin, run = RunDirectory(tmp_path / "origin"), RunDirectory(fake_wandb.run_dir)
    origin.path.mkdir()
    jsonl = begin_to_be_mirrored(origin.path, range(1, 6))
    rewind(origin.path, jsonl, 2, 3, 4, rewinds=2)
    info = replace(branch(), start_step=3)
    info.config["run"]["start_from"] = f"{origin.path}@3"
    copy_curves(Origin(origin, None), run, Lease(run.path))
    save_run_info(run.path, info)
    jsonl = Jsonl(run.path)
    jsonl.open(info)
    jsonl.report(report(4))
    assert [each["rewinds"] for each in read_records(run.path / METRICS_FILE)] == [0, 0, 0, 0]
    mirror_until(run.path, lambda: fake_wandb.asked("log"), lambda: rewind(run.path, jsonl, 3, 4), info)
    assert [name for _, name in fake_wandb.asked("init")] == ["r-1", "r-1-rewound-1"]
    assert fake_wandb.asked("began")[0][0] == "origin-rewound-2?_step=3"
    assert [values[0] for values in fake_wandb.asked("log")] == [4, 1, 2, 3, 4]


@pytest.mark.parametrize(("exit_code", "told"), [(85, 0), (88, 88)])
def test_a_run_that_stopped_to_be_resumed_has_not_failed(fake_wandb, exit_code, told):
    fake_wandb()
    train(fake_wandb.run_dir, [1], run_info("online"), exit_code)
    assert fake_wandb.asked("finish") == [[told]]


def test_a_resume_sends_what_the_server_has_not_and_no_step_twice(fake_wandb):
    fake_wandb(step=13)  # it has steps 1 to 12; the checkpoint is of step 10
    train_info = run_info("online")
    save_run_info(fake_wandb.run_dir, train_info)
    jsonl = Jsonl(fake_wandb.run_dir)
    jsonl.open(train_info)
    for step in range(1, 13):
        jsonl.report(report(step))
    train(fake_wandb.run_dir, range(11, 16), run_info("online", start_step=10))
    assert [values[:2] for values in fake_wandb.asked("log")] == [[step, step] for step in (13, 14, 15)]


def test_a_resume_sends_what_a_former_mirror_could_not(fake_wandb):
    fake_wandb(step=5)  # the server has steps 1 to 4, then the network was away until the run stopped at step 12
    save_run_info(fake_wandb.run_dir, run_info("online"))
    jsonl = Jsonl(fake_wandb.run_dir)
    jsonl.open(run_info("online"))
    for step in range(1, 13):
        jsonl.report(report(step))
    train(fake_wandb.run_dir, range(13, 16), run_info("online", start_step=12))
    assert [values[:2] for values in fake_wandb.asked("log")] == [[step, step] for step in range(5, 16)]


def test_a_loop_that_goes_back_while_the_mirror_follows_leaves_one_curve(fake_wandb):
    """metrics.jsonl is cut back, and so another file, under the mirror's eyes."""
    fake_wandb()
    train(fake_wandb.run_dir, range(1, 9), run_info("online"), cuts={6: 3, 8: 4})
    assert [values[:2] for values in fake_wandb.asked("log")] == [[step, step] for step in range(1, 9)]


def rewind(run_dir, jsonl, target, *steps, rewinds=1):
    """As a rewind does: metrics.jsonl is cut back, and the steps since then are trained on newer data."""
    jsonl.rewind(target)
    for step in steps:
        jsonl.report(replace(report(step), loss=100.0 + step, rewinds=rewinds))


def begin_to_be_mirrored(run_dir, steps, mode="online"):
    save_run_info(run_dir, run_info(mode))
    jsonl = Jsonl(run_dir)
    jsonl.open(run_info(mode))
    for step in steps:
        jsonl.report(report(step))
    return jsonl


def mirror_until(run_dir, condition, then=lambda: None, info=None):
    """A mirror from its start until wandb was asked for what is waited for, and `then`, to its end."""
    wandb = Mirror("wandb", run_dir, print, CLOSE_TIMEOUT_S)
    wandb.open(info or run_info())
    wait_until(condition)
    then()
    wandb.close(0)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


NOW = [[step, 9.0 / step] for step in (1, 2, 3)] + [[step, 100.0 + step] for step in (4, 5)]


def test_a_rewind_begins_a_curve_that_is_the_run_as_it_now_is(fake_wandb):
    fake_wandb()
    run_dir = fake_wandb.run_dir
    jsonl = begin_to_be_mirrored(run_dir, range(1, 8))
    mirror_until(run_dir, lambda: len(fake_wandb.asked("log")) == 7, lambda: rewind(run_dir, jsonl, 3, 4, 5))
    assert fake_wandb.asked("init") == [["online", "r-1"], ["online", "r-1-rewound-1"]]
    assert fake_wandb.asked("tags") == [[["rewound"]]]
    assert fake_wandb.asked("finish") == [[0], [0]]
    sent = [values[1:] for values in fake_wandb.asked("log")]
    assert sent == [[step, 9.0 / step] for step in range(1, 8)] + NOW


def test_a_start_behind_a_rewind_goes_on_with_the_newest_curve(fake_wandb):
    fake_wandb(step=5)  # of the second wandb run the server has steps 1 to 4
    jsonl = begin_to_be_mirrored(fake_wandb.run_dir, range(1, 8))
    rewind(fake_wandb.run_dir, jsonl, 3, 4, 5, 6)
    mirror_until(fake_wandb.run_dir, lambda: len(fake_wandb.asked("log")) == 2)
    assert fake_wandb.asked("init") == [["online", "r-1-rewound-1"]]
    assert [values[1:] for values in fake_wandb.asked("log")] == [[5, 105.0], [6, 106.0]]


@pytest.mark.grid
def test_of_several_rewinds_the_last_one_has_the_curve(fake_wandb):
    fake_wandb()
    run_dir = fake_wandb.run_dir
    jsonl = begin_to_be_mirrored(run_dir, range(1, 8))

    def go_back_twice():
        rewind(run_dir, jsonl, 5, 6, 7)
        rewind(run_dir, jsonl, 3, 4, 5, rewinds=2)

    mirror_until(run_dir, lambda: len(fake_wandb.asked("log")) == 7, go_back_twice)
    assert fake_wandb.asked("init")[-1] == ["online", "r-1-rewound-2"]
    assert [values[1:] for values in fake_wandb.asked("log")][-5:] == NOW


@pytest.mark.parametrize(
    ("login", "mode"), [("return True", "online"), ("raise errors.UsageError('no key')", "offline")]
)
def test_auto_is_online_with_a_key_and_offline_without(fake_wandb, login, mode):
    fake_wandb(login=login)
    train(fake_wandb.run_dir, [1], run_info("auto"))
    assert fake_wandb.asked("init") == [[mode, "r-1"]]


def test_what_the_recipe_names_and_what_follows_from_it_is_told(fake_wandb):
    fake_wandb()
    words = ("track.wandb.project=pretraining", "track.wandb.entity=team", "track.wandb.tags=[a,b]", "launch.ranks=4")
    chosen = compose([*words, "batch.sequences_per_step=16", "batch.sequences_per_microbatch=2"]).require()
    derived = derive(chosen)
    info = replace(
        run_info(), config=asdict(chosen), degrees=derived.degrees, world=derived.world,
        accumulation=derived.accumulation, tokens_per_step=derived.tokens_per_step,
    )  # fmt: skip
    train(fake_wandb.run_dir, range(1, 3), info)
    sizes = {"world": 4, "accumulation": 2, "tokens_per_step": 16 * chosen.batch.context}
    told = {"pp": 1, "dp": 4, "cp": 1, "tp": 1, "ep": 1} | sizes
    assert fake_wandb.asked("told") == [["pretraining", "team", ["a", "b"], told]]


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("project", "p" * 129, "shorten it"),
        ("project", "team/project", "track.wandb.entity=team track.wandb.project=project"),
        *(("project", f"a{character}b", "track.wandb.project=a-b") for character in "\\#?%:"),
        ("tags", ["t" * 65], "shorten it"),
        ("tags", ["fine", ""], "leave it out"),
        ("project", "p" * 128, None),
        ("project", "größe 2 (a, b)", None),
        ("tags", ["t" * 64, "x / y: 100%"], None),
    ],
)
def test_check_refuses_what_wandb_refuses_and_nothing_else(key, value, fix):
    import wandb

    settings = {"project": {"project": value}, "tags": {"run_tags": value}}[key]
    with nullcontext() if fix is None else pytest.raises((wandb.errors.UsageError, ValueError)):
        wandb.Settings(**settings)
    chosen = schema.Recipe(track=schema.Track(wandb=schema.Wandb(**{key: value})))
    found = [problem for problem in check_recipe(chosen, {}) if problem.key.startswith("track.wandb")]
    assert len(found) == (fix is not None)
    assert all(fix in problem.fix for problem in found)


@pytest.mark.parametrize(("key", "value"), [("project", " "), ("entity", ""), ("entity", "a/b"), ("group", "g" * 129)])
def test_check_refuses_names_that_name_nothing(key, value):
    chosen = schema.Recipe(track=schema.Track(wandb=schema.Wandb(**{key: value})))
    found = [problem.key for problem in check_recipe(chosen, {}) if problem.key.startswith("track")]
    assert found == [f"track.wandb.{key}"]


def test_an_unreachable_server_means_offline_with_one_line(fake_wandb):
    fake_wandb(init="if mode == 'online': raise errors.Error('timed out\\nmore')")
    said, _, _ = train(fake_wandb.run_dir, [1, 2], run_info("online"))
    assert [mode for mode, _ in fake_wandb.asked("init")] == ["online", "offline"]
    assert len(fake_wandb.asked("log")) == 2
    assert len(said) == 1
    assert said[0].startswith("wandb: not reachable (Error: timed out), ")


@pytest.mark.parametrize("place", ["init", "log_body"])
def test_a_wandb_that_raises_is_one_line_and_its_log_has_the_rest(fake_wandb, place):
    fake_wandb(**{place: "raise RuntimeError('wandb is out of order')"})
    said, _, _ = train(fake_wandb.run_dir, range(1, 6), run_info("online"))
    assert said[-1] == "wandb: failed, training goes on: RuntimeError: wandb is out of order"
    assert len(said) == (1 if place == "init" else 2)
    assert "Traceback" in (fake_wandb.run_dir / "wandb.log").read_text()


@pytest.mark.parametrize("place", few_of(["init", "log_body"], lambda place: place == "init"))
def test_a_wandb_that_hangs_delays_no_step_and_is_ended_at_the_close(fake_wandb, place):
    fake_wandb(**{place: "time.sleep(3600)"})
    said, waits, close_s = train(fake_wandb.run_dir, range(1, 201), run_info("online"), close_timeout_s=1.0)
    assert waits <= SPURIOUS_WAITS
    assert 1.0 <= close_s < 10.0
    assert "not finished after 1 s" in said[-1]
    assert "wandb sync" in said[-1]


def test_a_mirror_that_is_killed_is_one_line(fake_wandb):
    fake_wandb(init="os.kill(os.getpid(), 9)")
    said, _, _ = train(fake_wandb.run_dir, [1, 2], run_info("online"))
    assert len(said) == 1
    assert "the mirror died (-9), training goes on" in said[0]


def test_the_mirror_of_a_killed_run_sends_all_that_was_written_and_ends_by_itself(fake_wandb):
    fake_wandb()
    body = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[2])
        from tests.unit.test_track_wandb import *
        run_dir = Path(sys.argv[1])
        save_run_info(run_dir, run_info("online"))
        jsonl, wandb = Jsonl(run_dir), Mirror("wandb", run_dir, print)
        jsonl.open(run_info("online")); wandb.open(run_info("online"))
        for step in range(1, 8): jsonl.report(report(step))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(body), str(fake_wandb.run_dir), str(Path(__file__).parents[2])]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while not fake_wandb.asked("finish") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert fake_wandb.asked("finish") == [[1]]
    assert len(fake_wandb.asked("log")) == 7


def test_the_real_wandb_offline_has_the_steps_of_metrics_jsonl(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "recipe.yaml").write_text("a: 1")
    # In a fresh environment wandb is read from a cold disk: its first start may take most of a minute.
    train(tmp_path, range(1, 6), branch("offline"), close_timeout_s=150)
    said, _, _ = train(tmp_path, range(4, 8), replace(branch("offline"), start_step=3), close_timeout_s=150)
    assert "offline; upload with: wandb sync" in said[0]
    segments = sorted((tmp_path / "wandb").glob("offline-run-*-r-1"))
    assert len(segments) == 2
    assert [steps_in_wandb(each) for each in segments] == [[1, 2, 3, 4, 5], [6, 7]]
    assert all((each / "files" / "recipe.yaml").read_text() == "a: 1" for each in segments), "artifacts are of copies"


@pytest.mark.grid
def test_the_real_wandb_has_a_whole_curve_for_each_rewind(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    jsonl = begin_to_be_mirrored(tmp_path, range(1, 8), "offline")

    def is_mirrored():
        return any(path.stat().st_size for path in tmp_path.glob("wandb/offline-run-*-r-1/*.wandb"))

    mirror_until(tmp_path, is_mirrored, lambda: rewind(tmp_path, jsonl, 3, 4, 5))
    (former,), (now,) = (list(tmp_path.glob(f"wandb/offline-run-*-{name}")) for name in ("r-1", "r-1-rewound-1"))
    assert steps_in_wandb(former)[:3] == [1, 2, 3]
    assert steps_in_wandb(now) == [1, 2, 3, 4, 5]
    assert (tmp_path / "wandb.log").read_text().count("Traceback") == 0


def steps_in_wandb(segment):
    """The steps of a wandb transaction log, read with wandb's own reader."""
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(segment)]
    result = subprocess.run(inspect, capture_output=True, text=True, check=False, timeout=60)
    if result.returncode != 0:
        pytest.skip(f"this wandb cannot read its own log back: {result.stderr[-200:]}")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    history = [record["history"] for record in records if record["type"] == "history"]
    return [each["step"]["num"] for each in history]


@pytest.mark.grid
def test_the_real_wandb_on_a_server_that_never_answers_delays_no_step(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as tarpit:  # accepts connections into its backlog and says nothing
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{tarpit.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        said, waits, close_s = train(tmp_path, range(1, 201), run_info("online"), close_timeout_s=3.0)
    assert waits <= SPURIOUS_WAITS
    assert close_s < 20.0
    assert "not finished after 3 s" in said[-1]


ANSWERS = {
    "html": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
    "json": b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"data":[]}',
    "bytes": b"\x00\xff\xfe garbage" * 50,
    "error": b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n",
    "too many": b"HTTP/1.1 429 no\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n",
    "cut off": b"",
}


@contextmanager
def serve(answer):
    """A server on this machine that gives everybody this answer and hangs up; None: it accepts and never answers; returns its
    address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply():
            with suppress(OSError):  # it is closed
                while True:
                    client, _ = server.accept()
                    with client, suppress(OSError):
                        client.recv(1 << 16)
                        client.sendall(answer)

        if answer is not None:
            threading.Thread(target=reply, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def free_address():
    """Where nobody listens: connections are refused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def train_against(address, run_dir, monkeypatch):
    """The real wandb, online, on that address, for as long as it takes."""
    monkeypatch.setenv("WANDB_BASE_URL", address)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    said, waits, close_s = train(run_dir, range(1, 201), run_info("online"), close_timeout_s=CLOSE_TIMEOUT_S)
    assert waits <= SPURIOUS_WAITS
    assert close_s < CLOSE_TIMEOUT_S + 20  # on a machine that has other things to do
    return said


@pytest.mark.grid
@pytest.mark.parametrize("kind", ANSWERS)
def test_the_real_wandb_on_a_server_that_answers_garbage_keeps_the_curve_offline(kind, tmp_path, monkeypatch):
    with serve(ANSWERS[kind]) as address:
        said = train_against(address, tmp_path, monkeypatch)
    assert said[0].startswith("wandb: not reachable (")
    (segment,) = (tmp_path / "wandb").glob("offline-run-*-r-1")
    assert steps_in_wandb(segment) == list(range(1, 201))


@pytest.mark.grid
def test_the_real_wandb_where_connections_are_refused_keeps_the_curve_offline(tmp_path, monkeypatch):
    said = train_against(free_address(), tmp_path, monkeypatch)
    assert said[0].startswith("wandb: not reachable (")
    (segment,) = (tmp_path / "wandb").glob("offline-run-*-r-1")
    assert steps_in_wandb(segment) == list(range(1, 201))


@pytest.mark.grid
def test_the_real_wandb_on_a_full_disk_says_that_there_are_gaps(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "wandb").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(tmp_path / "wandb")]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small disk takes root")
    try:
        said, waits, _ = train(tmp_path, range(1, 2001), run_info("offline"), close_timeout_s=CLOSE_TIMEOUT_S)
    finally:
        subprocess.run(["umount", str(tmp_path / "wandb")], check=True)
    assert waits <= SPURIOUS_WAITS
    assert any("no room at" in line for line in said)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2000


@pytest.mark.grid
def test_offline_segments_join_to_one_curve_where_wandb_was_killed(tmp_path, monkeypatch):
    """What it was given and had not written yet is not there; the steps behind the checkpoint are, and are trained again."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    save_run_info(tmp_path, run_info("offline"))
    jsonl, wandb = Jsonl(tmp_path), Mirror("wandb", tmp_path, print)
    jsonl.open(run_info("offline"))
    wandb.open(run_info("offline"))
    for step in range(1, 1501):
        jsonl.report(report(step))
    segment = wait_for_file(tmp_path / "wandb", "offline-run-*-r-1/*.wandb", more_than_bytes=1 << 18)
    mirror = wandb._process.pid
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(mirror)], capture_output=True, text=True, check=False)
    for pid in (*map(int, children.stdout.split()), mirror):
        os.kill(pid, signal.SIGKILL)
    written = steps_in_wandb(segment.parent)
    assert 0 < written[-1] < 1500
    train(tmp_path, range(101, 1601), run_info("offline", start_step=100), close_timeout_s=CLOSE_TIMEOUT_S)
    segments = sorted((tmp_path / "wandb").glob("offline-run-*-r-1"))
    assert [step for each in segments for step in steps_in_wandb(each)] == list(range(1, 1601))


def wait_for_file(folder, pattern, more_than_bytes):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in folder.glob(pattern):
            if path.stat().st_size > more_than_bytes:
                return path
        time.sleep(0.02)
    raise AssertionError(f"{pattern} has not grown in {folder}")


class Waiting(Mirror):
    """Sabotage: asks the mirror, if only for a moment, at each report."""

    def report(self, report):
        select.select([self._process.stdout], [], [], 1e-4)
        super().report(report)


def test_a_report_that_waits_for_the_mirror_shows(fake_wandb):
    fake_wandb(init="time.sleep(3600)")
    _, waits, _ = train(fake_wandb.run_dir, range(1, 201), run_info("online"), close_timeout_s=0.1, kind=Waiting)
    assert waits > 10 * SPURIOUS_WAITS


def test_a_mirror_that_hangs_ends_some_time_after_its_training_process_was_killed(fake_wandb, monkeypatch):
    """It would keep its memory, and the wandb run, for ever: nobody is left to end it."""
    fake_wandb(init="time.sleep(3600)")
    body = f"""
        import sys
        from pathlib import Path
        from framework.lease import Lease
        from framework.track import mirror
        mirror.ALONE_S = 0.5
        run = Path({str(fake_wandb.run_dir)!r})
        sys.exit(mirror.main("wandb", run, Lease(run)))
    """
    save_run_info(fake_wandb.run_dir, run_info("online"))
    mirror = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)], stdin=subprocess.PIPE, start_new_session=True
    )
    time.sleep(0.5)
    assert mirror.poll() is None
    mirror.stdin.close()
    assert mirror.wait(30) == -signal.SIGKILL


def test_charts_have_a_name_per_axis_and_rank_and_nothing_that_was_not_measured():
    traffic = {"batch": {"calls": 2, "bytes": 512}}
    measured = replace(report(3), traffic=traffic, validation_losses={"web": 3.5})
    values = chart_values({**asdict(measured), "unix_s": 1.0})
    assert values["validation_loss/web"] == 3.5
    assert values["traffic/batch/bytes"] == 512
    assert values["tokens_per_s_per_rank/1"] == 330.0
    assert not {"mfu", "validation_loss", "unix_s", "traffic"} & set(values)


def test_many_ranks_are_charted_by_the_slowest_and_the_fastest():
    rates = [float(rank) for rank in range(MAX_RANKS_CHARTED + 1)]
    values = chart_values({"step": 1, "tokens_per_s_per_rank": rates})
    assert values == {"step": 1, "tokens_per_s_per_rank/slowest": 0.0, "tokens_per_s_per_rank/fastest": 64.0}


def test_one_line_uploads_all_segments_of_a_resumed_run(tmp_path):
    """Each start has a segment of its own; `wandb sync` puts those of one run into their order."""
    run = tmp_path / "it's a run"
    for name in ("offline-run-20260101_000000-x", "offline-run-20260102_000000-x", "run-20260103_000000-x"):
        (run / "wandb" / name).mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("run-20260103_000000-x")
    command = write_sync(run).replace("wandb sync", "printf '%s\\n'", 1)
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [Path(line).name[:11] for line in found] == ["offline-run", "offline-run", "run-2026010"]


def test_imbalance_is_charted_by_groups_of_layers():
    few = {"layers.1": 1.5, "layers.2": 2.0}
    assert chart_values({"step": 1, "expert_imbalance": few}) == {
        "step": 1, "expert_imbalance/layers.1": 1.5, "expert_imbalance/layers.2": 2.0
    }  # fmt: skip
    many = {f"layers.{layer}": float(layer) for layer in range(3, 61)}
    charts = chart_values({"step": 1, "expert_imbalance": many})
    assert len(charts) == 1 + 8
    assert charts["expert_imbalance/layers.3-10"] == 10.0
    assert charts["expert_imbalance/layers.59-60"] == 60.0


def test_the_mirror_of_a_start_that_was_held_for_dead_sends_and_finishes_nothing_more(fake_wandb):
    """The run at wandb is that of the start which goes on."""
    fake_wandb()
    run_dir, info = fake_wandb.run_dir, run_info("online")
    lease = take(run_dir, Holder("n1", 1, "then"))
    save_run_info(run_dir, info, lease)
    jsonl, wandb = Jsonl(run_dir, lease=lease), Mirror("wandb", run_dir, print, lease=lease)
    jsonl.open(info)
    wandb.open(info)
    jsonl.report(report(1))
    deadline = time.monotonic() + 60
    while not fake_wandb.asked("log"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    take(run_dir, Holder("n2", 2, "now"))
    jsonl.report(report(2))
    wandb.close(86)
    assert wandb._process.returncode == -signal.SIGKILL
    assert [values[:1] for values in fake_wandb.asked("log")] == [[1]]
    assert fake_wandb.asked("finish") == []
