"""Forecasts held against published training runs of other systems: Megatron-Bridge, llm-foundry, Automodel.

    python scripts/bench/published.py --csv FILE [--rows WORD [--parts]] [--json] [--unfitted | --fit]

Each row of the file becomes a layout, a machine (recipes/cluster/) and the implementation profile of its system
(`scripts/bench/systems.py`). Rows fall into two halves by a hash of what they are, not of what was measured: whatever is fitted
is fitted to the first, and both are reported.
"""

import argparse
import csv
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log
from pathlib import Path
from statistics import fmean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from framework.plan.candidate import Candidate
from framework.plan.shape import DEFAULT, ModelShape, make_shape
from framework.plan.time import TimeForecast, TimeModel
from scripts.bench.published_models import make_config
from scripts.bench.systems import FITTED, UNFITTED, UNITS, Fitted, System, find_system

# What tells rows apart: all that was chosen before the run.
CHOSEN = (
    *("source", "release", "task", "model", "note", "system", "gpus", "precision", "gbs", "mbs", "seq"),
    *("fsdp", "tp", "pp", "cp", "vp", "ep"),
)
HALVES = ("fitting", "held back")
# The rules of tensor parallelism do not know the projections into and out of a latent space.
LATENT = replace(DEFAULT, model=replace(DEFAULT.model, tp_plan={"*_latent_proj": "replicated"}))
ADAPTED = replace(DEFAULT, adapter=replace(DEFAULT.adapter, kind="lora", rank=16))


@dataclass(frozen=True)
class Run:
    """A published run. cells: as in the file; printed: tokens per second and GPU, of which tflops counts FLOPs."""

    cells: Mapping[str, str]
    printed: float
    tflops: float

    @property
    def half(self) -> str:
        """The half that it belongs to, by what was chosen before the run."""
        text = "|".join(self.cells[name] for name in CHOSEN)
        return HALVES[hashlib.sha256(text.encode()).digest()[0] % 2]

    def number(self, name: str) -> int:
        """A count; 1 where the file has none."""
        text = self.cells[name].split()[0] if self.cells[name].strip() else "1"
        return int(text) if text.isdigit() and int(text) else 1

    @property
    def is_mixture(self) -> bool:
        """Whether its model has experts."""
        return not any(name in self.cells["model"].upper() for name in ("LLAMA", "MPT"))

    @property
    def label(self) -> str:
        """The run in few words."""
        sizes = " ".join(f"{name}{self.cells[name]}" for name in ("gpus", "mbs", "seq", "tp", "pp", "cp", "vp", "ep"))
        return " ".join([*(self.cells[name] for name in ("release", "model", "system", "precision")), sizes])


