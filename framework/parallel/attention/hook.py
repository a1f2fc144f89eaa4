"""Hooks: how the attention of a model's layers becomes ours, on one rank or across those that divide its sequences.

Parameters stay whole: context parallelism divides tokens, and ZeRO takes `cp` for data. What changes is attention, the one place
of a decoder where tokens meet. Hugging Face's modules ask a registry of attention functions for the one that their config names.
Ours is registered once, at import, and holds nothing: the module that calls it carries a Hook, which knows this rank's
ContextAttention and rows. Recurrent mixers get functions of ours as well (`recurrent`). That nothing else mixes tokens the probe
has shown on a small copy.

The registry of mask functions does not know the name, so a model computes no mask, and hands on the one that carries a
microbatch's `Documents`.

Indexers choose the keys of a sparse attention (DeepSeek's) over the keys of all ranks of `cp`. An indexer scores the keys of a
sequence by a few small heads of its own, and a query of the attention sees those of the k largest scores alone. It runs without
gradients and is Hugging Face's own, called with

    attention_mask    [B, C, S] bool: what each query may see. The attention is given it as [B, 1, C, S], with the documents on
                      it, where its model would compute no mask
    cache             hands back the keys of all ranks, [B, S, Di], for those of this rank's tokens, [B, C, Di]

It gives rows of keys, [B, C, k], to the attention function, which knows them as `indices`. A layer without an indexer of its own
(glm_moe_dsa's) is handed the choice of the one before.

    B sequences, C tokens of each on this rank, S rows of the whole sequence, H query heads, Hk key-value heads, D and Dv features
    of a head, Di of an indexer's head
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from framework.comm.collectives import all_gather
from framework.comm.communicator import Communicator
from framework.errors import ModelError, TopologyError
from framework.mesh.layout import Layout
from framework.mesh.token_layout import ContextSlices
from framework.model.load import layer_configs
from framework.parallel.attention.attention import (
    TRANSPORTS,
    ContextAttention,
    HeadMaxima,
    LogitMaxima,
    attend_in_graph,
)
from framework.parallel.attention.block_attention import BlockAttention
from framework.parallel.attention.pieces import Pieces
from framework.parallel.attention.recurrent import hook_mixers
from framework.parallel.attention.visible_rows import Documents, Scores
from framework.parallel.attention.whole_tokens import hook_whole, tokens_of
from framework.parallel.stage_plan import StagePlan
from framework.recipe.layout_rules import find_uneven_heads
from framework.recipe.schema import Parallel

# The attention implementation of a model's config. It has no mask function.
IMPLEMENTATION = "meshwright"
# Tensors that a module may hand over: sinks, and positions, which queries and keys have been rotated by.
TENSOR_OPTIONS = ("s_aux", "position_ids", "cache_position")
# Rows of the keys that an indexer has chosen for each query, [B, C, k].
CHOSEN = "indices"

# (q [B, H, C, D], k [B, Hk, C, D], v [B, Hk, C, Dv], scores, sinks [H], documents) -> [B, C, H, Dv]: a ContextAttention.
Attention = Callable[[Tensor, Tensor, Tensor, Scores, Tensor | None, Documents | None], Tensor]


class AttentionDropout(ModelError):
    """Attention was called with dropout."""


@dataclass(frozen=True)
class Hook:
    """An attention module's way to this rank's attention. attention: a ContextAttention; rows: of a device, the global rows [C]
    or [B, C] of the tokens of each sequence that the rank holds; whole: sequences of one document each; gather: the same of the
    tokens of all ranks, [B, C, D] -> [B, S, D] in the order of rows, without gradient."""

    attention: Attention
    rows: Callable[[torch.device], Tensor]
    whole: Documents
    gather: Callable[[Tensor], Tensor] = lambda x: x


# (module, query [B, H, C, D], documents, hook) -> query and documents as in one process.
QueryRule = Callable[[Any, Tensor, Documents | None, Hook], tuple[Tensor, Documents | None]]


def split_context(model: PreTrainedModel, layouts: Mapping[str, Layout], plan: StagePlan) -> Mapping[str, Layout]:
    """Have every attention of the model attend by ours, across `ulysses` and `ring`, and every recurrent mixer pass its state on
    over `cp`. Layouts stay. Where the plan leaves attention to transformers, modules that it names get the tokens of all ranks.

    model: on meta, its heads divided over `tp` already. Raises TopologyError where a rank's heads do not divide over `ulysses`.
    """
    ulysses, ring, slices = plan.axes["ulysses"], plan.axes["ring"], plan.tokens.slices
    if plan.whole_mixers:
        assert slices is not None, "tokens of a rank of cp without their rows"
        hook_whole(model, plan.whole_mixers, tokens_of(slices, plan.axes["cp"]), plan.recipe.data.isolates)
    if not plan.owns_attention:
        return layouts
    assert slices is not None, "tokens of a rank of cp without their rows"
    refuse_uneven_heads(layer_configs(model.config), plan.recipe.parallel)
    chosen = plan.recipe.parallel.context
    method = chosen if isinstance(chosen, str) and chosen in TRANSPORTS else "ring"
    # On one rank `ulysses` and `ring` have size 1: nothing is exchanged, nothing is sent, and there is one block.
    # One of each for all layers: kernels are compared once, and what documents are cut into is found once.
    block, whole = BlockAttention(), Documents(((0,),), slices.context + slices.padding)

    def make_hook() -> Hook:
        attention = ContextAttention(slices, ulysses, ring, method, block)
        return Hook(
            attention, lambda device: rows_of(slices, device), whole, partial(gather_rows, slices, plan.axes["cp"])
        )

    hook_attentions(model, make_hook)
    hook_mixers(model, Pieces(slices, plan.axes["cp"]))
    return layouts


def refuse_uneven_heads(layers: Iterable[PretrainedConfig], parallel: Parallel) -> None:
    """Raises TopologyError where the heads of a layer do not divide over Ulysses' ranks. layers: the config of each kind of
    layer."""
    for config in layers:
        # Models of state spaces have no heads (mamba): others say what is in the way of dividing their sequences.
        heads = getattr(config.get_text_config(), "num_attention_heads", None)
        for problem in find_uneven_heads(parallel, heads) if heads else ():
            raise TopologyError(f"{problem.key}: {problem.message}, of a {config.model_type} model: use {problem.fix}")


def rows_of(slices: ContextSlices, device: torch.device) -> Tensor:
    """The global rows of a rank's tokens, [C] int64, padding counted on."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in slices.intervals])


