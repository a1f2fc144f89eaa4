"""`meshwright evaluate`: a run's checkpoint, or a folder for `from_pretrained`, scored on tasks on ranks of this machine; and
tasks of lm-evaluation-harness written as files of ours (`--import`).
"""

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.commands.arguments import add_checkpoint, at_least
from framework.errors import EXIT_DONE, DataError, ModelError, RecipeError
from framework.files import write_atomically, write_json
from framework.host import count_cores
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory, find_run
from framework.output import align
from framework.recipe.check import check_recipe, with_layout_of
from framework.recipe.compose import compose, save_recipe, with_choices
from framework.recipe.derive import derive
from framework.recipe.problem import render_problems
from framework.recipe.schema import Batch, Checkpoint, Eval, Launch, Recipe, Train

if TYPE_CHECKING:
    from framework.launch.resume import Origin

TRAINED_BY_RANKS = "framework.train.step"
# Tokens of a row where no recipe says it, unless the model has fewer positions.
FOLDER_CONTEXT = 2048
# A batch for the recipe, though nothing is trained: many degrees divide it.
SEQUENCES = 960
# Seed with which lm-eval's `simple_evaluate` draws few-shot examples.
FEWSHOT_SEED = 1234
# A run and a folder have them already: a word that sets one of them, or a key below `adapter`, would evaluate something else.
OF_THE_MODEL = (
    "model",
    "adapter",
    *(f"model.{name}" for name in ("family", "config_file", "weights", "revision", "tokenizer")),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run's id or folder, or an exported folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="a layout, such as parallel.tp=2, and batch.context (default: one rank)",
    )
    parser.add_argument(
        "--tasks",
        action="append",
        default=[],
        metavar="PATH",
        help="a file or folder of tasks; repeatable; else eval.tasks",
    )
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="the first N records of each task")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the scores to a file")
    add_checkpoint(parser)
    parser.add_argument(
        "--import",
        dest="names",
        action="append",
        metavar="TASK",
        help="write a task of lm-evaluation-harness as DIR/TASK.jsonl; repeatable (needs meshwright[eval], and its data set)",
    )
    parser.add_argument("--to", type=Path, default=Path("tasks"), metavar="DIR", help="with --import (default: tasks)")


def run(arguments: argparse.Namespace) -> int:
    """Print a table of scores."""
    if arguments.names:
        if arguments.run is not None:
            raise RecipeError(
                f"--import writes tasks and evaluates nothing: leave {arguments.run} out, and then evaluate it with"
                f" --tasks {arguments.to}"
            )
        return import_tasks(arguments.names, folder=arguments.to)
    if arguments.run is None:
        raise RecipeError("nothing to evaluate: name a run or an exported folder")
    if others := [word for word in arguments.overrides if "=" not in word and not word.startswith("~")]:
        raise RecipeError(
            f"one run or folder is evaluated at a time, and {arguments.run} is named before {' '.join(others)}: evaluate each by"
            " itself; a layout is typed as key=value, such as parallel.tp=2"
        )
    with tempfile.TemporaryDirectory(prefix="meshwright-evaluate-") as place:
        scores, sizes, what = evaluate_command(arguments, Path(place))
    print("\n".join(render(scores, sizes)))
    if arguments.json is not None:
        write_json(arguments.json, {**what, "records": sizes, "scores": scores})
    return EXIT_DONE


def evaluate_command(
    arguments: argparse.Namespace, place: Path
) -> tuple[dict[str, float], dict[str, int], dict[str, Any]]:
    """Scores by TASK/NAME, records by task, and what was evaluated. place: a folder for what is needed meanwhile."""
    path, tokenizer, origin = find_run(arguments.run), place / "tokenizer", None
    directory = None if (path / "config.json").is_file() else RunDirectory.open(path)
    with loading_libraries():
        from framework.commands.trained_model import choose_checkpoint, read_settings
        from framework.data.tasks import keep_tasks
        from framework.data.tokenize import load_tokenizer, save_tokenizer
        from framework.launch.resume import Origin
        from framework.launch.settle import settle
        from framework.model.load import load_config
        from framework.verify.pool import RankFailed, RankPool

    if directory is None:
        positions = getattr(load_config(replace(Recipe().model, weights=str(path))), "max_position_embeddings", None)
        context = min(FOLDER_CONTEXT, positions or FOLDER_CONTEXT)
        words = [f"model.weights={json.dumps(str(path.absolute()))}", f"batch.context={context}"]
        known = compose(words).require()
        save_tokenizer(load_tokenizer(str(path)), tokenizer)
    else:
        checkpoint = choose_checkpoint(directory, best=arguments.best, step=arguments.step)
        known, reader = read_settings(directory, checkpoint)
        origin = Origin(directory, checkpoint)
        shutil.copytree(directory.tokenizer, tokenizer)
        print(f"step     {reader.manifest.step:,} of {path}")
    recipe = settle(choose_layout(known, arguments, place))
    # Refuses what cannot be understood, before ranks start.
    keep_tasks(recipe.eval.tasks, tokenizer, recipe.batch.context)
    world = derive(recipe).world
    with closing(RankPool(world, TRAINED_BY_RANKS)) as pool:
        try:
            pool.start(world, evaluate_rank, recipe, origin, tokenizer)
            scores, sizes = pool.collect(None)[0]
        except RankFailed as error:
            raise error.explanation or error from None
    of = {"run": str(path), "step": None if origin is None else origin.step, "context": recipe.batch.context}
    return scores, sizes, of


