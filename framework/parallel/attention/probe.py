"""Whether the tokens of a sequence can be divided among ranks, found by running a small copy of the model in one process.

    stock model      one document after another
    hooked model     a batch of RANKS rows, each with the tokens that one rank would have; attention alone joins them

Equal logits say three things: tokens meet in attention only (a recurrence or a convolution would end with a row), positions are
those that the model is told, and our attention function computes what the family's masks and scores are (windows, soft-caps,
sinks, biases). Neither signature nor config tells which families pass; one that fails would train on without a word. A config
tells two causes more why sequences are not divided: ropes that go by the longest position, and dropout of attention.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.mesh.token_layout import ContextSlices
from framework.mesh.topology import Axis
from framework.model.load import FORWARD_ERRORS
from framework.model.probe import draw_tokens, small_copy
from framework.model.shrink import shrink
from framework.model.units import find_mixers
from framework.parallel.attention.attention import ContextAttention
from framework.parallel.attention.block_attention import BlockAttention
from framework.parallel.attention.hook import Attention, AttentionDropout, Hook, find_attentions, hook_attentions
from framework.parallel.attention.pieces import ONE_RANK, Pieces
from framework.parallel.attention.recurrent import hook_mixers
from framework.parallel.attention.visible_rows import Documents, Scores
from framework.parallel.attention.whole_tokens import WholeTokens, find_whole_mixers, hook_whole
from framework.recipe.schema import Recipe

RANKS = 2
# Documents of a row. One is longer than the small model's windows of 8 or 9 tokens; the second one spans the ranks.
LENGTHS = (5, 17, 6)
# Among 105 families those that pass differ by at most 3e-6 in fp32, the others by at least 4e-5.
LARGEST_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Cause:
    """Why a model is refused. fix: what to set, if anything but cp would do."""

    what: str
    fix: str | None = None


def refuse_undivided_context(
    config: PretrainedConfig, slices: ContextSlices, has_documents: bool, known: Sequence[Cause] | None = None
) -> None:
    """Raises ModelError for a model whose sequences `slices` cannot divide exactly, with what is in the way.

    has_documents: rows hold several documents, whose positions restart (`data.pack=documents`). known: what `probe_causes` has
    found of the model; None: it is asked here.
    """
    causes = probe_causes(config, has_documents) if known is None else known
    cause = next(chain(find_uneven_rope(config.get_text_config(), slices, has_documents), causes), None)
    if cause is not None:
        fix = "Use" if cause.fix is None else f"Set {cause.fix}, or use"
        raise ModelError(
            f"parallel.cp={slices.ranks} cannot divide the sequences of {config.model_type} models: {cause.what}. {fix}"
            " parallel.cp=1; parallel.tp, zero.stage=3 and memory.activation_checkpointing=full make room for long sequences, too"
        )


def find_stock_attention(config: PretrainedConfig, recipe: Recipe) -> str | None:
    """The reason why attention is left to transformers where no sequence is divided; None: it is ours."""
    if recipe.model.attention != "auto":
        return f"model.attention={recipe.model.attention}"
    try:
        return _find_difference(_ask(config, recipe))
    except ModelError as error:
        return str(error)


@dataclass(frozen=True)
class _Asked:
    """A small copy's config with its model's dropouts. The answer for one need not be found again for others that are equal."""

    text: str
    has_documents: bool
    config: PretrainedConfig = field(compare=False)


def _ask(config: PretrainedConfig, recipe: Recipe) -> _Asked:
    small = shrink(config)
    # Noted on a config by whoever builds a model of it; the small copy is in fp32 anyway.
    small.dtype = small.get_text_config().dtype = None
    # A small copy drops nothing, whatever its model does.
    return _Asked(f"{small.to_json_string()} {read_dropouts(config)}", recipe.data.isolates, config)


@cache
def _find_difference(asked: _Asked) -> str | None:
    """The reason why documents of the small copy have other logits by our attention than each alone by transformers', if any."""
    # Without packed documents one is enough: nothing separates tokens but the window, which is shorter.
    rows = _Rows(LENGTHS if asked.has_documents else (sum(LENGTHS),))
    with small_copy(asked.config) as model:
        if not any(True for _ in chain(find_attentions(model), find_mixers(model))):
            return "its attention asks no registry for its function"
        _fill_zeros(model)
        probe = _Probe(model)
        tokens = draw_tokens(model, 1, rows.total)
        try:
            expected = probe.run_stock(tokens, rows)
            found = probe.run_in_order(tokens, rows)
        except FORWARD_ERRORS as error:
            return f"a small one does not run on token ids and positions alone ({error})"
    if not _is_close(found, expected):
        return "its attention is not only causal, windowed, soft-capped or biased by sinks"
    return next((cause.what for cause in find_dropout(asked.config)), None)


