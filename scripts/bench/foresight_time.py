"""Predicted step time beside measured: random layouts of 1 to 4 ranks on this machine, over gloo; and what a search chooses.

    meshwright doctor --measure=my_machine.yaml
    python scripts/bench/foresight_time.py --cluster my_machine.yaml [--layouts 24] [--seed 1] [--json FILE]
    python scripts/bench/foresight_time.py --cluster my_machine.yaml --search 2 [--layouts 32] [--seed 1]

Layouts are drawn by a seed: a small Llama of random width and depth, degrees of dp, tp, cp and pp, ZeRO's stage, sequence
parallelism, schedule, activation checkpointing, microbatches. Every layout is built as `meshwright train` builds it and takes
some steps, one thread a rank; all of them in turn, and that several times over, so that what disturbs the machine disturbs all
alike. Measured is the median of all of a layout's steps but the first of each time. The forecast has seen nothing of it: it
reads the machine's file.

--search RANKS: one small model, all of whose layouts on so many ranks are searched. Measured are the fastest by forecast, what
parallel.layout=auto takes, the best of each mesh, and others drawn by the seed. The fastest of those and the chosen are then
measured once more, and only that counts: the least of many measured times is low by luck.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from framework.comm.collectives import all_reduce
from framework.comm.connect import connect
from framework.data.pack import Microbatch, cut_context
from framework.model.load import load_config
from framework.plan.candidate import OFFLOADED, candidate_of, recipe_of
from framework.plan.cluster import ClusterRates
from framework.plan.find import AS_FAST, Question, best_of, least_of_fastest, resolved, search
from framework.plan.plan import make_plan
from framework.plan.search import Ranked
from framework.plan.shape import make_shape
from framework.plan.time import TimeForecast, TimeModel
from framework.recipe import schema
from framework.recipe.check import check_recipe
from framework.recipe.compose import compose
from framework.recipe.schema import Recipe
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.pool import RankPool

RANKS = (1, 2, 4)
WARMUP_STEPS, LR = 2, 1e-4
PRELOAD = "framework.train.build"
# A search's keys that stay as they are: a CPU's host memory is its own.
PINNED = frozenset(f"memory.offload.{name}" for name in OFFLOADED)
# Layouts that are measured once more, and how many times as many rounds.
FINALISTS, FINAL_ROUNDS = 5, 3


@dataclass(frozen=True)
class Measured:
    """One layout. steps_s: of all its timed steps."""

    recipe: Recipe
    forecast: TimeForecast
    steps_s: Sequence[float]

    @property
    def step_s(self) -> float:
        """Seconds of a typical step."""
        return statistics.median(self.steps_s)

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.forecast.step_s / self.step_s


def make_recipe(ranks: int, batch: schema.Batch, config: dict[str, Any]) -> Recipe:
    """A recipe of a small Llama on so many ranks of one thread each, whose tokens are drawn."""
    return schema.Recipe(
        train=schema.Train(steps=1000),
        batch=batch,
        model=schema.Model(family="llama", config=config),
        # Not read.
        data=schema.Data(sources={"text": schema.Source("python-stdlib")}, bpe_vocab=2048),
        precision=schema.Precision(compute="fp32"),
        optim=schema.Optim(schedule=schema.LearningRateSchedule(name="constant")),
        memory=schema.Memory(chunked_loss=False),
        launch=schema.Launch(ranks=ranks, device="cpu", threads_per_rank=1),
    )


def make_searched(ranks: int) -> Recipe:
    """The recipe whose layouts `--search` searches: steps of some 0.2 s."""
    config = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 704,
        "vocab_size": 4096,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    return make_recipe(ranks, schema.Batch(sequences_per_step=8, context=256), config)


def draw(rng: random.Random, ranks: int) -> Recipe:
    """A recipe of a random layout; it may be one that the rules refuse."""
    degrees = dict.fromkeys(("dp", "tp", "pp", "cp"), 1)
    rest = ranks
    while rest > 1:
        degrees[rng.choice(tuple(degrees))] *= 2
        rest //= 2
    hidden, accumulation = rng.choice((192, 256, 384)), rng.choice((1, 2, 4))
    if degrees["pp"] > 1:
        accumulation = max(accumulation, 2) * 2
    sequences, context = rng.choice((1, 2)), rng.choice((128, 256, 512))
    model = {
        "hidden_size": hidden,
        "num_hidden_layers": rng.choice((4, 6)),
        "num_attention_heads": 8,
        "num_key_value_heads": rng.choice((4, 8)),
        "intermediate_size": hidden * 11 // 4 // 16 * 16,
        "vocab_size": rng.choice((2048, 8192)),
        "max_position_embeddings": 1024,
        "tie_word_embeddings": rng.random() < 0.3,
    }
    batch = schema.Batch(
        sequences_per_step=sequences * accumulation * degrees["dp"],
        sequences_per_microbatch=sequences,
        context=context,
    )
    zero, sequence = rng.randrange(4), rng.random() < 0.5
    schedule = rng.choice(("gpipe", "1f1b")) if degrees["pp"] > 1 else "1f1b"
    checkpointing = rng.choice(("none", "none", "selective", "full"))
    recipe = make_recipe(ranks, batch, model)
    return replace(
        recipe,
        zero=schema.Zero(stage=zero),
        parallel=schema.Parallel(**degrees, sequence=sequence),
        pipeline=schema.Pipeline(schedule=schedule),
        memory=replace(recipe.memory, activation_checkpointing=checkpointing),
    )


def draw_layouts(seed: int, count: int) -> list[Recipe]:
    """Layouts that the rules allow, of every number of ranks equally many."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        recipe = draw(rng, RANKS[len(found) % len(RANKS)])
        if not check_recipe(recipe, {}):
            found.append(recipe)
    return found


