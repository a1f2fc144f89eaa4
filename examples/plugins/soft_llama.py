"""A model, `model.family=soft_llama`: a Llama whose logits are bounded, c tanh(z / c), as Gemma 2's are."""

from transformers import LlamaConfig, LlamaForCausalLM

from framework.extend import model


class SoftLlamaConfig(LlamaConfig):
    """Llama's config under a name of its own, which recipes and exports use."""

    model_type = "soft_llama"


@model
class SoftLlama(LlamaForCausalLM):
    """Any model of transformers: Meshwright divides its layers by their structure, and its code stays as it is."""

    config_class = SoftLlamaConfig

    def forward(self, *args, **kwargs):
        """Logits between -30 and 30."""
        output = super().forward(*args, **kwargs)
        output.logits = 30 * (output.logits / 30).tanh()
        return output