def gather_rows(slices: ContextSlices, cp: Communicator, x: Tensor) -> Tensor:
    """Tokens of all ranks of `cp`, padding included: [B, C, ...] -> [B, S, ...]. Not differentiable."""
    parts = x.new_empty(cp.size, *x.shape)
    all_gather(parts, x.contiguous(), cp)
    return slices.padded().join(parts)


def find_context_attentions(model: nn.Module) -> dict[nn.Module, tuple[ContextAttention]]:
    """Each attention of the model over the ranks of `cp`, by the module that calls it."""
    hooks = ((module, vars(module).get("context_hook")) for module in model.modules())
    attentions = ((module, hook.attention) for module, hook in hooks if isinstance(hook, Hook))
    return {module: (each,) for module, each in attentions if isinstance(each, ContextAttention)}


def watch_logits(model: nn.Module, plan: StagePlan, maxima: LogitMaxima) -> None:
    """Have the attentions of a stage note their largest logits. model: the stage's, with our attentions."""
    tp, ulysses = plan.axes["tp"], plan.axes["ulysses"]
    layers = [unit.name for unit in plan.units if unit.is_layer]
    for unit in (each for each in plan.own_units if each.is_layer):
        for (attention,) in find_context_attentions(model.get_submodule(unit.root)).values():
            # Ulysses divides the heads that tensor parallelism has left to a rank: neighbours of it have neighbouring heads.
            parts = tp.size * ulysses.size, tp.rank * ulysses.size + ulysses.rank
            attention.maxima = HeadMaxima(maxima, layers.index(unit.name), *parts)


