"""Random recipes on at most 8 ranks, each compared with stock Hugging Face as `meshwright verify --strict` does.

    python scripts/verify_random.py [--draws 200] [--seed S] [--steps 3] [--device cuda] [OVERRIDE ...]
    python scripts/verify_random.py --end-to-end [--draws 60] [--seed S] [OVERRIDE ...]       whole runs, from text to export

Overrides fix a key, which is then not drawn. Recipes that are refused with an explanation are drawn again, and counted. The first
failure ends it, with the one command that repeats it (docs/verify.md). The ranks of all draws are one pool of processes.
"""

import io
import os
import re
import shlex
import socket
import sys
import time
import traceback
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from hydra.core.override_parser.types import Override
from transformers.utils.logging import set_verbosity_error

sys.path.insert(0, str(Path(__file__).parents[1]))

from framework.cli import main
from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER, MeshwrightError, ModelError, RecipeError, TopologyError
from framework.launch import agent
from framework.launch.agent import Outcome
from framework.lease import Lease
from framework.plan.check import check_layout
from framework.recipe.compose import compose
from framework.recipe.derive import derive
from framework.recipe.files import search_path
from framework.recipe.overrides import parse_overrides
from framework.recipe.problem import render_problems
from framework.recipe.schema import Recipe
from framework.train import program
from framework.verify.command import run
from framework.verify.compare import exceeds, render
from framework.verify.end_to_end import TOLERANCE, compare_runs
from framework.verify.evidence import NothingToCompare
from framework.verify.layout import compute_exactly, initial_weights
from framework.verify.pool import RankPool
from framework.verify.prepare import Verification, VerifyOptions, prepare
from framework.verify.sides import PRELOAD
from scripts.random_recipes import CHOICES, MAX_RANKS, Drawn, draw, write

# A draw whose ranks take longer than this has hung, or the machine is overloaded.
TIMEOUT_S = 300.0
# After so many refusals in a row nothing that is drawn fits the given overrides.
MAX_ATTEMPTS = 100
REASON_WIDTH = 110
# Explained refusals that only a forward pass can find. Anything else that ranks raise is a failure.
LATE_REFUSALS = (ModelError, RecipeError, TopologyError)
DRAWN_KEYS = frozenset(choice.key for choice in CHOICES)


@dataclass(frozen=True)
class Campaign:
    """Random verifications of one seed, over `steps` steps each."""

    num_draws: int
    seed: int = 0
    steps: int = 3
    device: Any = "cpu"
    # Keys of the recipe that are not drawn.
    overrides: Sequence[str] = ()
    # Runs a draw and returns 0 where it is equal.
    judge: Callable[[Verification], int] = run

    @property
    def options(self) -> VerifyOptions:
        return VerifyOptions(steps=self.steps, device=self.device, strict=True)

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """The overrides that replace a drawn value, by key. Raises RecipeError for a malformed one, or one that removes a drawn
        key."""
        found = [each for _, each in self._parsed if each.key_or_group in DRAWN_KEYS]
        removed = [each.input_line for each in found if each.is_delete()]
        if removed:
            raise RecipeError(
                f"{', '.join(map(str, removed))} would remove a key that is drawn: give it a value instead"
            )
        return {each.key_or_group: each.value() for each in found}

    def write(self, drawn: Drawn) -> list[str]:
        """The overrides of a draw."""
        return [*write(drawn), *(text for text, each in self._parsed if each.key_or_group not in DRAWN_KEYS)]

    @cached_property
    def _parsed(self) -> list[tuple[str, Override]]:
        """Each override's text, and its parsed form."""
        commands = [(text, parse_overrides([text], search_path([]))) for text in self.overrides]
        problems = [problem for _, command in commands for problem in command.problems]
        if problems:
            raise RecipeError(render_problems(problems))
        return [(text, each) for text, command in commands for each in (*command.choices, *command.values)]

    def command(self, overrides: Sequence[str]) -> str:
        """The shell command that repeats a draw."""
        default = VerifyOptions()
        options = [] if self.steps == default.steps else ["--steps", str(self.steps)]
        options += [] if self.device == default.device else ["--device", self.device]
        return shlex.join(["meshwright", "verify", "--strict", *options, *overrides])


