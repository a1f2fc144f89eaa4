"""Whether a model's tables in fp32 meet its weights in another dtype, found by running a small copy of it.

Parameters are cast to the compute dtype, buffers keep theirs. Hugging Face's models cast what they read from a table of
positions to the dtype of the hidden states; xglm adds it as it is, hidden states become fp32, and torch refuses them beside
weights of another dtype.
"""

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.errors import ModelError
from framework.model.initial import seed_rng
from framework.model.load import FORWARD_ERRORS, choose_experts
from framework.model.shrink import shrink

TOKENS = 8


def refuse_mixed_dtypes(model: PreTrainedModel, config: PretrainedConfig, compute: torch.dtype) -> None:
    """Raises ModelError where a forward on a CPU fails in `compute` and not in fp32. Models without tables are not run: vectors,
    such as rotary frequencies and scales, are met by every family. model: of `config`, may be on meta."""
    tables = [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and buffer.dim() > 1]
    if not tables or compute not in (torch.bfloat16, torch.float16):
        return
    small = shrink(config)
    small.use_cache = small.get_text_config().use_cache = False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        seed_rng(0)
        try:
            copy = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
            choose_experts(copy, "eager", torch.float32)
            tokens = torch.randint(0, small.get_text_config().vocab_size, (1, TOKENS))
            copy(input_ids=tokens)
        except FORWARD_ERRORS:
            return  # it says nothing about dtypes
        for parameter in copy.parameters():
            parameter.data = parameter.data.to(compute)
        try:
            copy(input_ids=tokens)
        except FORWARD_ERRORS as error:
            dtype = str(compute).removeprefix("torch.")
            raise ModelError(
                f"{config.model_type} does not run in {dtype} on a CPU, because its {tables[0]} stays fp32"
                f" ({str(error).splitlines()[0]}). Use precision=fp32"
            ) from error
