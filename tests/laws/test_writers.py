"""Who writes into a run's folder: each place is known here, with what keeps a start that was held for dead from harm there.

A new writer goes through `framework/lease.py`: `lease.replacing(path)` or `lease.write` for files that are replaced as a whole,
`lease.remove`, and for lines that are added `lease.check()` before each.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import framework

PACKAGE = Path(framework.__file__).parent
ROOMS = ("object_store.py", "checkpoint", "track", "monitor", "faults", "train", "launch", "commands", "lease.py")
WRITES = {
    "create_file", "write_file", "write_json", "write_atomically",
    "write_text", "write_bytes", "touch", "mkdir", "makedirs", "rename", "replace", "unlink", "rmdir", "rmtree", "copytree",
    "savefig", "mkstemp", "mkdtemp", "symlink_to", "remove_all", "pipe_file", "rm", "rm_file",
}  # fmt: skip

CHECKED = "the lease is checked right before"
IN_WORKPLACE = "in the workplace, which is gone for a stale process, or renames out of it"
EPOCH = (
    "below names of this epoch, and counted only by it; what is removed or amended: the lease is checked right before"
)
OUTSIDE = "before there is a run, or outside of it"
ASKED = "a request of a user's, who holds no lease; rank 0 takes it away by its lease"
MEMORY = "this node's memory, below the folder of the start's epoch, which the next start renames"
TEMPORARY = "a temporary folder, which `doctor --measure` makes, hands to its ranks and removes: there is no run"
LOCK = "the lock itself; an empty file, or the name of the holder once the lock is had"

KNOWN = {
    "checkpoint/commit.py set_aside": IN_WORKPLACE,
    "checkpoint/folder.py LocalFolder.begin": IN_WORKPLACE,
    "checkpoint/folder.py LocalFolder.create": IN_WORKPLACE,
    "checkpoint/folder.py LocalFolder.give_name": IN_WORKPLACE,
    "checkpoint/folder.py LocalFolder.prepare": IN_WORKPLACE,
    "checkpoint/folder.py LocalFolder.remove": IN_WORKPLACE,
    "checkpoint/folder.py LocalFolder.write": IN_WORKPLACE,
    "checkpoint/folder.py ObjectFolder.begin": EPOCH,
    "checkpoint/folder.py ObjectFolder.discard": EPOCH,
    "checkpoint/folder.py ObjectFolder.enter": EPOCH,
    "checkpoint/folder.py ObjectFolder.give_up": EPOCH,
    "checkpoint/folder.py ObjectFolder.prepare": EPOCH,
    "checkpoint/folder.py ObjectFolder.remove": EPOCH,
    "checkpoint/folder.py ObjectFolder.rename": EPOCH,
    "checkpoint/folder.py ObjectFolder.write": EPOCH,
    "object_store.py ObjectPath.create": "the few ways to change a store; who calls them stands here as well",
    "object_store.py ObjectPath.remove_all": "the few ways to change a store; who calls them stands here as well",
    "object_store.py ObjectPath.unlink": "the few ways to change a store; who calls them stands here as well",
    "object_store.py ObjectPath.write_bytes": "the few ways to change a store; who calls them stands here as well",
    "checkpoint/storage.py find_probe_error": OUTSIDE,
    "checkpoint/held.py HeldSteps._load": MEMORY,
    "checkpoint/held.py _keep_head": MEMORY,
    "checkpoint/neighbors.py CopyKeeper._collect": MEMORY,
    "checkpoint/neighbors.py CopyKeeper._commit": MEMORY,
    "checkpoint/neighbors.py CopyKeeper._forget": MEMORY,
    "checkpoint/neighbors.py _write_head": MEMORY,
    "checkpoint/node_memory.py NodeMemory.enter": MEMORY,
    "checkpoint/node_memory.py NodeMemory.leave": MEMORY,
    "checkpoint/node_memory.py _remove": MEMORY,
    "checkpoint/node_memory.py NodeMemory.make": MEMORY,
    "checkpoint/node_memory.py make_file": MEMORY,
    "checkpoint/save.py Saver._commit.write": IN_WORKPLACE,
    "launch/directory.py RunDirectory.create": OUTSIDE,
    "launch/directory.py write_record": "called for a file of a workplace, or for a run that is just made",
    "launch/directory.py RunDirectory._lock_at_once": LOCK,
    "launch/directory.py RunDirectory.attend": LOCK,
    "launch/directory.py RunDirectory._try_lock": LOCK,
    "launch/directory.py RunDirectory._replace_lock": LOCK,
    "launch/places.py place_checkpoints": OUTSIDE,
    "launch/places.py refuse_unwritable": OUTSIDE,
    "launch/exports.py Exports._export": CHECKED,
    "launch/directory.py _claim_next": OUTSIDE,
    "commands/inject.py damage": "harm to a checkpoint that a user asks for by `meshwright inject`",
    "launch/identity.py keep_tokenizer": IN_WORKPLACE,
    "launch/resume.py copy_curves": IN_WORKPLACE,
    "commands/evaluate.py run": "a temporary folder, and --json: a file that a user names, as export's folder",
    "commands/evaluate.py evaluate_command": "the temporary folder of `run`, which holds a copy of the run's tokenizer",
    "commands/evaluate.py import_tasks": OUTSIDE,
    "commands/measure.py measure_command": TEMPORARY,
    "commands/measure.py _start_ranks": TEMPORARY,
    "commands/measure.py _measure": TEMPORARY,
    "train/probe.py probe": IN_WORKPLACE,
    "train/probe.py _leave_note": IN_WORKPLACE,
    "commands/stop.py _wait_until_taken": ASKED,
    "commands/stop.py _ask": ASKED,
    "commands/submit.py submit_sweep": "the folder of a sweep, which no rank writes into",
    "commands/submit.py check_machine": OUTSIDE,
    "commands/submit.py _queue": "RUN/slurm/jobs, under the lock, for the script's chain alone",
    "commands/submit.py _write": "makes RUN/slurm, under the lock and the lease",
    "launch/process.py leave_out": CHECKED,
    "launch/process.py claim_outcome": "checked, and the file is of this restart alone",
    "commands/timings.py time_disk": "a file of this process's own beside runs, which it removes: no start reads it",
    "commands/search.py _write_layouts": "the folder of a search, under a name of its own: it holds runs and is none",
    "commands/search.py _rank_again": "the same folder's cluster.yaml: of a search, no rank writes or reads it",
    "track/jsonl.py Jsonl.open": "an open that writes nothing; the newer start replaces the file",
    "track/jsonl.py Jsonl.rewind": "as `Jsonl.open`",
    "track/jsonl.py truncate": IN_WORKPLACE,
    "track/jsonl.py Lines.__init__": "goodput checks before each note; a newer start's cursor cuts the ledger's lines off",
    "track/sample_ledger.py SampleLedger.begin": "makes the folder of the ledger's lines",
    "track/mirror.py Mirror.open": CHECKED,
    "track/trackers.py Csv.log": "a mirror checks before it sends; a newer start writes the file anew",
    "track/trackers.py TensorBoard.open": "as `Csv.log`",
    "track/trackers.py Html._write": "as `Csv.log`",
    "train/profiler.py StepProfiler.close": CHECKED,
    "train/reference.py _write": "beside the token store, whole and named by what it depends on: all starts write the same",
    "monitor/hang.py write_ranks": CHECKED,
    "monitor/watchdog.py Watchdog._keep_flight_records": CHECKED,
}


def find_writers(path: Path) -> Iterator[str]:
    """`FUNCTION` of each call in a file that changes a file system."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = (*names, node.name)
        if isinstance(node, ast.Call) and _writes(node):
            yield ".".join(names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, names)

    yield from visit(ast.parse(path.read_text()), ())


