"""Every causal language model that Hugging Face knows: does its small copy train, and do its weights go out and in?

Run `python scripts/sweep_families.py [model_type ...]`: one line per model type from its default config, then a count.
  trains   one forward and backward pass on CPU is finite
  weights  `write_weights` gives the files of `save_pretrained`, and `read_weights` returns the state dict from them
"""

import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from framework.mesh.box import Box
from framework.model.shrink import shrink
from framework.model.weights import read_weights, write_weights


def main(model_types: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    counts: Counter[tuple[str, ...]] = Counter()
    for model_type in model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        results = examine(model_type)
        counts[tuple(result.split(":")[0] for result in results)] += 1
        print(f"{model_type:24s} {'; '.join(results)}", flush=True)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for outcome, number in counts.most_common():
        print(f"{number:4d} {'; '.join(outcome)}")


def examine(model_type: str) -> list[str]:
    try:
        full = CONFIG_MAPPING[model_type]()
        meta(full)
    except Exception as error:
        return [f"default config does not build: {describe(error)}"]
    try:
        small = shrink(full)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).train()
    except Exception as error:
        return [f"does not shrink: {describe(error)}"]
    return [check(train, model), check(round_trip, model, small)]


def check(claim: Callable[..., None], *subject: Any) -> str:
    try:
        claim(*subject)
    except Exception as error:
        return f"fails to {claim.__name__}: {describe(error)}"
    return f"{claim.__name__} ok"


def train(model: PreTrainedModel) -> None:
    tokens = torch.randint(0, model.config.get_text_config().vocab_size, (2, 24))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def round_trip(model: PreTrainedModel, config: PretrainedConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder, "theirs"), Path(folder, "ours")
        model.save_pretrained(theirs)
        own, units = meta(config), by_layer(model)
        write_weights(ours, own, units, torch.float32)
        compare(load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors"))
        wanted = {name: [Box((0,) * entry.ndim, tuple(entry.shape))] for name, entry in own.state_dict().items()}
        compare({name: tensor for name, _, tensor in read_weights(theirs, own, wanted)}, model.state_dict())


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys(), f"only one side has {sorted(ours.keys() ^ theirs.keys())[:3]}"
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{different[:3]} differ"


def by_layer(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """The state dict in pieces, by the first number in a name."""
    pieces: dict[str, dict[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        layer = next((part for part in name.split(".") if part.isdigit()), "")
        pieces.setdefault(layer, {})[name] = tensor
    return list(pieces.values())


def meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


if __name__ == "__main__":
    main(sys.argv[1:])
