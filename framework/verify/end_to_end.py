"""`meshwright verify --end-to-end`: a whole small run, by the commands that a user types, beside a reference loop.

Text, a tokenizer and stock weights are written into a folder. `train` prepares them and trains the first half in the recipe's
layout; `train` again goes on in another layout to the end; `export` writes the model. `reference.py` does the same in plain torch
and transformers.
"""

import io
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER, RecipeError
from framework.plan.check import check_layout
from framework.recipe.compose import compose
from framework.recipe.derive import derive
from framework.recipe.keys import flatten, plain
from framework.recipe.overrides import write_value
from framework.recipe.schema import Checkpoint, Data, Launch, Memory, Parallel, Pipeline, Recipe, Run, Source, Zero
from framework.verify.compare import ErrorRow, exceeds, measure_numbers, measure_tensors, render, worst
from framework.verify.evidence import NothingToCompare, PluginForms
from framework.verify.plain import CORRECTION_BIASES
from framework.verify.prepare import LEAST_EPS, VerifyOptions, prepare_stages
from framework.verify.reference import TrainingCurve, run_reference
from framework.verify.sides import Sides, find_forms

# Runs one command line of `meshwright`, without the word itself, to its exit code.
Command = Callable[[Sequence[str]], int]
# Models cast to fp32 in norms and softmax, also in fp64, and a run does nothing about it: what differs in order differs by 1e-7.
TOLERANCE = 1e-5
BASE = ("~model", "~data", "track=none")
WHOLE = ("optim.groups", "data.sources")  # keys with names of the user's: written as one override
NUM_WORDS = 90


def verify_end_to_end(recipe: Recipe, options: VerifyOptions, command: Command) -> int:
    """Print a table of worst relative errors and return the exit code: 0 if all are within the tolerance, else 1.

    Raises MeshwrightError where the recipe, the model or the machine has to be changed first.
    """
    if options.dtype not in (None, "fp64") or options.device != "cpu":
        raise RecipeError("--end-to-end compares on CPUs in fp64: leave --dtype and --device out")
    options.check()
    options = options if options.strict else replace(options, dtype="fp64")
    for stages, prepared in prepare_stages(recipe, options).items():
        rows = compare_runs(prepared.sides, command)
        print(f"stage {stages}, as a run of its own\n" * bool(stages) + render(rows, TOLERANCE))
        if exceeds(rows, TOLERANCE):
            print(
                "\nMISMATCH: the run is another one than the reference's. This is a fault of Meshwright: please open an issue"
            )
            return EXIT_FAILED
    print("\nequal: from text to export, this recipe's run is the reference's")
    return EXIT_DONE


def compare_runs(sides: Sides, command: Command) -> list[ErrorRow]:
    """The worst relative errors of a run of the sides' recipe, of two parts of `num_steps` steps each.

    Raises RecipeError where a command refuses, RuntimeError where one fails, NothingToCompare where rounding parts the two.
    """
    refuse(sides.recipe)
    ends = sides.num_steps, 2 * sides.num_steps
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="meshwright-end-to-end-") as name:
        folder = Path(name)
        write_inputs(folder, sides.config, sides.recipe.train.seed)
        first = _make_first(sides.recipe, folder, ends[0])
        check_layout(compose(_say(first, compose(BASE).draft, BASE)).require())
        second = _make_second(first, ends[1])
        run = folder / "runs" / "run"
        _do(command, ["train", *_say(first, compose(BASE).draft, BASE)])
        _do(command, ["train", *_say(second, first, ("run.id=run", f"run.root={run.parent}"))])
        _do(command, ["export", str(run), "--to", str(folder / "export")])
        found = _read(run / "metrics.jsonl", folder / "export")
        sequences = derive(first).sequences_per_step
        expected = run_reference(first, sequences, ends)
    rows = compare(found, expected, sides.recipe.precision.moments)
    if exceeds(rows, TOLERANCE) and expected.undecided:
        raise NothingToCompare(
            f"there is nothing to compare with: rounding decides the sign of {expected.undecided:,} of Lion's updates, as where a"
            " true gradient is zero, and two right runs part there. `verify` without --end-to-end follows them"
        )
    return rows


def compare(found: TrainingCurve, expected: TrainingCurve, moments: str = "fp32") -> list[ErrorRow]:
    """The worst relative error of each quantity. moments: `precision.moments`."""
    assert expected.validations, "a run of one step validates nothing: more steps"
    errors = {
        "loss": measure_numbers(found.losses, expected.losses),
        "gradient norm": measure_numbers(found.norms, expected.norms),
        "learning rate": measure_tensors(*({"any step": torch.tensor(each.rates)} for each in (found, expected))),
        "validation loss": {
            f"step {step}": abs(found.validations.get(step, float("inf")) - loss) / loss
            for step, loss in expected.validations.items()
        },
        "exported weight": measure_tensors(found.weights, expected.weights),
    }
    rows = [ErrorRow(quantity, *worst(each)) for quantity, each in errors.items()]
    if moments == "bf16":
        # A difference of 1e-7 may turn a rounding: an update then differs by a spacing, 2^-7 of it.
        most = max(float(each.abs().max()) for each in expected.weights.values())
        rows[-1] = replace(rows[-1], within=TOLERANCE + 2**-7 * sum(expected.rates) / most)
    return rows


