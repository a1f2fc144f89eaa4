"""`meshwright verify`: the recipe's layout, on CPU ranks and with a small model, beside stock Hugging Face in one process."""

import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from transformers import PretrainedConfig
from transformers.utils.logging import set_verbosity_error

from framework.errors import EXIT_DONE, EXIT_FAILED, ModelError, RecipeError
from framework.model.load import build_meta, load_config, load_config_file
from framework.model.precision import DTYPES
from framework.model.shrink import MIN_LAYERS, shrink
from framework.recipe.derive import count_virtual_stages, derive
from framework.recipe.describe import describe_derived
from framework.recipe.schema import Model, Recipe
from framework.verify.compare import TOLERANCES, compare, render
from framework.verify.evidence import Evidence, initial_weights
from framework.verify.oracle import run_oracle
from framework.verify.rank import RankFailed, draw_batches, running_ranks
from framework.verify.small import shrink_recipe


def verify(recipe: Recipe, model_config: Path | None, fp64: bool, steps: int, ranks: int | None) -> int:
    """Print a table of worst relative errors; exit code 0 if all are within the tolerance, else 1.

    model_config: a Hugging Face config.json in place of the recipe's model. MeshwrightError for what is the user's to mend.
    """
    start_s = time.monotonic()
    if steps < 1:
        raise RecipeError(f"--steps {steps}: at least one step is needed to compare anything")
    set_verbosity_error()
    original, model_notes = _load(recipe.model, model_config)
    config = shrink(original, max(MIN_LAYERS, recipe.parallel.pp * count_virtual_stages(recipe.pipeline)))
    model = build_meta(config)
    names = [name for name, _ in model.named_parameters()]
    small = shrink_recipe(recipe, names, _count_positions(config), fp64, steps, ranks)
    precision = small.recipe.precision.compute
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"model         {_describe_model(original, config, num_parameters)}")
    print(describe_derived(derive(small.recipe)))
    print(f"compared      {precision}, zero.stage {recipe.zero.stage}, {small.recipe.optim.name}, uneven loss masks")
    for note in [*model_notes, *small.notes]:
        print(f"note          {note}")
    print(flush=True)

    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        try:
            with running_ranks(small.recipe, config, steps, Path(folder)) as layout:
                expected = _run_oracle(small.recipe, config, steps)
                found = layout.wait()
        except RankFailed as error:
            print(f"{error}\n\nA rank failed. {_how_to_report()}", file=sys.stderr)
            return EXIT_FAILED
    tolerance = TOLERANCES[precision]
    rows = compare(found, expected)
    print(render(rows, tolerance))
    if any(row.error > tolerance for row in rows):
        print(f"\nMISMATCH: the layout is another training run than one process. {_how_to_report()}")
        return EXIT_FAILED
    print(f"\nequal: this layout trains as one process does ({time.monotonic() - start_s:.0f} s)")
    return EXIT_DONE


def _load(model: Model, model_config: Path | None) -> tuple[PretrainedConfig, list[str]]:
    """The full-size config. Pretrained weights are never downloaded; of a local folder only the config is read."""
    if model_config is not None:
        return load_config_file(model_config), [f"model: {model_config} instead of the recipe's {model.family}"]
    if model.weights is None:
        return load_config(model), []
    notes = [f"model.weights={model.weights} is not read: verification starts from seeded weights"]
    local = Path(model.weights).is_dir()
    return load_config(model if local else replace(model, weights=None)), notes


def _run_oracle(recipe: Recipe, config: PretrainedConfig, num_steps: int) -> Evidence:
    weights = initial_weights(config, recipe.train.seed)
    batches = draw_batches(recipe, config, num_steps)
    try:
        return run_oracle(recipe, config, weights, batches, DTYPES[recipe.precision.compute])
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelError(
            f"there is nothing to compare with: stock transformers {transformers.__version__} does not train the small"
            f" {config.model_type} in {recipe.precision.compute}: {error}"
        ) from error


def _count_positions(config: PretrainedConfig) -> int:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else sys.maxsize


def _describe_model(original: PretrainedConfig, config: PretrainedConfig, num_parameters: int) -> str:
    sizes = {"hidden": "hidden_size", "layers": "num_hidden_layers", "vocabulary": "vocab_size"}
    full, small = original.get_text_config(), config.get_text_config()
    pairs = ((word, getattr(full, name, None), getattr(small, name, None)) for word, name in sizes.items())
    shown = ", ".join(f"{word} {before} -> {after}" for word, before, after in pairs if after is not None)
    return f"{config.model_type}, shrunk to {num_parameters:,} parameters: {shown}"


def _how_to_report() -> str:
    return (
        "This is a fault of Meshwright, not of your recipe: please open an issue with this output and that of\n"
        "`meshwright check` for the same overrides. "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