def probe_causes(config: PretrainedConfig, has_documents: bool) -> list[Cause]:
    """Run a small copy of the model: the first cause, if any, why no division of its sequences is exact."""
    for lengths in [(sum(LENGTHS),), *([LENGTHS] if has_documents else [])]:
        # Each on a copy of its own: what was hooked once has no stock attention any more.
        with small_copy(config) as model:
            _fill_zeros(model)
            what = next(_Probe(model).find_causes(lengths), None)
        if what is not None:
            return [Cause(what)]
    return find_dropout(config)


def find_whole(config: PretrainedConfig, recipe: Recipe) -> frozenset[str]:
    """Classes of the modules that mix tokens, of a model whose small copy computes on ranks as in one process where these get the
    tokens of all ranks; none where our attention divides them, or where neither is exact."""
    return _find_whole(_ask(config, recipe))


@cache
def _find_whole(asked: _Asked) -> frozenset[str]:
    if not probe_causes(asked.config, asked.has_documents) or any(
        "att" in each for each in read_dropouts(asked.config)
    ):
        return frozenset()
    rows = _Rows(LENGTHS if asked.has_documents else (sum(LENGTHS),))
    with small_copy(asked.config) as model:
        _fill_zeros(model)
        probe, tokens = _Probe(model), draw_tokens(model, 1, rows.total)
        try:
            expected, mixers = probe.run_stock(tokens, rows), find_whole_mixers(model, tokens)
            is_exact = bool(mixers) and _is_close(probe.run_whole(tokens, rows, mixers), expected)
        except (ModelError, *FORWARD_ERRORS):
            return frozenset()
    return frozenset(mixers) if is_exact else frozenset()


def find_uneven_rope(config: PretrainedConfig, slices: ContextSlices, has_documents: bool) -> Iterator[Cause]:
    """Ropes that choose between two tables by the largest position that they are told, which ranks are told differently."""
    if (original := _original_positions(config)) is None or slices.context <= original:
        return
    last = [min(each.intervals[-1][1], slices.context) for each in map(slices.of_rank, range(slices.ranks))]
    if has_documents or min(last) <= original:
        told = "its documents have" if has_documents else "a rank has"
        what = (
            f"its longrope has one table for up to {original} positions, another for more, and where"
            f" batch.context={slices.context} is more, {told} fewer (longest on a rank: {min(last)})"
        )
        yield Cause(what, f"batch.context={original}")


def find_shared_rope(config: PretrainedConfig, context: int, sequences: int, has_documents: bool) -> Cause | None:
    """The rope of a microbatch that chooses between two tables by the largest position of all its rows: one with a long document
    would change another's loss."""
    original = _original_positions(config)
    if original is None or context <= original or sequences == 1 or not has_documents:
        return None
    what = (
        "all rows of a microbatch take the same one of longrope's two tables, by whether any has a document of more than"
        f" {original} positions: a row's loss would depend on its neighbours"
    )
    return Cause(what, f"batch.sequences_per_microbatch=1; or batch.context={original}")


def _original_positions(config: PretrainedConfig) -> int | None:
    """The positions up to which the config's longrope, if it has one, takes its table for short sequences."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            return int(rope["original_max_position_embeddings"])
    return None


def find_dropout(config: PretrainedConfig) -> list[Cause]:
    """The dropout of attention, if the config asks for any."""
    dropouts = read_dropouts(config)
    if not dropouts:
        # A family that drops nothing by its config drops nothing.
        return []
    with small_copy(config, **dropouts) as model:
        model.train()
        hook_attentions(model, lambda: Hook(attend_to_nothing, lambda device: torch.arange(2), Documents(((0,),), 2)))
        try:
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64))
        except AttentionDropout as error:
            named = [path for path in dropouts if "att" in path] or list(dropouts)
            fix = " and ".join(f"model.config.{path}=0" for path in named)
            return [Cause(f"{error}, and which ones would differ with how a sequence is divided", fix)]
        except FORWARD_ERRORS:
            pass  # in training some draw what a small copy lacks; in evaluation it ran
    return []


def read_dropouts(config: PretrainedConfig) -> dict[str, float]:
    """Dropouts that the config asks for, by dotted names."""
    found = ((path, value) for path, value in _walk(config) if "drop" in path)
    return {path: value for path, value in found if isinstance(value, int | float) and value > 0}


def _walk(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    """The config's values by dotted names."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from ((f"{name}.{inner}", each) for inner, each in _walk(value))
        else:
            yield name, value


