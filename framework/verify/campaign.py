"""`meshwright verify --random N`: random recipes, each verified as `verify --strict` does, until one fails.

What fails is told as the one command that repeats it. Recipes that are refused with an explanation are drawn again, and counted.
"""

import io
import re
import shlex
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra.core.override_parser.types import Override
from transformers.utils.logging import set_verbosity_error

from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER, MeshwrightError, ModelError, RecipeError, TopologyError
from framework.plan.check import check_layout
from framework.recipe.compose import compose
from framework.recipe.derive import derive
from framework.recipe.files import search_path
from framework.recipe.overrides import parse_overrides
from framework.recipe.problem import render_problems
from framework.recipe.schema import Recipe
from framework.verify.command import Verification, prepare, run
from framework.verify.draws import CHOICES, MAX_RANKS, Drawn, draw, write
from framework.verify.evidence import NothingToCompare
from framework.verify.layout import initial_weights
from framework.verify.options import Options
from framework.verify.pool import RankPool
from framework.verify.rank import compute_exactly
from framework.verify.sides import PRELOAD

# A draw whose ranks take longer than this has hung, or the machine is overloaded.
TIMEOUT_S = 300.0
# So many refusals one after another are those of the given overrides, which fit nothing that is drawn.
MAX_ATTEMPTS = 100
REASON_WIDTH = 110
# What ranks may find, with an explanation, where only a forward pass can tell. Whatever else they raise is a failure.
LATE_REFUSALS = (ModelError, RecipeError, TopologyError)


@dataclass(frozen=True)
class Campaign:
    """num_draws recipes of a seed, compared over `steps` steps. overrides: of the recipe, which are not drawn. judge: runs a
    draw and gives 0 where it is equal."""

    num_draws: int
    seed: int = 0
    steps: int = 3
    device: Any = "cpu"
    overrides: Sequence[str] = ()
    recipes: Sequence[Path] = ()
    judge: Callable[[Verification], int] = run

    @property
    def options(self) -> Options:
        return Options(steps=self.steps, device=self.device, strict=True)

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """The overrides that take the place of what would be drawn, by key. Raises RecipeError for one that is none, or that
        removes such a key."""
        found = [each for _, each in self._parsed if each.key_or_group in DRAWN_KEYS]
        removed = [each.input_line for each in found if each.is_delete()]
        if removed:
            raise RecipeError(
                f"--random draws what {', '.join(map(str, removed))} would remove: give a value in its place"
            )
        return {each.key_or_group: each.value() for each in found}

    def write(self, drawn: Drawn) -> list[str]:
        """The overrides of a draw."""
        return [*write(drawn), *(text for text, each in self._parsed if each.key_or_group not in DRAWN_KEYS)]

    @cached_property
    def _parsed(self) -> list[tuple[str, Override]]:
        """Each override's text, and what it says."""
        folders = search_path(self.recipes)
        commands = [(text, parse_overrides([text], folders)) for text in self.overrides]
        problems = [problem for _, command in commands for problem in command.problems]
        if problems:
            raise RecipeError(render_problems(problems))
        return [(text, each) for text, command in commands for each in (*command.choices, *command.values)]

    def command(self, overrides: Sequence[str]) -> str:
        """What repeats a draw, for a shell."""
        default = Options()
        options = [] if self.steps == default.steps else ["--steps", str(self.steps)]
        options += [] if self.device == default.device else ["--device", self.device]
        folders = [word for folder in self.recipes for word in ("--recipes", str(folder))]
        return shlex.join(["meshwright", "verify", "--strict", *options, *folders, *overrides])


class Refused(Exception):
    """A draw whose recipe is refused with an explanation; the message is the reason in a line."""


class Failed(Exception):
    """A draw that is not equal, or that nothing explains; the message is what there is to say. overrides: of its recipe."""

    def __init__(self, overrides: Sequence[str], message: str):
        super().__init__(message)
        self.overrides = overrides


DRAWN_KEYS = frozenset(choice.key for choice in CHOICES)


def verify_random(campaign: Campaign) -> int:
    """Print a line a draw, and the first failure with the command that repeats it. The exit code: 0 if none fails, else 1.

    Raises RecipeError where the given overrides fit nothing that is drawn.
    """
    _check(campaign)
    pool = RankPool(MAX_RANKS, PRELOAD, spawned=1)
    try:
        return verify_draws(campaign, pool)
    finally:
        pool.close()


def verify_draws(campaign: Campaign, pool: RankPool) -> int:
    """`verify_random` on ranks that live on."""
    start_s, refusals = time.monotonic(), Counter[str]()
    try:
        for number in range(campaign.num_draws):
            _verify_draw(campaign, number, pool, refusals)
    except Failed as failed:
        print(f"\n{failed}\n\nDraw {number} of seed {campaign.seed} FAILED. This repeats it:\n")
        print(f"{campaign.command(failed.overrides)}\n")
        return EXIT_FAILED
    finally:
        print(_describe_refusals(refusals), flush=True)
    each_s = (time.monotonic() - start_s) / campaign.num_draws
    print(f"equal: {campaign.num_draws} draws of seed {campaign.seed} train as one process does, {each_s:.1f} s each")
    return EXIT_DONE


def _check(campaign: Campaign) -> None:
    if campaign.num_draws < 1:
        raise RecipeError(f"--random {campaign.num_draws}: at least one draw is needed to compare anything")
    if any(re.match(r"[+~]*model\b(?!\.)", text) for text in campaign.overrides):
        raise RecipeError("--random draws the model: give its family, model.family=qwen3, in place of a recipe of it")
    campaign.options.check()
    set_verbosity_error()
    torch.set_num_threads(1)  # the oracle computes beside up to eight ranks
    compute_exactly(torch.device(campaign.device))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}", flush=True)


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
    """The recipe of what is drawn, whose layout is equal to one process. Raises Refused or Failed."""
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
    recipe = compose(overrides, campaign.recipes).require()
    check_layout(recipe)
    prepared = prepare(recipe, campaign.options)
    initial_weights(
        prepared.sides.config, recipe.train.seed
    )  # ModelError of a family that does not initialise all of them
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


def _describe_refusals(refusals: Counter[str]) -> str:
    lines = [f"{count:5d}  {reason}" for reason, count in refusals.most_common()]
    return "\n".join([f"{refusals.total()} draws were refused with an explanation and drawn again", *lines])