def time_steps(rank: int, world: int, rendezvous: str, recipe: Recipe, num_steps: int) -> list[float]:
    """One rank: seconds of each step behind the first ones, from when all ranks begin to when the last one has ended."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plan = make_plan(recipe, load_config(recipe.model))
    mesh = connect(plan.topology, torch.device("cpu"), rendezvous, rank)
    run = build(plan, mesh)
    slices, derived = plan.context_slices(rank), plan.derived
    shape = (derived.sequences_per_microbatch, derived.context + 1)
    everyone, seconds = mesh.axis("world"), []
    for step in range(WARMUP_STEPS + num_steps):
        tokens = [torch.randint(plan.vocabulary_size, shape) for _ in range(derived.accumulation)]
        batch = [cut_context(Microbatch(each[:, :-1].clone(), each[:, 1:].clone(), None), slices) for each in tokens]
        all_reduce(torch.zeros(1), everyone, label="all begin")
        start = time.perf_counter()
        train_step(run, batch, step, LR).read()
        all_reduce(torch.zeros(1), everyone, label="all have ended")
        seconds.append(time.perf_counter() - start)
    run.close()
    mesh.close()
    return seconds[WARMUP_STEPS:]


def measure(recipes: Sequence[Recipe], rounds: int, num_steps: int, pool: RankPool) -> list[Measured]:
    """All layouts in turn, `rounds` times over, each time in another order."""
    seconds: list[list[float]] = [[] for _ in recipes]
    order = list(range(len(recipes)))
    for _ in range(rounds):
        for index in order:
            recipe = recipes[index]
            assert recipe.launch.ranks is not None, "draws state the ranks"
            seconds[index] += pool.run(recipe.launch.ranks, time_steps, recipe, num_steps, timeout_s=600)[0]
            print(f"{describe(recipe)}: {1e3 * statistics.median(seconds[index]):.0f} ms", file=sys.stderr, flush=True)
        order.reverse()
    return [Measured(recipe, predict(recipe), steps) for recipe, steps in zip(recipes, seconds, strict=True)]


def predict(recipe: Recipe) -> TimeForecast:
    """The forecast of a recipe on its cluster; as `plan` makes it."""
    shape = make_shape(load_config(recipe.model), recipe)
    return TimeModel(shape, recipe, ClusterRates.from_recipe(recipe)).forecast(candidate_of(recipe))


@dataclass(frozen=True)
class Choice:
    """The answer of a search: all layouts of a recipe that fit, the fastest by forecast first, and those that it would take.
    chosen: by their place among these, the fastest and what parallel.layout=auto takes, perhaps the same."""

    recipe: Recipe
    ranked: Sequence[Ranked]
    chosen: tuple[int, int]

    @classmethod
    def of(cls, recipe: Recipe) -> "Choice":
        """The choice of a recipe."""
        # As many as there are: none is left out by a bound.
        found = search(Question(recipe, PINNED, best=sys.maxsize, within=AS_FAST))
        return cls(
            recipe, found.ranked, (found.ranked.index(best_of(found)), found.ranked.index(least_of_fastest(found)))
        )

    def sample(self, rng: random.Random, count: int) -> list[int]:
        """The chosen, the fastest of each mesh and the fastest few by forecast, and others at random, by their places."""
        firsts: dict[tuple[int, ...], int] = {}
        for place, each in enumerate(self.ranked):
            c = each.candidate
            firsts.setdefault((c.dp, c.tp, c.cp, c.pp), place)
        few = range(min(count // 4, len(self.ranked)))
        wanted = dict.fromkeys((*self.chosen, *firsts.values(), *few))
        rest = [place for place in range(len(self.ranked)) if place not in wanted]
        more = rng.sample(rest, min(len(rest), max(0, count - len(wanted))))
        return sorted([*wanted, *more])

    def recipes(self, places: Sequence[int]) -> list[Recipe]:
        """The layouts at these places."""
        return [recipe_of(self.ranked[place].candidate, resolved(self.recipe), PINNED) for place in places]


def race(choice: Choice, rng: random.Random, count: int, rounds: int, num_steps: int) -> dict[str, Any]:
    """Measure a sample of the layouts, then the fastest of it and the chosen once more; print both, and by how much the chosen
    are slower than the fastest measured."""
    places = choice.sample(rng, count)
    with closing(RankPool(max(RANKS), PRELOAD)) as pool:
        first = dict(zip(places, measure(choice.recipes(places), rounds, num_steps, pool), strict=True))
        by_time = sorted(places, key=lambda place: first[place].step_s)
        last = list(dict.fromkeys((*choice.chosen, *by_time[:FINALISTS])))
        final = dict(zip(last, measure(choice.recipes(last), FINAL_ROUNDS * rounds, num_steps, pool), strict=True))
    print(f"{len(choice.ranked)} layouts of {choice.recipe.launch.ranks} ranks fit; measured {len(places)}:")
    print_table([first[place] for place in by_time])
    print("\nonce more:")
    print_table([final[place] for place in last])
    least_s = min(each.step_s for each in final.values())
    fastest, auto = (final[place].step_s / least_s for place in choice.chosen)
    return {"layouts": len(choice.ranked), "measured": len(places), "fastest_over_best": fastest, "auto_over_best": auto,
            "median_error": statistics.median(abs(each.ratio - 1) for each in first.values())}  # fmt: skip


def describe(recipe: Recipe) -> str:
    """The layout in a few words."""
    parallel, config, candidate = recipe.parallel, recipe.model.config, candidate_of(recipe)
    degrees = [f"{axis}{getattr(candidate, axis)}" for axis in ("dp", "tp", "cp", "pp") if getattr(candidate, axis) > 1]
    words = [*degrees, f"z{recipe.zero.stage}"]
    if parallel.tp > 1 and parallel.sequence:
        words.append("sp")
    if parallel.cp > 1 and parallel.context != "ring":
        words.append(str(parallel.context))
    if parallel.pp > 1:
        stages = recipe.pipeline.virtual_stages or 1
        words.append(recipe.pipeline.schedule + f" x{stages}" * (stages > 1))
    if recipe.memory.activation_checkpointing != "none":
        words.append(recipe.memory.activation_checkpointing)
    words.append(f"{candidate.accumulation} x {candidate.sequences} x {candidate.context}")
    words.append(f"h{config['hidden_size']} L{config['num_hidden_layers']} V{config['vocab_size']}")
    return " ".join(words)


def print_table(found: Sequence[Measured]) -> None:
    """A row for each layout, with the parts that the forecast is made of."""
    print(
        "| ranks | layout | measured ms | predicted ms | predicted / measured | parts, ms |\n|---|---|---|---|---|---|"
    )
    for each in found:
        parts = sorted(each.forecast.parts.items(), key=lambda part: -part[1])[:5]
        shown = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in parts)
        print(
            f"| {each.recipe.launch.ranks} | {describe(each.recipe)} | {1e3 * each.step_s:.0f}"
            f" | {1e3 * each.forecast.step_s:.0f} | {each.ratio:.2f} | {shown} |"
        )


def summarise(found: Sequence[Measured]) -> dict[str, Any]:
    """Errors over all layouts, and by number of ranks."""
    errors = [abs(each.ratio - 1) for each in found]
    by_ranks = {
        ranks: statistics.median(each.ratio for each in found if each.recipe.launch.ranks == ranks) for ranks in RANKS
    }
    return {
        "layouts": len(found),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "median_ratio_by_ranks": by_ranks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="laptop", help="a file that `doctor --measure` wrote, or a shipped one")
    parser.add_argument("--layouts", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a layout in each round")
    parser.add_argument(
        "--search", type=int, default=None, metavar="RANKS", help="layouts of one model on so many ranks"
    )
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    # A recipe that trains on nothing is refused, whatever its cluster is: any experiment will do.
    cluster = compose(["experiment=quickstart", f"cluster={options.cluster}"]).require().cluster
    started = time.perf_counter()
    if options.search is None:
        recipes = [replace(each, cluster=cluster) for each in draw_layouts(options.seed, options.layouts)]
        with closing(RankPool(max(RANKS), PRELOAD)) as pool:
            found = measure(recipes, options.rounds, options.steps, pool)
        print_table(found)
        summary = summarise(found)
        by_ranks = ", ".join(f"{ranks}: {ratio:.2f}" for ranks, ratio in summary["median_ratio_by_ranks"].items())
        said = f"median error {summary['median_error']:.1%}, worst {summary['worst_error']:.1%}"
        said += f"; predicted over measured by ranks: {by_ranks}"
    else:
        choice = Choice.of(replace(make_searched(options.search), cluster=cluster))
        summary = race(choice, random.Random(options.seed), options.layouts, options.rounds, options.steps)
        said = (
            f"measured over the best measured: {summary['fastest_over_best']:.3f} of the fastest by forecast,"
            f" {summary['auto_over_best']:.3f} of what parallel.layout=auto takes; median error {summary['median_error']:.1%}"
        )
    print(f"\n{said}; {time.perf_counter() - started:.0f} s, load {os.getloadavg()[0]:.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