def attend_to_nothing(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """An attention that mixes no tokens."""
    return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


class _Probe:
    """A small copy of the model, stock, and hooked to whatever it is run with."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def find_causes(self, lengths: tuple[int, ...]) -> Iterator[str]:
        """Why documents of these lengths cannot be divided."""
        rows = _Rows(lengths)
        # Random ids: with equal ones a query could not tell which keys it sees.
        tokens = draw_tokens(self.model, 1, rows.total)
        try:
            expected = self.run_stock(tokens, rows)
        except FORWARD_ERRORS as error:
            yield f"a small one does not run on token ids and positions alone ({error})"
            return
        try:
            # Our errors name the cause; those of the model need a look at where tokens mix.
            found = self._run_divided(tokens, rows)
        except ModelError as error:
            yield str(error)
            return
        except FORWARD_ERRORS as error:
            has_hooks = any(map(_is_hooked, self.model.modules()))
            without_mask = f"it does not run without a mask of Hugging Face's ({error})"
            own_code = "its attention asks no registry for its function, which Meshwright would replace"
            yield self._find_mixing(tokens) or (without_mask if has_hooks else own_code)
            return
        if not _is_close(found, expected):
            yield self._explain(tokens, rows, expected)

    def _positions(self, rows: "_Rows") -> dict[str, Tensor]:
        # One document is told no positions, as in training: some families do not take them.
        return {} if len(rows.lengths) == 1 else {"position_ids": rows.positions}

    def _run_divided(self, tokens: Tensor, rows: "_Rows") -> Tensor:
        """Logits [1, T, V] of a model that has the tokens of each rank in a row of its own."""
        divided = rows.divide(torch.arange(rows.total)[None])
        # An indexer's keys, joined and handed to each rank's row.
        joins = Hook(
            _Joined(rows), lambda device: divided, rows.one_document, lambda x: rows.join(x).expand(RANKS, -1, -1)
        )
        hook_attentions(self.model, lambda: joins)
        hook_mixers(self.model, _JoinedPieces(rows))
        positions = rows.divide(rows.positions)
        logits = self.model(
            input_ids=rows.divide(tokens), position_ids=positions, attention_mask=rows.mask(positions)
        ).logits
        return rows.join(logits)

    def run_stock(self, tokens: Tensor, rows: "_Rows") -> list[Tensor]:
        """Logits [1, T, V] that are right, of the stock model: of each document alone; and of all in a row, where none of them
        sees another. Ropes that choose a table by the largest position choose one for the row."""
        alone = [self.model(input_ids=each).logits for each in tokens.split(rows.lengths, dim=1)]
        expected = [torch.cat(alone, dim=1)]
        if len(rows.lengths) > 1:
            both, positions = (tokens, self._change_first(tokens, rows)), self._positions(rows)
            packed, changed = (self.model(input_ids=each, **positions).logits for each in both)
            first = rows.lengths[0]
            expected += [packed] if _is_alike(packed[:, first:], changed[:, first:]) else []
        return expected

    def _change_first(self, tokens: Tensor, rows: "_Rows") -> Tensor:
        """Other tokens in the first document."""
        changed, first = tokens.clone(), rows.lengths[0]
        changed[:, :first] = (tokens[:, :first] + 1) % self.model.config.get_text_config().vocab_size
        return changed

    def run_in_order(self, tokens: Tensor, rows: "_Rows") -> Tensor:
        """Logits [1, T, V] by our attention, of tokens in one row."""
        hook_attentions(
            self.model, lambda: Hook(rows.whole, lambda device: torch.arange(rows.total), rows.one_document)
        )
        hook_mixers(self.model, Pieces(ContextSlices(rows.total), ONE_RANK))
        logits: Tensor = self.model(input_ids=tokens, attention_mask=rows.mask(tokens), **self._positions(rows)).logits
        return logits

    def run_whole(self, tokens: Tensor, rows: "_Rows", mixers: Collection[str]) -> Tensor:
        """Logits [1, T, V] of a model that has the hidden states of each rank in a row of its own, but within mixers."""
        join = rows.join
        ways = WholeTokens(rows.slices[0].tokens_local, rows.total, join, rows.divide, join)
        hook_whole(self.model, mixers, replace(ways, gather=lambda x: x if x.shape[1] == rows.total else join(x)), True)
        return rows.join(self.model(input_ids=tokens, **self._positions(rows)).logits)

    def _explain(self, tokens: Tensor, rows: "_Rows", expected: Sequence[Tensor]) -> str:
        mixing = self._find_mixing(tokens)
        if mixing is not None:
            return mixing
        # The same attention in one row of tokens: what differs now is attention itself, else it was the positions.
        if _is_close(self.run_in_order(tokens, rows), expected):
            return "its model does not go by position_ids, so that a rank's tokens would be at the wrong positions"
        names = ", ".join(sorted({type(module).__name__ for module in self.model.modules() if _is_hooked(module)}))
        return f"the attention of {names} is not only causal, windowed, soft-capped or biased by sinks"

    def _find_mixing(self, tokens: Tensor) -> str | None:
        """The first module within the layers that mixes tokens although attention does not."""
        rows = torch.arange(tokens.shape[1])
        whole = Documents(((0,),), len(rows))
        hook_attentions(self.model, lambda: Hook(attend_to_nothing, lambda device: rows, whole))
        hook_mixers(self.model, _TokensAlone(ContextSlices(len(rows)), ONE_RANK))
        # Attention gives zeros and mixers see one token, so what is left mixes tokens by code of its own.
        mixers = find_whole_mixers(self.model, tokens).items()
        named = (f"{kind} ({path})" for kind, path in mixers)
        return next((f"{each} mixes tokens outside of an attention that Meshwright can divide" for each in named), None)


@dataclass(frozen=True)
class _Rows:
    """A sequence of documents, and how two ranks divide it: rank r has rows of its own."""

    lengths: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def slices(self) -> list[ContextSlices]:
        return [ContextSlices(self.total, ring=RANKS, rank=rank) for rank in range(RANKS)]

    @property
    def whole(self) -> Attention:
        """Attention over the sequence on one rank."""
        one = [Communicator(Axis(name, 1, 0)) for name in ("ulysses", "ring")]
        return ContextAttention(ContextSlices(self.total), one[0], one[1], "ring", BlockAttention())

    @property
    def positions(self) -> Tensor:
        """[1, T], from 0 in each document."""
        return torch.cat([torch.arange(length) for length in self.lengths])[None]

    @property
    def one_document(self) -> Documents:
        return Documents(((0,),), self.total)

    def mask(self, like: Tensor) -> Tensor | None:
        """The mask that carries the documents, for tokens [B, C]; None for one document."""
        documents = Documents.read(self.positions)
        return None if documents is None else documents.on_mask(like)

    def divide(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [RANKS, T / RANKS, ...]."""
        return torch.cat([each.cut(x, 0) for each in self.slices])

    def join(self, parts: Tensor) -> Tensor:
        """[RANKS, T / RANKS, ...] -> [1, T, ...]."""
        return self.slices[0].join(parts[:, None])


@dataclass(frozen=True)
class _Joined:
    """Attention over all ranks, whose tokens stand in rows of a batch."""

    rows: _Rows

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None, documents: Documents | None
    ) -> Tensor:
        q, k, v = (self.rows.join(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v))
        if documents is not None and documents.chosen is not None:
            documents = documents.choosing(self.rows.join(documents.chosen))
        return self.rows.divide(self.rows.whole(q, k, v, scores, sinks, documents))


