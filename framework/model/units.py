"""Parts of a model that are found by structure: its units (the embedding, each decoder layer, the head), and recurrent mixers.

A unit is the granularity of ZeRO's gathers, of activation checkpointing, compilation, offload and pipeline stages. No name of a
model family appears here: the decoder is the ModuleList as long as the config says, and what stands around it is decided by
the model's own accessors and by order of registration.

A recurrent mixer carries a state, or a window of a convolution, from token to token. transformers' mixers of any family call
functions of a few common names, each with one meaning: `causal_conv1d_fn` is the short convolution,
`torch_chunk_gated_delta_rule` the delta rule with a decay for each head, `mamba2_chunk_scan` a state space of heads. Which of
them a forward calls is what the mixer is, and a mixer computes by other functions if it is given a namespace that has them.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, takewhile
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# The siblings of the layer list that come after it in the computation, as Hugging Face names them; some families register
# theirs before the layers (opt), so order alone would put the final norm with the embedding.
FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "final_norm", "layernorm_f")
# Siblings that some families register behind the layers, although they make the first layer's input: a norm of the embedding, and
# gemma's inputs of every layer and copies of the hidden states.
FIRST_MODULES = ("layernorm_embedding", "per_layer_model_projection", "per_layer_projection_norm", "altup_projections")


@dataclass(frozen=True)
class Unit:
    """The embedding, one decoder layer, or the head.

    modules: every module of the unit, children before parents. parameters: the names of its parameters; each parameter of the
    model is in exactly one unit, a tied one where it comes first in the computation.
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def is_layer(self) -> bool:
        return self.name.startswith("layers.")

    @property
    def root(self) -> str:
        """The module that holds the whole unit; for a layer, the layer itself."""
        return self.modules[-1]


def find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList] | None:
    """Name and list of the decoder layers; None for a model without a list.

    Among the ModuleLists with `num_hidden_layers` entries, or among all if there is none, it is the one nearest to the input
    embedding in the tree (a vision tower may have as many layers), of several the outermost, and of these the one with the most
    parameters.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return None
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    exact = [entry for entry in lists if len(entry[1]) == num_layers]
    embedding = next((name for name, module in model.named_modules() if module is model.get_input_embeddings()), "")

    def nearness(entry: tuple[str, nn.ModuleList]) -> tuple[int, int, int]:
        pairs = zip(entry[0].split("."), embedding.split("."), strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return shared, -entry[0].count("."), sum(p.numel() for p in entry[1].parameters())

    return max(exact or lists, key=nearness)


def find_last_module(model: PreTrainedModel) -> nn.Module:
    """The final norm of a model with a list of layers, or its last layer if there is none."""
    found = find_layers(model)
    assert found is not None, f"{type(model).__name__} has no layers"
    name, layers = found
    norms, is_behind, parent = [], False, model.get_submodule(name.rpartition(".")[0])
    for child, module in parent.named_children():
        is_behind |= module is layers
        if child in FINAL_NORMS or (is_behind and "norm" in child and not _makes_input(parent, child)):
            norms.append(module)
    return norms[-1] if norms else layers[-1]


def find_units(model: PreTrainedModel) -> list[Unit]:
    """The units in order of computation: embedding, layers.0 ..., head. A model without a layer list is one embedding unit."""
    found = find_layers(model)
    layers, num_layers = (found[0] + ".", len(found[1])) if found else (None, 0)
    after = _modules_after_layers(model, found[0]) if found else set()

    def unit_of(module: str) -> str:
        if layers and module.startswith(layers):
            return "layers." + module[len(layers) :].split(".")[0]
        return "head" if any(module == name or module.startswith(name + ".") for name in after) else "embedding"

    order = ["embedding", *(f"layers.{index}" for index in range(num_layers)), "head"]
    modules: dict[str, list[str]] = {name: [] for name in order}
    parameters: dict[str, list[str]] = {name: [] for name in order}
    for name in _children_first(model):
        modules[unit_of(name)].append(name)
    rank = {name: index for index, name in enumerate(order)}
    owners: dict[nn.Parameter, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = unit_of(name.rpartition(".")[0])
        if parameter not in owners or rank[unit] < rank[owners[parameter][0]]:
            owners[parameter] = (unit, name)
    for unit, name in owners.values():
        parameters[unit].append(name)
    return [Unit(name, tuple(modules[name]), tuple(parameters[name])) for name in order if modules[name]]


def tied_names(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """All names of each parameter, by its name in its unit: more than one where it is tied."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    owned = {name for unit in find_units(model) for name in unit.parameters}
    return {next(name for name in group if name in owned): tuple(group) for group in names.values()}


def set_parameter(model: nn.Module, names: tuple[str, ...], parameter: nn.Parameter) -> None:
    """Register one Parameter under all its (tied) names."""
    for full_name in names:
        path, _, name = full_name.rpartition(".")
        model.get_submodule(path).register_parameter(name, parameter)


def _modules_after_layers(model: PreTrainedModel, layers: str) -> set[str]:
    """The output embedding, the final norm, and what their parent modules register after the layers (not rotary tables)."""
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), "")
    # With what is around it (camembert registers its head, of several modules, in front of the model).
    after = {name for name in accumulate(head.split("."), "{}.{}".format) if name and not layers.startswith(f"{name}.")}
    embedding = next((name for name, module in model.named_modules() if module is model.get_input_embeddings()), None)
    path = layers.split(".")
    for depth in range(len(path)):
        parent = ".".join(path[:depth])
        passed, holder = False, model.get_submodule(parent)
        for child, module in holder.named_children():
            name = f"{parent}.{child}" if parent else child
            passed = passed or child == path[depth]
            trails = passed and child != path[depth] and any(True for _ in module.parameters())
            if (trails or child in FINAL_NORMS) and name != embedding and not _makes_input(holder, child):
                after.add(name)
    return after


