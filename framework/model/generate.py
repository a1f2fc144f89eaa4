"""Text from a trained model: the first thing a newcomer wants to see."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from framework.errors import ModelError
from framework.model.load import read_config
from framework.model.special_tokens import find_end


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """The continuation of `prompt`, without it, as text; ends early at the end-of-text token.

    temperature: 0 takes the likeliest token each time; above, tokens are drawn from softmax(logits / temperature),
    of the `top_k` likeliest if given. The draw depends on `seed` alone; the global random state is left as it was.
    Raises ModelError for an empty prompt without a start token, and when the text would outgrow the model's positions.
    """
    ids = torch.tensor([tokenizer(prompt)["input_ids"] or _start(tokenizer)], dtype=torch.long, device=model.device)
    _refuse_too_long(model, ids.shape[1], max_new_tokens)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        if temperature > 0
        else {"do_sample": False}
    )
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        text_ids = model.eval().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            use_cache=True,
            eos_token_id=find_end(model.generation_config.eos_token_id, tokenizer),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )
    # A tokenizer may drop a leading space of what it decodes, so both are decoded from their start.
    before, after = (str(tokenizer.decode(row, skip_special_tokens=True)) for row in (ids[0], text_ids[0]))
    return after.removeprefix(before)


def load_folder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of a Hugging Face folder. ModelError where it does not hold both."""
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=read_config(folder / "config.json"), trust_remote_code=False
        )
        return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{folder} holds no model with a tokenizer that Hugging Face can load: {error}") from error


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