class _JoinedPieces(Pieces):
    """The whole sequence, whose tokens stand in rows of a batch: [RANKS, T / RANKS, ...], one row for each rank."""

    def __init__(self, rows: _Rows) -> None:
        super().__init__(ContextSlices(rows.total), ONE_RANK)
        self._rows = rows

    def cut(self, x: Tensor) -> Tensor:
        return self._rows.join(x)[:, None]

    def join(self, x: Tensor) -> Tensor:
        return self._rows.divide(x[:, 0])


class _TokensAlone(Pieces):
    """Every token is a document of its own."""

    def starts(self, device: torch.device) -> Tensor | None:
        return torch.arange(self.slices.context, device=device)[None, None]


def _fill_zeros(model: PreTrainedModel) -> None:
    """Give values to parameters that are zero at the start, such as sinks and biases: they would not show."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=0.1)


def _is_close(found: Tensor, expected: Sequence[Tensor]) -> bool:
    """Whether the logits are those of one of the expectations."""
    return any(bool((found - each).abs().max() <= LARGEST_DIFFERENCE * each.abs().max()) for each in expected)


def _is_hooked(module: nn.Module) -> bool:
    return "context_hook" in vars(module)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Up to rounding: experts multiply as many rows at once as they were sent."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return not one.numel() or torch.allclose(one, other, rtol=LARGEST_DIFFERENCE, atol=1e-6, equal_nan=True)