def hook_attentions(model: PreTrainedModel, make_hook: Callable[[], Hook]) -> None:
    """Give a hook of its own to every attention of the model, and have the model call them by it."""
    # On the module and not in a registry of ours: a copy of a model has hooks of its own, and they go with it.
    for module in find_attentions(model):
        module.context_hook = make_hook()
        if has_indexer(module):
            hook_indexer(module)
    # Tensor parallelism gives some modules a config of their own.
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = IMPLEMENTATION


def find_attentions(model: nn.Module) -> Iterator[Any]:
    """The modules that ask Hugging Face's registry for an attention function."""
    asks: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in asks:
            asks[kind] = _asks_registry(kind)
        if asks[kind]:
            yield module


def _asks_registry(kind: type[nn.Module]) -> bool:
    # Read off the source, since nothing else tells before the module is called.
    forward = inspect.unwrap(kind.forward)
    return kind.__module__.startswith("transformers.") and "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(forward)


def attend_module(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of this rank's tokens to the sequence, called as transformers' attention functions are.

    query: [B, H, C, D]; key: [B, Hk, C, D]; value: [B, Hk, C, Dv]; attention_mask: None, or one that carries Documents.
    options: dropout, scaling, sliding_window, softcap, s_aux (sinks [H]) as Hugging Face names them. Numbers and flags beside
    these are left out: where one matters, the probe finds a difference. Returns ([B, C, H, Dv], None).

    Raises AttentionDropout, and ModelError for a module without a Hook, for a mask that is none of ours and for tensors that are
    not known: a choice of keys may leave none out in the probe's short sequences.
    """
    if torch.compiler.is_compiling() and _has_operator(module, options):
        scores = _read_scores(query, options)
        attention, sinks = module.context_hook.attention, options.get("s_aux")
        return attend_in_graph(attention, query, key, value, scores, sinks, attention_mask), None
    return _attend_module(module, query, key, value, attention_mask, **options)


def _has_operator(module: Any, options: Mapping[str, Any]) -> bool:
    """Whether this call can be one operator of a graph: nothing of it is to be refused."""
    knows_all = not any(isinstance(value, Tensor) and name not in TENSOR_OPTIONS for name, value in options.items())
    return knows_all and not options.get("dropout") and is_operator(module)


def is_operator(module: nn.Module) -> bool:
    """Whether the module's attention is operators of a compiled layer's graph: ours, with no query that depends on its row and no
    chosen keys."""
    hook = getattr(module, "context_hook", None)
    attention: Any = hook.attention if isinstance(hook, Hook) else None
    return attention is not None and type(module).__name__ not in QUERY_RULES and not has_indexer(module)


def _read_scores(query: Tensor, options: Mapping[str, Any]) -> Scores:
    scale, window, softcap = (options.get(name) for name in ("scaling", "sliding_window", "softcap"))
    return Scores(query.shape[-1] ** -0.5 if scale is None else scale, window, softcap)


# Its work differs between documents, ranks and steps, and messages are counted: traced, it would be compiled again and again.
@torch.compiler.disable
def _attend_module(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    hook = vars(module).get("context_hook")
    if not isinstance(hook, Hook):
        raise ModelError(f"{type(module).__name__} calls an attention function in a way that its source does not show")
    known = (*TENSOR_OPTIONS, CHOSEN)
    unknown = [name for name, value in options.items() if isinstance(value, Tensor) and name not in known]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} hands {' and '.join(unknown)} to its attention function, which Meshwright does not know"
        )
    # The dropped probabilities would depend on how a sequence is divided.
    if dropout := options.get("dropout"):
        raise AttentionDropout(f"{type(module).__name__} drops {dropout:g} of its attention's probabilities")
    documents = None if attention_mask is None else _read_documents(module, attention_mask)
    # Before scores: a rule may change queries, and what they may see.
    rule = QUERY_RULES.get(type(module).__name__)
    if rule is not None:
        query, documents = rule(module, query, documents, hook)
    if (chosen := options.get(CHOSEN)) is not None:
        documents = (documents or hook.whole).choosing(chosen)
    return hook.attention(query, key, value, _read_scores(query, options), options.get("s_aux"), documents), None


def _read_documents(module: nn.Module, attention_mask: Tensor) -> Documents:
    documents = Documents.of_mask(attention_mask)
    if documents is None:
        raise ModelError(
            f"{type(module).__name__} computes an attention mask of its own,"
            f" {str(attention_mask.dtype).removeprefix('torch.')} {[*attention_mask.shape]}"
        )
    return documents


def _attend_within_chunks(
    module: Any, query: Tensor, documents: Documents | None, hook: Hook
) -> tuple[Tensor, Documents | None]:
    """Llama 4: a query sees its chunk of its document, or in layers without rope all, with a temperature that grows by rows."""
    if module.config.layer_types[module.layer_idx] == "chunked_attention":
        documents = (documents or hook.whole).within(module.config.attention_chunk_size)
    if module.attn_temperature_tuning and not module.use_rope:
        # The module has multiplied by those of rows 0 .. C - 1, which are all that its forward knows of.
        rows, local = hook.rows(query.device), torch.arange(query.shape[2], device=query.device)
        ratio = _temperature(module, rows) / _temperature(module, local)
        query = query * ratio.to(query.dtype)[..., None, :, None]
    return query, documents


def _temperature(module: Any, rows: Tensor) -> Tensor:
    steps = torch.floor((rows.float() + 1.0) / module.floor_scale)
    return (torch.log1p(steps) * module.attn_scale + 1.0).double()


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class GatheredKeys:
    """The place of an indexer's cache of keys. gather: [B, C, Di] of this rank's tokens -> [B, S, Di] of all."""

    gather: Callable[[Tensor], Tensor]

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """The keys of all ranks."""
        return self.gather(keys)


def has_indexer(attention: nn.Module) -> bool:
    """Whether an attention sees keys that an indexer has chosen, its own or that of a layer before. MiniMax's chooses blocks, and
    takes no mask."""
    indexer = getattr(attention, "indexer", None)
    return hasattr(attention, "indexer") and (indexer is None or "attention_mask" in _parameters_of(indexer))


def hook_indexer(attention: Any) -> None:
    """Have an attention with a `context_hook` choose among the keys of all ranks."""
    attention.register_forward_pre_hook(_give_mask, with_kwargs=True)
    if attention.indexer is not None:
        attention.indexer.context_hook_of_keys = GatheredKeys(attention.context_hook.gather)
        attention.indexer.register_forward_pre_hook(_give_keys, with_kwargs=True)


def _give_mask(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    hook, given = attention.context_hook, kwargs.get("attention_mask")
    device = (args[0] if args else kwargs["hidden_states"]).device
    documents: Documents = hook.whole if given is None else Documents.of_mask(given) or hook.whole
    mask: Any = find_visible(documents, hook.rows(device))[:, None]
    mask.documents = documents
    return args, kwargs | {"attention_mask": mask}


def _give_keys(indexer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    # Its older name, before transformers 5.24.
    name = "cache" if "cache" in _parameters_of(indexer) else "past_key_values"
    return args, kwargs | {name: indexer.context_hook_of_keys}


def _parameters_of(indexer: Any) -> Collection[str]:
    return inspect.signature(inspect.unwrap(indexer.forward)).parameters.keys()


def find_visible(documents: Documents, rows: Tensor) -> Tensor:
    """Whether each query sees each key, as far as order and documents go: [B or 1, C, S]. rows: of the queries, [C] or [B, C]."""
    first = documents.first_rows(rows.device)
    first = first[:, rows] if rows.ndim == 1 else first[0, rows]
    keys = torch.arange(documents.length, device=rows.device)
    return (keys <= rows[..., None]) & (keys >= first[..., None])


# Keyed by the class of an attention that computes something from the rows of its tokens, which a rank with some of them corrects.
QUERY_RULES: Mapping[str, QueryRule] = MappingProxyType({"Llama4TextAttention": _attend_within_chunks})

AttentionInterface.register(IMPLEMENTATION, attend_module)