def _makes_input(parent: nn.Module, child: str) -> bool:
    """Whether a sibling of the layers runs in front of them, wherever it is registered."""
    if child not in FIRST_MODULES:
        return child.startswith("embed_")
    # bigbird_pegasus has bart's name for its final norm, in bart's place: only its code tells which it is.
    code = inspect.getsource(type(parent).forward)
    return code.find(f"self.{child}(") < code.find("self.layers")


def _children_first(model: nn.Module) -> list[str]:
    """Module names, each after all modules inside it: the order in which Hugging Face initialises."""
    names: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        for child, inner in module.named_children():
            visit(inner, f"{name}.{child}" if name else child)
        names.append(name)

    visit(model, "")
    return names


CONVOLUTION, DELTA_RULE, CHANNEL_DELTA_RULE = (
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
)
STATE_OF_HEADS, STATE_OF_CHANNELS = "mamba2_chunk_scan", "mamba_selective_scan"
# Names of kernels for a whole mixer. Without a kernel they return None, and the mixer calls the functions above.
WHOLE_MIXERS = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
# Takes padding out by a mask.
MASK = "apply_mask_to_padding_states"
# The functions that mix tokens, those that carry a state first.
MIXING = (DELTA_RULE, CHANNEL_DELTA_RULE, STATE_OF_HEADS, STATE_OF_CHANNELS, CONVOLUTION)


def find_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The recurrent mixers of a model, with their names."""
    yield from ((name, module) for name, module in model.named_modules() if form_of_mixer(module) is not None)


def form_of_mixer(module: nn.Module) -> str | None:
    """The function by which a mixer carries its state, or its convolution where it has nothing else; None: it is no mixer."""
    names = called_names(module)
    form = next((each for each in MIXING if each in names), None)
    # Decays of its own: it carries a state as well, by code that nobody here knows.
    return None if form == CONVOLUTION and any(True for _ in module.parameters(recurse=False)) else form


@dataclass(frozen=True)
class LinearHeads:
    """The heads of a mixer whose state is a matrix for each: their numbers, of keys and of values, and features of a head."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


def linear_heads(mixer: Any) -> LinearHeads:
    """The heads of a delta rule, of as many as the mixer has here: numbers of their own for keys and values, or one."""
    if hasattr(mixer, "num_k_heads"):
        return LinearHeads(mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
    return LinearHeads(mixer.num_heads, mixer.num_heads, mixer.head_dim, mixer.head_dim)


def count_state(module: nn.Module) -> int:
    """The multiplications by which a mixer itself reads, corrects and writes its state for a token, beside those with weights."""
    if has_state_space(module):
        return 3 * count_state_elements(module)  # it decays, is added to, and read
    if form_of_mixer(module) not in (DELTA_RULE, CHANNEL_DELTA_RULE):
        return 0
    heads = linear_heads(module)
    return 3 * heads.values * heads.key_dim * heads.value_dim


def count_map(mixer: nn.Module) -> int:
    """Elements of what takes a mixer's state across tokens, however many: a matrix for the state, or its decays, and what they
    add."""
    if has_state_space(mixer):
        return count_state_elements(mixer) + mixer.get_parameter("A_log").numel()
    if form_of_mixer(mixer) not in (DELTA_RULE, CHANNEL_DELTA_RULE):
        return 0
    heads = linear_heads(mixer)
    return heads.values * heads.key_dim * (heads.key_dim + heads.value_dim)


def count_channels(mixer: Any, channels: int, tp: int) -> int:
    """Channels of the convolution on a rank of `tp`, of so many in all; ranks of one group of heads all have its states."""
    if form_of_mixer(mixer) != STATE_OF_HEADS:
        return channels // tp
    states: int = 2 * mixer.n_groups * mixer.ssm_state_size
    return (channels - states) // tp + states // min(tp, mixer.n_groups)


def has_state_space(module: nn.Module) -> bool:
    """Whether a mixer's state is decayed, by heads or by channels, and nothing else."""
    return form_of_mixer(module) in (STATE_OF_HEADS, STATE_OF_CHANNELS)


def count_state_elements(mixer: Any) -> int:
    """Elements of the state of a state space: for each of its features as many as it has states."""
    elements: int = mixer.intermediate_size * mixer.ssm_state_size
    return elements


def called_names(module: nn.Module) -> frozenset[str]:
    """The names that the forward of a module of transformers reads from its file, functions among them; none of another's."""
    kind = type(module)
    return _read_names(kind.forward) if kind.__module__.startswith("transformers.") else frozenset()


@cache
def _read_names(forward: Callable[..., Any]) -> frozenset[str]:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def call_by(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Have the forward of this one module, which stays as it is written, find these functions by their names."""
    # A function of the same code in a namespace of its own: the family's file, and every other module of it, stay untouched.
    forward: Any = inspect.unwrap(type(module).forward)
    own = FunctionType(
        forward.__code__, forward.__globals__ | functions, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = partial(own, module)
