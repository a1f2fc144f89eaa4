"""Validation loss of the quickstart by learning rate and width, with muP and without: which rate is best at which width.

    python scripts/bench/learning_rates.py --limit-s 500                         run what has not ended yet, print the table
    python scripts/bench/learning_rates.py --limit-s 0 --picture docs/rates.png  draw what has

One process of one thread takes one run after the other; two may share a --found, with other --ways. The model's embedding and
head are untied; heads grow in number, not in size. Widths are multiples of the base's, which is one model with muP and without.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import exp2, log2
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from framework import Loader, build, compose, connect, load_config, make_plan, prepare, train_step
from framework.data.loader import validation_batches
from framework.data.prepared import open_found
from framework.optim.groups import learning_rate
from framework.train.step import run_alone
from framework.train.validation import Validation

BASE = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}
MUP_BASE = "{" + ",".join(f"{name}:{value}" for name, value in BASE.items()) + "}"
WAYS = {"without": (), "muP": (f"model.mup_base={MUP_BASE}",)}
RECIPE = ("experiment=quickstart", "launch.ranks=1", "model.config.tie_word_embeddings=false")


@dataclass(frozen=True)
class Trial:
    """A run. times: its widths over the base's; power: of 2, its learning rate over 1e-3. common: overrides of every run."""

    way: str
    times: int
    power: float
    seed: int
    steps: int
    common: tuple[str, ...]

    @property
    def width(self) -> int:
        return self.times * BASE["hidden_size"]

    def train(self) -> float:
        """The validation loss after the last step."""
        widths = (f"model.config.{name}={self.times * value}" for name, value in BASE.items())
        learner = (f"optim.lr={1e-3 * exp2(self.power)}", f"train.steps={self.steps}", f"train.seed={self.seed}")
        recipe = compose([*RECIPE, *WAYS[self.way], *widths, *learner, *self.common]).require()
        plan, prepared = make_plan(recipe, load_config(recipe.model)), open_found(prepare(recipe))
        mesh = connect(plan.topology, torch.device("cpu"))
        run, batch = build(plan, mesh), recipe.batch
        rows = {
            "context": plan.derived.context,
            "pack": recipe.data.packing,
            "sequences_per_microbatch": plan.derived.sequences_per_microbatch,
        }
        count = plan.derived.accumulation
        with Loader(prepared, seed=recipe.train.seed, num_microbatches=count, **rows) as loader:
            for step in range(self.steps):
                rate = learning_rate(step, recipe.optim.schedule, recipe.optim.lr, self.steps)
                microbatches = loader.batch(step * (batch.sequences_per_step or 1))
                train_step(run, microbatches, step, rate).read()
        validation = Validation(validation_batches(prepared, limit=recipe.train.validation_sequences, **rows))
        run_alone(run, validation)
        loss = validation.means(mesh).mean
        run.close()
        mesh.close()
        return loss


# Losses of a width by the power of the rate: one for each seed.
Curve = dict[float, list[float]]
Found = dict[tuple[str, int], Curve]


def collect(records: Path) -> Found:
    found: Found = {}
    for each in _read(records):
        for way in WAYS if each["times"] == 1 else (each["way"],):
            curve = found.setdefault((way, each["times"] * BASE["hidden_size"]), {})
            curve.setdefault(each["power"], []).append(each["loss"])
    return {key: dict(sorted(found[key].items())) for key in sorted(found)}


def _read(records: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []


def best_power(curve: Curve) -> float:
    """The lowest point of a parabola through the best rate and its neighbours, of mean losses; an end of the sweep as it is."""
    powers = sorted(curve)
    means = [statistics.mean(curve[power]) for power in powers]
    at = means.index(min(means))
    if not 0 < at < len(powers) - 1:
        return powers[at]
    below, low, above = means[at - 1 : at + 2]
    return powers[at] + (powers[at + 1] - powers[at]) * (below - above) / (2 * (below - 2 * low + above))


def rate(power: float) -> str:
    return f"{1e-3 * 2**power:.1e}".replace("e-0", "e-")


def table(found: Found) -> Iterator[str]:
    """Rows of a Markdown table: mean losses, the lowest in bold, and the rate at the lowest point between them."""
    powers = sorted({power for curve in found.values() for power in curve})
    yield f"| width | | {' | '.join(map(rate, powers))} | lowest at |"
    yield "|---" * (len(powers) + 3) + "|"
    for (way, width), curve in found.items():
        means = {power: statistics.mean(losses) for power, losses in curve.items()}
        low = min(means.values())
        cells = [
            f"**{means[p]:.3f}**" if means.get(p) == low else f"{means[p]:.3f}" if p in means else "" for p in powers
        ]
        yield f"| {width} | {way} | {' | '.join(cells)} | {rate(best_power(curve))} |"


def draw(found: Found, picture: Path) -> None:
    """A panel for each way, a line for each width: the mean over seeds in a band from the least to the largest loss."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, len(WAYS), sharey=True)
    colors = dict(zip(sorted({width for _, width in found}), ("#9cc3e6", "#3b6fb6", "#12305c"), strict=False))
    for axes, way in zip(panels, WAYS, strict=True):
        ticks: set[float] = set()
        for width, color in colors.items():
            curve = found.get((way, width), {})
            powers = sorted(curve)
            means = [statistics.mean(curve[power]) for power in powers]
            ticks |= set(powers)
            axes.plot([1e-3 * 2**p for p in powers], means, color=color, marker=".", label=f"width {width}")
            axes.fill_between(
                [1e-3 * 2**p for p in powers], [min(curve[p]) for p in powers], [max(curve[p]) for p in powers],
                color=color, alpha=0.2, linewidth=0,
            )  # fmt: skip
            if powers:
                axes.axvline(1e-3 * exp2(best_power(curve)), color=color, linestyle=":", linewidth=1)
        axes.set(xscale="log", xlabel="learning rate", title="muP" if way == "muP" else "the same recipe without muP")
        axes.xaxis.set_major_locator(FixedLocator([1e-3 * 2**p for p in sorted(ticks)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: rate(log2(value / 1e-3))))
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("validation loss")
    panels[0].legend(frameon=False)
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--times", type=int, nargs="*", default=[1, 2, 4], help="widths over the base's")
    parser.add_argument("--powers", type=float, nargs="*", default=[0, 1, 2, 3, 4, 5], help="of 2: rates over 1e-3")
    parser.add_argument("--seeds", type=int, default=3, help="1 to this")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--common", nargs="*", default=[], help="overrides of every run")
    parser.add_argument(
        "--found", type=Path, default=Path("learning_rates.jsonl"), help="a line for each run that has ended"
    )
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no run after so many seconds")
    parser.add_argument("--picture", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    stop = time.monotonic() + chosen.limit_s
    trials = (
        Trial(way, times, power, seed, chosen.steps, tuple(chosen.common))
        for seed in range(1, chosen.seeds + 1)
        for times in chosen.times
        for power in chosen.powers
        for way in (chosen.ways if times > 1 else ["without"])
    )
    for trial in trials:
        own = {**asdict(trial), "common": [*trial.common]}
        is_found = any(all(each[key] == own[key] for key in own) for each in _read(chosen.found))
        if not is_found and time.monotonic() < stop:
            loss = trial.train()
            with chosen.found.open("a") as file:
                file.write(json.dumps(own | {"loss": loss}) + "\n")
    found = collect(chosen.found)
    print("\n".join(table(found)))
    if chosen.picture:
        draw(found, chosen.picture)


if __name__ == "__main__":
    main()
