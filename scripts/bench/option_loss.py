"""The effect of a recipe's option on the loss of the quickstart after 200 steps, over seeds, beside the same seeds' exact runs.

    python scripts/bench/option_loss.py --seeds 10 --option precision.moments=int8 --same optim.lr=0.004004
    python scripts/bench/option_loss.py --option "precision=bf16 precision.master=none" --all launch.ranks=1

An option is overrides of the recipe, separated by spaces. Any change of a run's numbers, however small, has grown to some
tenths of a percent after 200 steps, up or down. `--same` takes what changes nothing that matters, as a learning rate 0.1%
higher: each is a row of its own, and with the exact run they are the reference of a second table, free of one run's luck.

Finished runs stay in --folder and are not repeated: an interrupted call goes on, and a later one may ask for more.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from framework.track.jsonl import METRICS_FILE, read_records

EXACT = ""
TAIL = 20  # steps, whose mean loss varies less than that of one
RECIPE = ("experiment=quickstart", "train.sample=null", "checkpoint.every_steps=null")


@dataclass(frozen=True)
class Losses:
    """Where a run has ended, nats a token: of the last step, the mean of the last TAIL, and of the validation text."""

    last: float
    tail: float
    validation: float


@dataclass(frozen=True)
class Trial:
    """A run of the quickstart. option: overrides, separated by spaces; all_sides: those that the exact run has, too."""

    option: str
    seed: int
    steps: int
    all_sides: tuple[str, ...]

    @property
    def id(self) -> str:
        said = "-".join(("-".join(self.all_sides), self.option or "exact"))
        return re.sub(r"[^\w.-]+", "-", f"{said}-{self.steps}-{self.seed}").strip("-")

    def losses(self, folder: Path) -> Losses | None:
        """None where the run has not ended."""
        records = list(read_records(folder / self.id / METRICS_FILE))
        if not records or records[-1]["step"] != self.steps:
            return None
        losses = [float(record["loss"]) for record in records]
        return Losses(losses[-1], statistics.mean(losses[-TAIL:]), float(records[-1]["validation_loss"]))

    def run(self, folder: Path) -> None:
        shutil.rmtree(folder / self.id, ignore_errors=True)  # what an interrupted call has left
        overrides = (
            *(f"train.steps={self.steps}", f"train.validate_every_steps={self.steps}", f"train.seed={self.seed}"),
            *(f"run.root={folder}", f"run.id={self.id}", *self.all_sides, *self.option.split()),
        )
        command = [sys.executable, "-m", "framework", "train", *RECIPE, *overrides]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{' '.join(command)}\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")


def run_all(trials: Sequence[Trial], folder: Path, jobs: int, limit_s: float) -> None:
    """Run what has not ended yet, seed by seed; none is started once `limit_s` are over."""
    stop = time.monotonic() + limit_s
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda each: each.run(folder) if time.monotonic() < stop else None, trials))


def compare(found: Mapping[Trial, Losses], reference: Mapping[int, Losses], option: str) -> str:
    """For each measure: mean of the relative differences, standard deviation, largest, and how many are off by more than 1%."""
    own = {trial.seed: losses for trial, losses in found.items() if trial.option == option and trial.seed in reference}
    cells = []
    for measure in (field.name for field in fields(Losses)):
        off = [100 * (getattr(own[seed], measure) / getattr(reference[seed], measure) - 1) for seed in own]
        if not off:
            return "none has ended"
        spread = statistics.stdev(off) if len(off) > 1 else 0.0
        beyond = sum(abs(each) > 1 for each in off)
        cells.append(f"{statistics.mean(off):+.2f}%, {spread:.2f}, {max(off, key=abs):+.1f}%, {beyond} of {len(off)}")
    return " | ".join(cells)


def find_reference(found: Mapping[Trial, Losses], options: Sequence[str]) -> dict[int, Losses]:
    """The mean over the options' runs, for each seed of which all have ended."""
    of_seed: dict[int, list[Losses]] = {}
    for trial, losses in found.items():
        if trial.option in options:
            of_seed.setdefault(trial.seed, []).append(losses)
    return {
        seed: Losses(*(statistics.mean(each) for each in zip(*map(astuple, runs), strict=True)))
        for seed, runs in of_seed.items()
        if len(runs) == len(options)
    }


def report(found: Mapping[Trial, Losses], options: Sequence[str], same: Sequence[str]) -> Iterator[str]:
    """The lines of both tables and each seed's losses of the last step."""
    yield "last step: " + " ".join(f"{trial.seed}" for trial in found if trial.option == EXACT) + "  (seeds)"
    for option in options:
        losses = [f"{losses.last:.4f}" for trial, losses in found.items() if trial.option == option]
        yield f"  {option or 'exact'}: {' '.join(losses)}"
    columns = f"mean, standard deviation, largest, beyond 1%: last step | last {TAIL} | validation"
    yield f"beside the exact run: {columns}"
    exact = find_reference(found, [EXACT])
    yield from (f"  {option}: {compare(found, exact, option)}" for option in options if option != EXACT)
    yield f"beside the mean of exact and --same, a row's own run left out: {columns}"
    for option in options if same else ():
        reference = find_reference(found, [each for each in (EXACT, *same) if each != option])
        yield f"  {option or 'exact'}: {compare(found, reference, option)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--option", action="append", default=[], help="overrides, separated by spaces; may be repeated")
    parser.add_argument("--same", action="append", default=[], help="overrides that change nothing that matters")
    parser.add_argument("--all", nargs="*", default=[], help="overrides of every run, the exact one included")
    parser.add_argument("--seeds", type=int, default=10, help="1 to this")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/option_loss"))
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no run after so many seconds")
    chosen = parser.parse_args()
    options = [EXACT, *chosen.same, *chosen.option]
    trials = [
        Trial(option, seed, chosen.steps, tuple(chosen.all))
        for seed in range(1, chosen.seeds + 1)
        for option in options
    ]
    run_all([each for each in trials if each.losses(chosen.folder) is None], chosen.folder, chosen.jobs, chosen.limit_s)
    found = {each: losses for each in trials if (losses := each.losses(chosen.folder)) is not None}
    print("\n".join(report(found, options, chosen.same)))


if __name__ == "__main__":
    main()
