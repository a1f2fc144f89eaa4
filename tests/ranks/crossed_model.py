"""A causal language model whose parameters are read elsewhere than where they stand, of sizes and dtypes that fit nothing.

Layer 2 computes with layer 0's matrix. `late` stands before the layers and runs after them. Each layer has a scale of one
element, fewer than there are ranks, which stays fp32 in a bf16 model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tests.families import Family


class CrossedConfig(PreTrainedConfig):
    model_type = "meshwright_crossed"

    def __init__(self, vocab_size=97, hidden_size=9, num_hidden_layers=4, **values):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**values)


class Scale(nn.Module):
    """Multiplies by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


class CrossedLayer(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.inner = nn.Linear(hidden_size, hidden_size)
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale(torch.tanh(self.inner(x)))


class CrossedForCausalLM(PreTrainedModel):
    config_class = CrossedConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ("scale",)
    # transformers keeps the ties that this names, where the config ties any.
    _tied_weights_keys = {"layers.2.inner.weight": "layers.0.inner.weight"}  # noqa: RUF012

    def __init__(self, config: CrossedConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.late = nn.Linear(config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([CrossedLayer(config.hidden_size) for _ in range(config.num_hidden_layers)])
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.layers[2].inner.weight = self.layers[0].inner.weight
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Scale):
            nn.init.constant_(module.weight, 0.9)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutput:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.head(self.late(x)))


AutoConfig.register(CrossedConfig.model_type, CrossedConfig)
AutoModelForCausalLM.register(CrossedConfig, CrossedForCausalLM)


@dataclass(frozen=True)
class CrossedFamily(Family):
    """Of this module, so that a rank that is sent one imports it and has the model registered."""


CROSSED = CrossedFamily("crossed", {"model_type": CrossedConfig.model_type, "tie_word_embeddings": True})
