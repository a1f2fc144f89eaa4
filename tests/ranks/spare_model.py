"""A causal language model with parameters that backward does not reach: never, or only where a certain token comes first."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tests.families import Family


class SpareConfig(PretrainedConfig):
    """open_tokens: the gated layer takes part in a microbatch whose first token is one of these."""

    model_type = "meshwright_spare"

    def __init__(self, vocab_size=97, hidden_size=16, num_hidden_layers=4, open_tokens=(), **values):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.open_tokens = list(open_tokens)
        super().__init__(**values)


class SpareLayer(nn.Module):
    """A residual layer; `spare` is never used."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.inner = nn.Linear(hidden_size, hidden_size)
        self.spare = nn.Linear(hidden_size, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class SpareForCausalLM(PreTrainedModel):
    """Layers 0 and 2 always run, layer 1 is gated by the first token, layer 3 never runs."""

    config_class = SpareConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: SpareConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([SpareLayer(config.hidden_size) for _ in range(config.num_hidden_layers)])
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutput:
        x = self.layers[0](self.embedding(input_ids))
        if int(input_ids[0, 0]) in self.config.open_tokens:
            x = self.layers[1](x)
        return CausalLMOutput(logits=self.head(self.layers[2](x)))


AutoConfig.register(SpareConfig.model_type, SpareConfig)
AutoModelForCausalLM.register(SpareConfig, SpareForCausalLM)


@dataclass(frozen=True)
class SpareFamily(Family):
    """Of this module, so that a rank that is sent one imports it and has the model registered."""


SPARE = SpareFamily("spare", {"model_type": SpareConfig.model_type, "tie_word_embeddings": False})
