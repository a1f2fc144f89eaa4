"""A tokenizer, `model.tokenizer=bytes`: a token for each byte of UTF-8, and one that ends a document."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from framework.extend import tokenizer


@tokenizer("bytes")
def make_bytes():
    """A fast tokenizer of transformers; it is kept beside the tokens, so that an export has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={each: index for index, each in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
