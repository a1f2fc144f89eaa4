"""The prepared data of a run, opened on every rank, and whether it fits the model."""

from collections.abc import Iterator
from dataclasses import replace

from transformers import PretrainedConfig

from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, share_errors
from framework.data.prepared import Prepared, check_vocabulary, find_prepared, open_found
from framework.errors import RecipeError
from framework.model.probe import keeps_documents_apart
from framework.parallel.attention import find_stock_attention
from framework.recipe.problem import Problem, render_problems
from framework.recipe.schema import Recipe


def open_data(recipe: Recipe, config: PretrainedConfig, world: Communicator) -> Prepared:
    """Open the prepared data on this rank. Rank 0 alone lists the source files and looks for the stores; the others open the few
    files that it names. An error on one rank is every rank's. Collective."""

    def find() -> Prepared:
        found = find_prepared(recipe)
        check_data_fits(recipe, found, config)
        for source in found.sources:  # before any rank waits for the tokenizer of this start
            (source.folder / found.failed).unlink(missing_ok=True)
        return found

    found = broadcast_object(find, world)
    return share_errors(lambda: open_found(found), world)


def check_data_fits(recipe: Recipe, found: Prepared, config: PretrainedConfig) -> None:
    """DataError or RecipeError unless every token has an embedding, every position has one, and the model keeps packed documents
    apart."""
    check_vocabulary(recipe, found.vocab_size, config.get_text_config().vocab_size)
    if problems := list(find_sequence_problems(recipe, config)):
        raise RecipeError(render_problems(problems))


def find_sequence_problems(recipe: Recipe, config: PretrainedConfig) -> Iterator[Problem]:
    """Problems between the recipe's sequences and the model alone: too few positions, or packed documents that see each other."""
    limit, context = getattr(config.get_text_config(), "max_position_embeddings", None), recipe.batch.context
    if isinstance(limit, int) and 0 < limit < context:
        message = f"longer than the {limit:,} positions of the model, model.config.max_position_embeddings"
        fix = f"batch.context={limit}"
        if recipe.model.weights is None:
            fix += f"; or model.config.max_position_embeddings={context}"
        yield Problem("batch.context", context, message, fix)
    # Meshwright's own attention keeps documents apart in every family; transformers' does in some.
    is_stock = recipe.data.isolates and find_stock_attention(config, recipe) is not None
    if is_stock and not keeps_documents_apart(config):
        message = (
            f"in {config.model_type} models documents that share a row see one another: the model does not derive its mask from"
            " positions, or carries state along"
        )
        fix = "data.pack=alone" if recipe.data.has_conversations else "data.pack=concat"
        yield Problem("data.pack", recipe.data.packing, message, fix)


def keeps_any_documents_apart(recipe: Recipe, config: PretrainedConfig) -> bool:
    """Whether documents of a row are exact in the model that this recipe lays out, also if its own rows have no documents."""
    packed = replace(recipe, data=replace(recipe.data, pack="documents"))
    is_ours = recipe.parallel.cp > 1 or find_stock_attention(config, recipe) is None
    return find_stock_attention(config, packed) is None if is_ours else keeps_documents_apart(config)
