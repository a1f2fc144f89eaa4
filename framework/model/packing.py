"""Whether documents that are packed into one row stay apart in a model, found by running a small copy of it.

Hugging Face's mask functions keep attention inside documents where positions restart, if the model hands the positions on.
Most do; gpt_oss, falcon, opt and others do not, and linear attention carries its state across. Neither signature nor config
tells which, and a model that mixes documents up trains on without a word.
"""

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from framework.errors import ModelError
from framework.model.initial import seed_rng
from framework.model.load import FORWARD_ERRORS, accepted_arguments, choose_experts
from framework.model.shrink import shrink

# One longer than the small model's windows of 8 or 9 tokens.
LENGTHS = (7, 12, 5)
# Of 54 families, those that keep documents apart differ by 4e-7 at most in fp32, the others by 1e-2 at least.
LARGEST_DIFFERENCE = 1e-4


def keeps_documents_apart(config: PretrainedConfig) -> bool:
    """Whether packed documents have the same logits as alone, given positions that restart, and neither cache nor mask.

    Raises ModelError where the family's forward fails: roberta's wants the id of a padding token.
    """
    small = shrink(config)
    small.use_cache = small.get_text_config().use_cache = False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        seed_rng(0)
        try:
            model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
            # Grouped matmuls want widths that a small copy may not have.
            choose_experts(model, "eager", torch.float32)
            if "position_ids" not in accepted_arguments(model):
                return False
            tokens = torch.randint(0, small.get_text_config().vocab_size, (1, sum(LENGTHS)))
            positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
            packed = model(input_ids=tokens, position_ids=positions).logits
            alone = torch.cat([model(input_ids=each).logits for each in tokens.split(LENGTHS, dim=1)], dim=1)
        except FORWARD_ERRORS as error:
            raise ModelError(
                f"a small {config.model_type} model does not run on token ids and positions alone: {error}"
            ) from error
    return bool((packed - alone).abs().max() <= LARGEST_DIFFERENCE * alone.abs().max())