def choose_layout(known: Recipe, arguments: argparse.Namespace, place: Path) -> Recipe:
    """The recipe of the model in one rank, or in the layout of the command line; of its keys only those that forwards need."""
    for word in arguments.overrides:
        keys = word.lstrip("+~").partition("=")[0].split("@")  # of a group, and of its place
        if any(key in OF_THE_MODEL or key.startswith("adapter.") for key in keys):
            raise RecipeError(
                f"{word}: the model, its tokenizer and its adapter are those of {arguments.run}: leave it out"
            )
    device = known.launch.device if known.launch.kind == "local" else "auto"
    alone = replace(
        with_layout_of(known, Recipe()),
        launch=Launch(ranks=None, device=device),
        batch=Batch(sequences_per_step=SEQUENCES, context=known.batch.context),
        checkpoint=Checkpoint(),
        train=Train(steps=known.train.steps, seed=known.train.seed),
        eval=Eval(known.eval.tasks),
    )
    base = place / "recipe.yaml"
    save_recipe(alone, base)
    composed = compose(arguments.overrides, base=base)
    recipe, _ = with_choices(composed.require(), compose(arguments.overrides).draft, arguments.overrides)
    options = {"tasks": arguments.tasks, "limit": arguments.limit}
    recipe = replace(recipe, eval=replace(recipe.eval, **{name: value for name, value in options.items() if value}))
    if problems := check_recipe(recipe, composed.origins):
        raise RecipeError(render_problems(problems))
    if not recipe.eval.tasks:
        raise RecipeError("nothing to score: give --tasks PATH, a file or folder of tasks (docs/evaluation.md)")
    return recipe


def evaluate_rank(
    rank: int, world: int, rendezvous: str, recipe: Recipe, origin: "Origin | None", tokenizer: Path
) -> tuple[dict[str, float], dict[str, int]]:
    """Body of a rank: the scores, and the number of records of each task."""
    import torch

    from framework.comm.connect import connect
    from framework.model.hub import find_folder
    from framework.model.load import load_config
    from framework.plan.plan import make_plan
    from framework.train.build import build
    from framework.train.reference import freeze
    from framework.train.state import begin_from
    from framework.train.step import evaluate
    from framework.train.validation import open_evaluation
    from framework.verify.layout import choose_rank_device

    torch.set_num_threads(max(1, count_cores() // world))
    config = load_config(recipe.model, find_folder)
    plan = make_plan(recipe, config)
    if not recipe.adapter.is_used:  # no optimizer states for what is not trained
        plan = make_plan(freeze(plan, is_run=True), config)
    device, backend = choose_rank_device(recipe.launch.device, rank, world)
    mesh = connect(plan.topology, device, rendezvous, rank, backend=backend)
    evaluation = open_evaluation(plan, tokenizer, mesh)
    with closing(build(plan, mesh, resumes=origin is not None)) as run:
        if origin is not None:
            begin_from(run, "evaluation", origin, "", plan.recipe)
        scores = evaluate(run, plan, evaluation)
    mesh.close()
    return scores, {task.name: task.num_records for task in evaluation.tasks}


def render(scores: Mapping[str, float], sizes: Mapping[str, int]) -> Iterator[str]:
    """A table of scores, with the standard error of those that are shares."""
    rows: list[Sequence[str]] = [("task", "records", "score", "value", "error")]
    for name, value in scores.items():
        task, _, score = name.rpartition("/")
        count = sizes[task]
        error = f"{math.sqrt(value * (1 - value) / (count - 1)):.4f}" if "acc" in score and count > 1 else ""
        rows.append((task, f"{count:,}", score, f"{value:.4f}", error))
    yield from align(rows)


def import_tasks(names: Sequence[str], folder: Path) -> int:
    """Write FOLDER/TASK.jsonl for each task of lm-evaluation-harness, or each of a group: the only place that imports it. Data
    sets come from the hub or its cache."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ModelError(
            f"tasks of lm-evaluation-harness need it ({error}): pip install 'meshwright[eval]'. Local task files do not"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, task in TaskManager().load(list(names))["tasks"].items():
        task.set_fewshot_seed(FEWSHOT_SEED)
        task.build_all_requests()
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in convert_task(name, task)]
        path = folder / f"{name}.jsonl"
        with write_atomically(path) as file:
            file.write("".join(lines).encode())
        print(f"written  {path}, {len(lines):,} records")
        if callable(task.config.process_results):
            print(f"caution  {name} has scores by code of its own; Meshwright's are by docs/evaluation.md")
    return EXIT_DONE


def convert_task(name: str, task: Any) -> Iterator[dict[str, Any]]:
    """The records of a task whose requests are built. DataError for tasks that generate text."""
    if task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood", "loglikelihood_rolling"):
        raise DataError(f"{name} is a task of {task.OUTPUT_TYPE}: only log-likelihoods are scored during training")
    for _, group in groupby(task.instances, lambda each: each.doc_id):
        requests = list(group)
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            yield {"text": requests[0].args[0]}
        elif task.OUTPUT_TYPE == "loglikelihood":
            yield dict(zip(("context", "continuation"), requests[0].args, strict=True))
        else:
            yield _convert_choices(task, requests)


def _convert_choices(task: Any, requests: Sequence[Any]) -> dict[str, Any]:
    doc = requests[0].doc
    choices = task.doc_to_choice(doc)
    # For mutual information each choice follows again, without its context.
    contexts, continuations = zip(*(each.args for each in requests[: len(choices)]), strict=True)
    answer = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    answer = choices.index(answer) if isinstance(answer, str) else answer
    known = {"answer": answer, "sizes": [len(each) for each in choices]}
    if task.multiple_input:
        return {"contexts": list(contexts), "continuation": continuations[0], **known}
    return {"context": contexts[0], "choices": list(continuations), **known}