class Refused(Exception):
    """A draw whose recipe is refused with an explanation; the message is the reason in a line."""


class Failed(Exception):
    """A draw that is not equal, or that nothing explains. overrides: of its recipe."""

    def __init__(self, overrides: Sequence[str], message: str):
        super().__init__(message)
        self.overrides = overrides


def verify_random(campaign: Campaign) -> int:
    """Print a line for each draw, and the first failure with the command that repeats it. Exit code: 0 if none fails, else 1.

    Raises RecipeError where the given overrides fit nothing that is drawn.
    """
    if campaign.num_draws < 1:
        raise RecipeError(f"--draws {campaign.num_draws}: at least one draw is needed to compare anything")
    if any(re.match(r"[+~]*model\b(?!\.)", text) for text in campaign.overrides):
        raise RecipeError("the model is drawn: give its family, model.family=qwen3, in place of a recipe of it")
    campaign.options.check()
    set_verbosity_error()
    torch.set_num_threads(1)  # the oracle computes beside up to eight ranks
    compute_exactly(torch.device(campaign.device))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}", flush=True)
    pool = RankPool(MAX_RANKS, PRELOAD, spawned=1)
    try:
        return verify_draws(campaign, pool)
    finally:
        pool.close()


def verify_draws(campaign: Campaign, pool: RankPool) -> int:
    """Verify all draws of a campaign on the pool's ranks; returns the exit code."""
    start_s, refusals = time.monotonic(), Counter[str]()
    try:
        for number in range(campaign.num_draws):
            _verify_draw(campaign, number, pool, refusals)
    except Failed as failed:
        print(f"\n{failed}\n\nDraw {number} of seed {campaign.seed} FAILED. This repeats it:\n")
        print(f"{campaign.command(failed.overrides)}\n")
        return EXIT_FAILED
    finally:
        lines = [f"{count:5d}  {reason}" for reason, count in refusals.most_common()]
        told = f"{refusals.total()} draws were refused with an explanation and drawn again"
        print("\n".join([told, *lines]), flush=True)
    each_s = (time.monotonic() - start_s) / campaign.num_draws
    print(f"equal: {campaign.num_draws} draws of seed {campaign.seed} train as one process does, {each_s:.1f} s each")
    return EXIT_DONE


def _verify_draw(campaign: Campaign, number: int, pool: RankPool, refusals: Counter[str]) -> None:
    """Verify the draw with this number: the first attempt that is not refused. Raises Failed."""
    for attempt in range(MAX_ATTEMPTS):
        start_s = time.monotonic()
        drawn = draw(campaign.seed, number, attempt, campaign.given)
        try:
            recipe = _verify_attempt(campaign, drawn, pool)
        except Refused as refused:
            refusals[str(refused)] += 1
            continue
        print(f"{number:4d}  equal  {time.monotonic() - start_s:5.1f} s  {_describe(recipe)}", flush=True)
        return
    raise RecipeError(
        f"{MAX_ATTEMPTS} draws one after another are refused, for the reasons above: nothing that is drawn fits what is given,"
        f" {shlex.join(campaign.overrides)}"
    )


def _verify_attempt(campaign: Campaign, drawn: Drawn, pool: RankPool) -> Recipe:
    """The drawn recipe, once its layout is found equal to one process. Raises Refused or Failed."""
    overrides = [f"model.family={drawn['model.family']}"]
    try:
        overrides = campaign.write(drawn)
        prepared = _prepare(campaign, overrides, pool)
    except MeshwrightError as error:
        if error.exit_code == EXIT_USER:
            raise Refused(_summarize(str(error), drawn["model.family"])) from error
        raise Failed(overrides, traceback.format_exc()) from error
    except Exception as error:
        raise Failed(overrides, traceback.format_exc()) from error
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            code = campaign.judge(prepared)
    except NothingToCompare as error:
        raise Refused(_summarize(str(error), drawn["model.family"])) from error
    except LATE_REFUSALS as error:
        raise Refused(f"by ranks, not by check: {_summarize(str(error), drawn['model.family'])}") from error
    except Exception as error:
        raise Failed(overrides, f"{printed.getvalue()}{traceback.format_exc()}") from error
    if code != EXIT_DONE:
        raise Failed(overrides, printed.getvalue())
    return prepared.sides.recipe


