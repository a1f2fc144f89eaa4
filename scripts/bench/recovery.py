"""Seconds from `kill -9` of a rank to the next new step, on this machine, for the quickstart.

    python scripts/bench/recovery.py [--kills 5] [--every 50] [--root DIR] [--json FILE] [OVERRIDE ...]

`meshwright train` of the quickstart is killed by `meshwright inject` again and again, a rank and a step drawn by the seed, and
started again as soon as it has ended, as SLURM's requeue inside an allocation does. A new step is one that no start before has
trained. Parts, which add up:

    end        from the kill until the command has ended: the launcher notes the death and ends the other ranks
    import     until ranks have started, connected and read the recipe: processes, imports, plan
    load       until the first step may begin: model, checkpoint, data
    retrain    steps since the checkpoint that were trained before, and the first new one
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

RUN = "recovery"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Recovery:
    """One kill. step: behind which; resumed: the step that the next start went on from. Seconds."""

    rank: int
    step: int
    resumed: int
    end: float
    import_: float
    load: float
    retrain: float

    @property
    def total(self) -> float:
        return self.end + self.import_ + self.load + self.retrain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root", type=Path, help="where the run is written; a temporary folder by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        rows = list(measure(Path(root), options))
    for title, values in (
        ("end", [row.end for row in rows]),
        ("import", [row.import_ for row in rows]),
        ("load", [row.load for row in rows]),
        ("retrain", [row.retrain for row in rows]),
        ("kill to the next new step", [row.total for row in rows]),
    ):
        print(f"{title:26}  median {median(values):5.1f} s, worst {max(values):5.1f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"total": row.total} for row in rows], indent=1))


def measure(root: Path, options: argparse.Namespace) -> Any:
    """Yields a row for each kill."""
    rng, folder = random.Random(options.seed), root / RUN
    command = [sys.executable, "-m", "framework.cli", "train", "experiment=quickstart", f"run.root={root}"]
    command += [f"run.id={RUN}", f"checkpoint.every_steps={options.every}", "train.steps=100000", *options.overrides]
    running = start(command)
    try:
        reached = wait_for_step(folder, options.every, running)
        for _ in range(options.kills):
            rank, step = rng.randrange(2), reached + rng.randrange(options.every, 2 * options.every)
            inject(folder, f"kill rank={rank} step={step}")
            running.wait(TIMEOUT_S)
            ended = time.time()
            killed = json.loads((folder / "faults.log").read_text().splitlines()[-1])
            before = read_events(folder)
            last = max(each["step"] for each in before if each["event"] == "step")
            running = start(command)
            reached = wait_for_step(folder, max(last, step) + 1, running)
            yield split(killed, ended, read_events(folder)[len(before) :], rank, max(last, step))
            print("killed rank", rank, "behind step", step, flush=True)
    finally:
        running.terminate()
        running.wait(TIMEOUT_S)


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def inject(folder: Path, fault: str) -> None:
    command = [sys.executable, "-m", "framework.cli", "inject", str(folder), *fault.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read_events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "goodput.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for_step(folder: Path, step: int, running: subprocess.Popen[bytes]) -> int:
    """The step that it has reached, at least `step`."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        steps = [each["step"] for each in read_events(folder) if each["event"] == "step"]
        if steps and steps[-1] >= step:
            return int(steps[-1])
        if running.poll() is not None:
            raise SystemExit(f"the run has ended with {running.returncode} in front of step {step}")
        time.sleep(0.05)
    raise SystemExit(f"no step {step} within {TIMEOUT_S:.0f} s")


def split(killed: dict[str, Any], ended: float, after: Sequence[dict[str, Any]], rank: int, step: int) -> Recovery:
    """The parts of one recovery. after: events since the command ended."""
    begin = next(each for each in after if each["event"] == "begin")
    go = next(each for each in after if each["event"] == "go")
    new = next(each for each in after if each["event"] == "step" and each["step"] > step)
    times = (killed["unix_s"], ended, begin["unix_s"], go["unix_s"], new["unix_s"])
    parts = [later - sooner for sooner, later in pairwise(times)]
    return Recovery(rank, step, go["step"], *parts)


if __name__ == "__main__":
    main()
