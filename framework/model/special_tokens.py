"""Special tokens: the ids with which a model's config must agree with the tokenizer that made its data.

Every family's config has default ids, of the tokenizer of its first release. With another tokenizer they name ordinary tokens:
a generation then stops at a quote instead of at the end of a text, and the row that is taken for padding is never trained.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from framework.recipe.keys import TOKEN_IDS


def find_token_ids(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, is_pretrained: bool
) -> Mapping[str, int | list[int] | None]:
    """The ids, by name, that a model of `config` has with `tokenizer`.

    is_pretrained: its weights were trained with ids of their own, which stay; that of the end only where it is the tokenizer's,
    or a list with it (chat models end at several tokens). A model from scratch knows none but the tokenizer's.
    """
    if is_pretrained:
        return {"eos_token_id": find_end(getattr(config, "eos_token_id", None), tokenizer)}
    begin, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    # A family's embedding does not train the row of its padding, and many tokenizers pad with the end of a text.
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": None if pad in (begin, end) else pad}
    return {name: ids[name] for name in TOKEN_IDS if name in config.to_dict()}


def find_end(stated: Any, tokenizer: PreTrainedTokenizerBase) -> int | list[int] | None:
    """The ids that end a text: those stated, where the tokenizer's is one of them, else the tokenizer's, which closes every
    document that was trained on."""
    end = tokenizer.eos_token_id
    is_known = end is None or end == stated or (isinstance(stated, list) and end in stated)
    return stated if is_known else end


def add_end(stated: Any, tokenizer: PreTrainedTokenizerBase) -> int | list[int] | None:
    """The ids that end a text: those stated, and the tokenizer's."""
    end, known = tokenizer.eos_token_id, stated if isinstance(stated, list) else [stated]
    return stated if end is None or end in known else [*known, end] if stated is not None else end


def set_token_ids(model: PreTrainedModel, ids: Mapping[str, int | list[int] | None]) -> None:
    """Write the ids where generation and whoever loads the model look for them."""
    generation = (model.generation_config,) if model.can_generate() else ()
    for place in (model.config, model.config.get_text_config(), *generation):
        for name, token_id in ids.items():
            setattr(place, name, token_id)