def _prepare(campaign: Campaign, overrides: Sequence[str], pool: RankPool) -> Verification:
    recipe = compose(overrides).require()
    check_layout(recipe)
    prepared = prepare(recipe, campaign.options)
    # Raises ModelError for a family that does not initialise all of its parameters.
    initial_weights(prepared.sides.config, recipe.train.seed)
    return replace(prepared, sides=replace(prepared.sides, pool=pool, timeout_s=TIMEOUT_S))


def _summarize(message: str, family: str) -> str:
    """The reason in a line, alike for alike mistakes: without values, numbers and the family's name."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = [line for line in lines if not re.match(r"\d+ problems? in the recipe|--strict leaves", line)]
    key, _, found = told[0].partition(" = ")
    reason = f"{key}: {told[1]}" if found and len(told) > 1 else told[0]
    return re.sub(r"\d+", "N", reason.replace(family, "MODEL"))[:REASON_WIDTH]


def _describe(recipe: Recipe) -> str:
    """The model and its layout in a line."""
    derived, zero, optim = derive(recipe), recipe.zero, recipe.optim
    degrees = [f"{axis} {size}" for axis in ("pp", "dp", "cp", "tp", "ep") if (size := getattr(derived, axis)) > 1]
    words = [recipe.model.family, recipe.precision.compute, f"ranks {derived.world}", *degrees, f"zero {zero.stage}"]
    return ", ".join([*words, *([recipe.pipeline.schedule] if derived.pp > 1 else []), optim.name])


def train_in_pool(number: int, world: int, rendezvous: str, run: str, epoch: int, port: int) -> tuple[int, str]:
    """Body: one rank of a run, as the launcher starts it; its exit code and its output."""
    said, place = io.StringIO(), {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {
        name: str(value) for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items()
    }
    with redirect_stdout(said), redirect_stderr(said):
        code = program.main(Path(run), Lease(Path(run), epoch))
    return code, said.getvalue()


def run_in_pool(pool: RankPool, arguments: Sequence[str], num_ranks: int, *_: Any) -> Outcome:
    """Stand in for `run_ranks`. arguments: those of `python -m framework.train.program`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ended = pool.run(num_ranks, train_in_pool, arguments[-2], int(arguments[-1]), port, timeout_s=300)
    code = max(code for code, _ in ended)
    return Outcome(code, "\n".join(said for each, said in ended if each == code) if code else "")


def judge_end_to_end(prepared: Verification) -> int:
    """Compare a draw's whole run with the reference's; 0 where they are equal."""
    assert prepared.sides.pool is not None, "a campaign has a pool"
    with patch.object(agent, "run_ranks", partial(run_in_pool, prepared.sides.pool)):
        rows = compare_runs(prepared.sides, main)
    print(render(rows, TOLERANCE))
    return EXIT_FAILED if exceeds(rows, TOLERANCE) else EXIT_DONE


def run_command(words: Sequence[str]) -> int:
    """Run the script's command line; returns the exit code."""
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--draws", type=int, metavar="N", help="recipes to verify (default: 200; 60 whole runs)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="steps to compare (default: 3; 2 in each half of a whole run)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--end-to-end", action="store_true", help="whole runs in fp64, from text to export")
    options, overrides = parser.parse_known_args(words)
    if unknown := [each for each in overrides if each.startswith("-")]:
        parser.error(f"unknown option {unknown[0]}")
    draws, steps, judge = options.draws, options.steps, run
    if options.end_to_end:
        draws, steps, judge = draws or 60, steps or 2, judge_end_to_end
        overrides = ["precision=fp64", *overrides]
    try:
        return verify_random(
            Campaign(200 if draws is None else draws, options.seed, steps or 3, options.device, overrides, judge)
        )
    except MeshwrightError as error:
        print(f"verify_random: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