def read_runs(path: Path) -> list[Run]:
    """The runs of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [Run(row, float(row["tokens_s_gpu"]), float(row["tflops_gpu"] or "nan")) for row in csv.DictReader(file)]


def candidate_of(run: Run, system: System, layers: int) -> Candidate:
    """The layout of a run of a model of so many layers."""
    gpus, tp, pp, cp, mbs = map(run.number, ("gpus", "tp", "pp", "cp", "mbs"))
    # Megatron counts embedding and head as layers; each of our stages has a layer.
    virtual = min(run.number("vp"), layers // pp) if pp > 1 else 1
    dp = gpus // (tp * pp * cp)
    shard = dp * cp if system.zero else 1
    return Candidate(
        dp=dp,
        cp=cp,
        tp=tp,
        pp=pp,
        # Where Automodel's table has none, its configurations of mixtures (examples/benchmark) have all ranks.
        ep=dp * cp if run.is_mixture and not run.cells["ep"].isdigit() else run.number("ep"),
        sequence=tp > 1 and run.cells["source"] != "Automodel",
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual=virtual,
        zero=system.zero,
        shard=shard,
        checkpointing=system.checkpointing,
        sequences=mbs,
        accumulation=max(1, run.number("gbs") // (dp * mbs)),
        context=run.number("seq"),
        ranks_per_node=min(system.cluster.ranks_per_node, gpus),
    )


@cache
def read_shape(model: str, context: int, adapts: bool) -> ModelShape:
    """The shape of a published model, or beside adapters of rank 16."""
    return make_shape(make_config(model, context), ADAPTED if adapts else LATENT if "emotron" in model else DEFAULT)


def forecast(run: Run, fitted: Fitted = FITTED) -> TimeForecast:
    """The forecast of a run."""
    system = find_system(run.cells, fitted)
    adapts = run.cells["task"] == "LoRA"
    shape = read_shape(run.cells["model"], run.number("seq"), adapts)
    chosen = replace(system.settings, adapter=(ADAPTED if adapts else DEFAULT).adapter)
    return TimeModel(shape, chosen, system.cluster, system.profile).forecast(
        candidate_of(run, system, shape.num_layers)
    )


def groups_of(run: Run) -> Iterator[str]:
    """The lines of the table that a run counts in."""
    source, precision = run.cells["source"], run.cells["precision"].lower()
    kind = "mixtures" if run.is_mixture else "dense"
    yield source
    if source == "Megatron-Bridge":
        yield f"{source}, {kind}"
        yield f"{source}, {run.cells['system'].removeprefix('DGX-')}"
    elif source == "llm-foundry":
        dtype = "fp8" if "fp8" in precision else "bf16"
        yield f"{source}, {run.cells['system']}, {dtype}"
        if run.cells["system"] == "h100_80gb" and dtype == "bf16":
            yield f"{source}, h100_80gb, bf16, {'above' if run.number('seq') > 8192 else 'up to'} 8k tokens"


def summarize(errors: Sequence[tuple[Run, float]]) -> dict[str, dict[str, tuple[int, float, float, float]]]:
    """Each line and half: (runs, median and 90th percentile of the absolute error, median of the error)."""
    found: dict[str, dict[str, list[float]]] = {}
    for run, error in errors:
        for name in groups_of(run):
            for half in ("all", run.half):
                found.setdefault(name, {}).setdefault(half, []).append(error)
    return {
        name: {
            half: (
                len(each),
                *np.quantile(np.abs(each), (0.5, 0.9)),
                median(each),
            )
            for half, each in halves.items()
        }
        for name, halves in found.items()
    }


def print_summary(errors: Sequence[tuple[Run, float]]) -> None:
    """The table of docs/foresight.md."""
    columns = ("all", *HALVES)
    print("| runs | " + " | ".join(f"{half}: n, median, p90 (signed median)" for half in columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for name, halves in sorted(summarize(errors).items()):
        cells = [
            f"{each[0]}, {each[1]:.1%}, {each[2]:.1%} ({each[3]:+.1%})" if (each := halves.get(half)) else "-"
            for half in columns
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def fit(runs: Sequence[Run], fitted: Fitted) -> Fitted:
    """The constants, each in turn by steps that halve, by the mean of |log(forecast/published)|, at most 0.6 a run."""

    def loss(chosen: Fitted) -> float:
        ratios = (forecast(run, chosen).tokens_per_s_and_rank / run.printed for run in runs)
        return fmean(min(abs(log(ratio)), 0.6) for ratio in ratios)

    best, step = loss(fitted), 0.16
    while step > 0.01:
        for name in UNITS:
            for factor in (1 + step, 1 - step):
                while (found := loss(tried := replace(fitted, **{name: factor * getattr(fitted, name)}))) < best - 1e-4:
                    best, fitted = found, tried
        step /= 2
        print(f"{best:.4f} {fitted}", flush=True)
    return fitted


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--rows", default=None, metavar="WORD", help="also each run whose label has the word; '' for all"
    )
    parser.add_argument("--parts", action="store_true", help="where the predicted time goes, below each row")
    parser.add_argument(
        "--json", action="store_true", help="one object: by line and half runs, median, p90, signed median"
    )
    fits = parser.add_mutually_exclusive_group()
    fits.add_argument("--unfitted", action="store_true", help="without the constants that were fitted")
    fits.add_argument("--fit", action="store_true", help="fit them to the fitting half first; an hour")
    options = parser.parse_args(arguments)
    runs = read_runs(options.csv)
    fitted = UNFITTED if options.unfitted else FITTED
    if options.fit:
        fitted = fit([run for run in runs if run.half == HALVES[0]], FITTED)
    errors = []
    for run in runs:
        found = forecast(run, fitted)
        error = found.tokens_per_s_and_rank / run.printed - 1
        errors.append((run, error))
        if options.rows is not None and options.rows in f"{run.cells['source']} {run.label}":
            mark = "" if run.half == HALVES[0] else "held back"
            print(f"{error:+7.1%}  {run.printed:>9,.0f} {found.tokens_per_s_and_rank:>9,.0f}  {run.label}  {mark}")
            if options.parts:
                parts = sorted(found.parts.items(), key=lambda part: -part[1])
                print(
                    "         "
                    + ", ".join(f"{name} {s / found.step_s:.1%}" for name, s in parts if s > 0.004 * found.step_s)
                )
    if options.json:
        print(json.dumps(summarize(errors)))
    else:
        print_summary(errors)
    return 0


if __name__ == "__main__":
    sys.exit(main())
