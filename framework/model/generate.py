"""Text from a trained model, and the special tokens at which it begins and ends.

Every family's config has default ids of special tokens, those of the tokenizer of its first release. With another tokenizer they
name ordinary tokens: a generation then stops at a quote instead of at the end of a text, and the row that is taken for padding is
never trained. So a model's ids are those of the tokenizer that made its data.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils.logging import disable_progress_bar

from framework.errors import ModelError
from framework.model.load import read_config
from framework.model.safetensors_files import ADAPTER
from framework.recipe.keys import TOKEN_IDS


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    end: Sequence[int] | None = None,
) -> str:
    """The continuation of `prompt`, without it, as text; ends early at the end-of-text token.

    end: of a prompt that a chat template has written, with its special tokens, the ids with which an answer ends, too.
    temperature: 0 takes the likeliest token each time; above, tokens are drawn from softmax(logits / temperature),
    of the `top_k` likeliest if given. The draw depends on `seed` alone; the global random state is left as it was.
    Raises ModelError for an empty prompt without a start token, and when the text would outgrow the model's positions.
    """
    prompt_ids = tokenizer(prompt, add_special_tokens=end is None)["input_ids"] or _start(tokenizer)
    ids = torch.tensor([prompt_ids], dtype=torch.long, device=model.device)
    _refuse_too_long(model, ids.shape[1], max_new_tokens)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        if temperature > 0
        else {"do_sample": False}
    )
    with _without_defaults(model) as own, torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        text_ids = model.eval().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            use_cache=True,
            eos_token_id=find_end(own.eos_token_id, tokenizer),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            stopping_criteria=StoppingCriteriaList([EndsWith(end)] if end else []),
            **sampling,
        )
    if end and text_ids[0, -len(end) :].tolist() == list(end):
        text_ids = text_ids[:, : -len(end)]
    # A tokenizer may drop a leading space of what it decodes, so both are decoded from their start.
    before, after = (str(tokenizer.decode(row, skip_special_tokens=True)) for row in (ids[0], text_ids[0]))
    return after.removeprefix(before)


@contextmanager
def _without_defaults(model: PreTrainedModel) -> Iterator[GenerationConfig]:
    """Take the model's own generation config away meanwhile: `generate` fills in its penalties and limits (repetition_penalty,
    top_p) wherever it is given none."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield own
    finally:
        model.generation_config = own


class EndsWith(StoppingCriteria):
    """Stops a generation whose last ids are these."""

    def __init__(self, end: Sequence[int]) -> None:
        self._end = list(end)

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        """Whether to stop, [1] bool. input_ids: [1, tokens]."""
        is_end = input_ids[0, -len(self._end) :].tolist() == self._end
        return torch.tensor([is_end], device=input_ids.device)


def load_folder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of a Hugging Face folder. ModelError where it does not hold both."""
    disable_progress_bar()
    is_adapter = (folder / ADAPTER).is_file()  # transformers finds the model that it is beside
    try:
        config = None if is_adapter else read_config(folder / "config.json")
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=False)
        return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, RecursionError) as error:
        needs = " (an adapter: pip install peft; or export the run with --merged)" * is_adapter
        raise ModelError(
            f"{folder} holds no model with a tokenizer that Hugging Face can load{needs}: {error}"
        ) from error


def _start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise ModelError("the prompt is empty and the tokenizer has no start token: give a prompt")
    return [start]


def _refuse_too_long(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and prompt_tokens + max_new_tokens > positions:
        raise ModelError(
            f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones do not fit the model's {positions} "
            f"positions: use at most {max(positions - prompt_tokens, 0)} new tokens or a shorter prompt"
        )


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


def add_end(stated: Any, end: int | None) -> int | list[int] | None:
    """The stated ids that end a text, and another one."""
    known = stated if isinstance(stated, list) else [stated]
    return stated if end is None or end in known else [*known, end] if stated is not None else end


def set_token_ids(model: PreTrainedModel, ids: Mapping[str, int | list[int] | None]) -> None:
    """Write the ids to the model's config and to its generation config."""
    generation = (model.generation_config,) if model.can_generate() else ()
    for place in (model.config, model.config.get_text_config(), *generation):
        for name, token_id in ids.items():
            setattr(place, name, token_id)
