"""Does the prepared data fit the model?"""

from collections.abc import Iterator

from transformers import PretrainedConfig

from framework.data.prepared import FoundStores, check_vocabulary
from framework.errors import RecipeError
from framework.model.probe import keeps_documents_apart
from framework.recipe.problem import Problem, render_problems
from framework.recipe.schema import Recipe


def check_data_fits(recipe: Recipe, found: FoundStores, config: PretrainedConfig) -> None:
    """Every token has an embedding, every position one, and packed documents are understood by the model. Raises DataError or
    RecipeError."""
    check_vocabulary(recipe, found.vocab_size, config.get_text_config().vocab_size)
    problems = list(find_sequence_problems(recipe, config))
    if problems:
        raise RecipeError(render_problems(problems))


def find_sequence_problems(recipe: Recipe, config: PretrainedConfig) -> Iterator[Problem]:
    """What the model alone says of sequences: has it as many positions, does it keep packed documents apart?"""
    limit, context = getattr(config.get_text_config(), "max_position_embeddings", None), recipe.batch.context
    if isinstance(limit, int) and 0 < limit < context:
        message = f"longer than the {limit:,} positions of the model, model.config.max_position_embeddings"
        fix = f"batch.context={limit}"
        if recipe.model.weights is None:
            fix += f"; or model.config.max_position_embeddings={context}"
        yield Problem("batch.context", context, message, fix)
    if recipe.data.pack == "documents" and not keeps_documents_apart(config):
        message = (
            f"in {config.model_type} models documents that share a row see one another: the model does not derive its mask from"
            " positions, or carries state along"
        )
        yield Problem("data.pack", "documents", message, "data.pack=concat")