def _writes(call: ast.Call) -> bool:
    is_method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "open":
        modes = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        return any(len(mode) < 4 and set(mode) & set("wax+") for mode in modes)
    if name == "replace":  # of os and of paths; that of texts takes two arguments, that of dataclasses is a function
        return is_method and (len(call.args) == 1 or ast.unparse(call.func) == "os.replace")
    return name in WRITES


def writers_of(package: Path) -> set[str]:
    found = set()
    for path in sorted(package.rglob("*.py")):
        place = str(path.relative_to(package))
        if place.startswith(ROOMS) and place != "lease.py":
            found |= {f"{place} {function.partition('.<')[0]}" for function in find_writers(path)}
    return found


def test_every_writer_into_a_run_is_known() -> None:
    found = writers_of(PACKAGE)
    assert found - KNOWN.keys() == set(), "go through framework/lease.py, then say here what keeps a stale process out"
    assert KNOWN.keys() - found == set(), "no longer there"


def test_a_writer_is_seen(tmp_path: Path) -> None:
    text = """
import os
class A:
    def f(self, path): path.write_text("x".replace("a", "b"))
    def g(self, path): return open(path), path.open("rb"), path.name.replace("a", "b")
    def h(self, path): os.replace(path, path)
    def i(self, path): path.replace(path)
def j(path): open(path, "a")
"""
    (tmp_path / "track").mkdir()
    (tmp_path / "track" / "a.py").write_text(text)
    assert writers_of(tmp_path) == {f"track/a.py {name}" for name in ("A.f", "A.h", "A.i", "j")}
