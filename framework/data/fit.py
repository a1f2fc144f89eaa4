"""Does the prepared data fit the model?"""

from transformers import PretrainedConfig

from framework.data.prepared import FoundStores
from framework.errors import DataError, RecipeError
from framework.model.packing import keeps_documents_apart
from framework.recipe.schema import Recipe


def check_data_fits(recipe: Recipe, found: FoundStores, config: PretrainedConfig) -> None:
    """Every token has an embedding, every position one, and packed documents are understood by the model. Raises DataError or
    RecipeError."""
    vocabulary = config.get_text_config().vocab_size
    if vocabulary < found.vocab_size:
        raise DataError(
            f"model.config.vocab_size={vocabulary} is smaller than the tokenizer's {found.vocab_size} entries"
            f" ({found.tokenizer}): set model.config.vocab_size to at least {found.vocab_size}, or use a smaller tokenizer"
        )
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < recipe.batch.context:
        raise RecipeError(
            f"batch.context={recipe.batch.context} is longer than the model's positions,"
            f" model.config.max_position_embeddings={limit}: shorten the one or raise the other"
        )
    if recipe.data.pack == "documents" and not keeps_documents_apart(config):
        raise RecipeError(
            f"data.pack=documents, but in {config.model_type} models documents that share a row see one another: the model does"
            " not derive its mask from positions, or carries state along. Use data.pack=concat"
        )