def refuse(recipe: Recipe) -> None:
    """Raise RecipeError for what a reference that does not know the layout cannot repeat."""
    if find_forms(recipe) != PluginForms():
        raise RecipeError("the reference of --end-to-end knows no rule of a plugin: `verify` without it compares them")
    if recipe.adapter.is_used:
        raise RecipeError(
            f"adapter.kind={recipe.adapter.kind}: the reference of --end-to-end trains a stock model whole."
            " `verify` without it compares adapters"
        )
    if recipe.data.mode == "stream":
        raise RecipeError("--end-to-end prepares its data: add data.mode=prepared")
    for key, is_blocked in (
        ("precision.moments=int8", recipe.precision.moments == "int8"),
        (f"zero.quantize_gather={recipe.zero.quantize_gather}", recipe.zero.quantize_gather != "none"),
    ):
        if not is_blocked:
            continue
        raise RecipeError(
            f"{key}: blocks are cut where ranks' shards are, which the reference of --end-to-end does not know."
            " `verify` without it compares them"
        )


def write_inputs(folder: Path, config: PretrainedConfig, seed: int) -> None:
    """Two sources of text, `tokenizer` of few words, and `model` with stock's own random weights."""
    rng = random.Random(seed)
    words = [f"w{number}" for number in range(min(config.get_text_config().vocab_size, NUM_WORDS) - 2)]
    vocabulary = {word: number for number, word in enumerate(["<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    saved.save_pretrained(folder / "tokenizer")  # beside a config of some families transformers takes it for theirs
    config = deepcopy(config)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, 0, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    (folder / "texts").mkdir()
    documents = [" ".join(rng.choices(words, k=rng.randint(1, 40))) for _ in range(72)]
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents[:60]))
    for number, each in enumerate(documents[60:]):
        (folder / "texts" / f"{number:02}.txt").write_text(each)


def _make_first(recipe: Recipe, folder: Path, steps: int) -> Recipe:
    """The recipe on the folder's data and weights, for its first part."""
    sources = {
        "lines": Source(path=str(folder / "lines.jsonl"), weight=0.7),
        "texts": Source(path=str(folder / "texts" / "*.txt"), weight=0.3),
    }
    pack: Literal["documents", "concat"] = "documents" if recipe.data.isolates else "concat"  # of its own text
    eps = max(recipe.optim.eps, LEAST_EPS) if recipe.optim.name == "adamw" else recipe.optim.eps
    train = replace(recipe.train, steps=steps, validate_every_steps=2, validation_sequences=None, sample=None)
    return replace(
        recipe,
        data=Data(sources=sources, root=str(folder / "tokens"), pack=pack, validation=0.2),
        model=replace(recipe.model, weights=str(folder / "model"), tokenizer=str(folder / "tokenizer"), config={}),
        optim=replace(recipe.optim, eps=eps),
        train=train,
        checkpoint=Checkpoint(),
        track=compose(BASE).draft.track,
        run=Run(root=str(folder / "runs"), id="run"),
        launch=Launch(ranks=derive(recipe).world, device="cpu", threads_per_rank=1),
    )


def _make_second(first: Recipe, steps: int) -> Recipe:
    """The same run with more steps and in another layout: on one rank, or on two where the first part has one; another stage."""
    batch = derive(first)
    is_even = batch.sequences_per_step % (2 * batch.sequences_per_microbatch) == 0
    ranks = 2 if batch.world == 1 and is_even else 1
    return replace(
        first,
        train=replace(first.train, steps=steps),
        parallel=Parallel(),
        pipeline=Pipeline(),
        zero=Zero(stage=1 if first.zero.stage == 3 else 3),
        memory=Memory(compile="never"),
        launch=replace(first.launch, ranks=ranks),
    )


def _say(recipe: Recipe, beside: Recipe, words: Sequence[str]) -> list[str]:
    """`words`, and the overrides by which a recipe differs from another one."""
    wanted, given = (flatten(plain(asdict(each))) for each in (recipe, beside))
    changed = {key: value for key, value in wanted.items() if (key, value) not in given.items()}
    said = {key: value for key, value in changed.items() if not key.startswith(tuple(f"{each}." for each in WHOLE))}
    for key in WHOLE:
        if any(each.startswith(f"{key}.") for each in changed):
            group, _, name = key.partition(".")
            said[key] = plain(asdict(recipe))[group][name]
    return [*words, *(f"{key}={write_value(value)}" for key, value in said.items())]


def _do(command: Command, words: Sequence[str]) -> None:
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = command(words)
    if code == EXIT_USER:
        reason = printed.getvalue().rpartition("meshwright: ")[2].strip()
        raise RecipeError(reason or f"`meshwright {words[0]}` refuses this recipe")
    if code != EXIT_DONE:
        raise RuntimeError(f"`meshwright {' '.join(words)}` ended with exit code {code}\n{printed.getvalue()}")


def _read(metrics: Path, export: Path) -> TrainingCurve:
    """The values that the run has reported and exported."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    by_step: Mapping[int, Any] = {record["step"]: record for record in records}
    steps = [by_step[step] for step in sorted(by_step)]
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float64, trust_remote_code=False)
    named = chain(model.named_parameters(), model.named_buffers())
    buffers = {name for name, _ in model.named_buffers() if name.rpartition(".")[2] not in CORRECTION_BIASES}
    weights: dict[str, Tensor] = {name: each.detach() for name, each in named if name not in buffers}
    return TrainingCurve(
        tuple(float(each["loss"]) for each in steps),
        tuple(float(each["gradient_norm"]) for each in steps),
        tuple(float(each["lr"]) for each in steps),
        {each["step"]: float(each["validation_loss"]) for each in steps if each.get("validation_loss") is not None},
        weights,
    )
