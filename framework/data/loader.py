"""The data of a rank: prepared data, opened on all ranks and compared with the model, then this rank's microbatches at a cursor,
the next step's read in the background.

Identity: sample j of microbatch m on dp rank r is the global sample cursor + (m dp + r) b + j, b = sequences_per_microbatch.
So the samples of one step are [cursor, cursor + M dp b) for every split into M microbatches, dp ranks and b sequences. Ranks of
`cp` read the same samples, and each keeps its slices of them. A run that leaves samples out (`skip`) counts only the others.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from types import TracebackType

import numpy as np
import torch
from transformers import PretrainedConfig

from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, share_errors
from framework.comm.transfer import choose_current, pin
from framework.data.growing import GrowingStream, Say, count_window
from framework.data.order import (
    NOTHING_READ,
    Overlong,
    SampleOrder,
    Skipped,
    index_samples,
    key_of,
    permute,
    refuse_no_rows,
)
from framework.data.pack import NO_SAMPLE, Microbatch, Mode, Packer, cut_context
from framework.data.prepared import Prepared, check_vocabulary, find_prepared, open_found
from framework.data.store import Split
from framework.errors import RecipeError
from framework.mesh.token_layout import ContextSlices
from framework.model.probe import keeps_documents_apart
from framework.parallel.attention import find_shared_rope, find_stock_attention
from framework.recipe.problem import Problem, render_problems
from framework.recipe.schema import Recipe

# Small steps are read several at once, since a read costs some 0.2 ms however little it reads: at most this many steps and
# tokens (about 1 MB).
STEPS_READ_AT_ONCE = 32
TOKENS_READ_AT_ONCE = 1 << 15
# Read-ahead from an object store: at least this many tokens, and at most this many samples. Some seconds of training, in which
# a failed request is repeated.
TOKENS_ASKED_AHEAD = 1 << 18
SAMPLES_ASKED_AHEAD = 512
# The size of a stream whose end is not known yet.
UNKNOWN = 1 << 52
HOST = torch.device("cpu")
# Called with the cursor of each step that is handed out, its samples [n] and their rows, in one order.
Hear = Callable[[int, np.ndarray, list[Microbatch]], None]


def open_data(recipe: Recipe, config: PretrainedConfig, world: Communicator) -> Prepared:
    """Open the prepared data on this rank. Rank 0 alone lists the source files and looks for the stores; the others open the few
    files that it names. An error on one rank is every rank's. Collective."""

    def find() -> Prepared:
        found = find_prepared(recipe)
        check_data_fits(recipe, found, config)
        for source in found.sources:  # before any rank waits for the tokenizer of this start
            (source.folder / found.failed).unlink(missing_ok=True)
        return found

    found = broadcast_object(find, world)
    return share_errors(lambda: open_found(found), world)


def check_data_fits(recipe: Recipe, found: Prepared, config: PretrainedConfig) -> None:
    """DataError or RecipeError unless every token has an embedding, every position has one, and the model keeps packed documents
    apart."""
    check_vocabulary(recipe, found.vocab_size, config.get_text_config().vocab_size)
    if problems := list(find_sequence_problems(recipe, config)):
        raise RecipeError(render_problems(problems))


def find_sequence_problems(recipe: Recipe, config: PretrainedConfig) -> Iterator[Problem]:
    """Problems between the recipe's sequences and the model alone: too few positions, or packed documents that see each other."""
    limit, context = getattr(config.get_text_config(), "max_position_embeddings", None), recipe.batch.context
    if isinstance(limit, int) and 0 < limit < context:
        message = f"longer than the {limit:,} positions of the model, model.config.max_position_embeddings"
        fix = f"batch.context={limit}"
        if recipe.model.weights is None:
            fix += f"; or model.config.max_position_embeddings={context}"
        yield Problem("batch.context", context, message, fix)
    rows = recipe.batch.sequences_per_microbatch
    shared = find_shared_rope(config.get_text_config(), context, rows, recipe.data.isolates)
    if shared is not None:
        yield Problem("batch.sequences_per_microbatch", rows, shared.what, str(shared.fix))
    # Meshwright's own attention keeps documents apart in every family; transformers' does in some.
    is_stock = recipe.data.isolates and find_stock_attention(config, recipe) is not None
    if is_stock and not keeps_documents_apart(config):
        message = (
            f"in {config.model_type} models documents that share a row see one another: the model does not derive its mask from"
            " positions, or carries state along"
        )
        fix = "data.pack=alone" if recipe.data.has_conversations else "data.pack=concat"
        yield Problem("data.pack", recipe.data.packing, message, fix)


def keeps_any_documents_apart(recipe: Recipe, config: PretrainedConfig) -> bool:
    """Whether documents of a row are exact in the model that this recipe lays out, also if its own rows have no documents."""
    packed = replace(recipe, data=replace(recipe.data, pack="documents"))
    is_ours = recipe.parallel.cp > 1 or find_stock_attention(config, recipe) is None
    return find_stock_attention(config, packed) is None if is_ours else keeps_documents_apart(config)


class Loader:
    """Feeds the training split. It has no position of its own: the caller's cursor is the whole state.

    data_wait_s: seconds that callers of `batch` have waited so far.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        seed: int,
        context: int,
        pack: Mode,
        overlong: Overlong = "skip",
        sequences_per_microbatch: int,
        num_microbatches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        slices: ContextSlices | None = None,
        device: torch.device = HOST,
        clock: Callable[[], float] = time.perf_counter,
        hear: Sequence[Hear] = (),
        starts: Mapping[str, int] = NOTHING_READ,
        say: Say | None = None,
    ) -> None:
        """num_microbatches: of this rank in one step; slices: the tokens of each sequence that it holds, None: all; device: where
        they will go, from pinned memory; clock: seconds; hear: called for each batch, and may raise; starts: of `SampleOrder`;
        say: prints why streams are waited for."""
        self._packer = open_packer(prepared, "train", context, pack, overlong, seed)
        found = list(zip(prepared.sources, self._packer.streams, self._packer.sizes, strict=True))
        sizes = {each.name: (each.weight, size if stream.is_whole else UNKNOWN) for each, stream, size in found}
        growing = [each.name for each, stream, _ in found if isinstance(stream, GrowingStream)]
        windows = dict.fromkeys(growing, count_window(context))
        self._order = SampleOrder.of(seed, sizes, starts, windows)
        self._is_over = threading.Event()
        self._say = say
        self._slices = slices or ContextSlices(context)
        self._b = sequences_per_microbatch
        first = (np.arange(num_microbatches) * dp_size + dp_rank) * self._b
        offsets = (first[:, None] + np.arange(self._b)).reshape(-1)  # of this rank's samples from the cursor
        self.sequences_per_step = num_microbatches * dp_size * self._b
        steps = np.arange(max(1, min(STEPS_READ_AT_ONCE, TOKENS_READ_AT_ONCE // (len(offsets) * context))))
        self._offsets = steps[:, None] * self.sequences_per_step + offsets  # [steps read at once, samples of this rank]
        self._read_steps: dict[int, list[Microbatch]] = {}  # by cursor
        ahead = min(TOKENS_ASKED_AHEAD // context, SAMPLES_ASKED_AHEAD) // len(offsets) - len(steps)
        self._steps_ahead = max(len(steps), ahead)  # behind those that are read at once
        self._asked = 0  # the cursor behind the last step that was asked for
        self._device = device
        self._thread = ThreadPoolExecutor(1, "loader", choose_current, (device,))
        self._ahead: tuple[int, Future[dict[int, list[Microbatch]]]] | None = None
        self._skipped: Skipped = ()
        self._clock, self._hear = clock, hear
        self.data_wait_s = 0.0

    def skip(self, skipped: Skipped) -> None:
        """Leave out samples [first, stop) of each interval from now on, in place of those left out before."""
        if self._ahead is not None:
            self._ahead[1].result()  # it reads what `_skipped` says
        self._skipped, self._read_steps, self._ahead, self._asked = skipped, {}, None, 0

    def batch(self, cursor: int) -> list[Microbatch]:
        """This rank's microbatches of the step whose first global sample is `cursor`. The steps after it are read in the
        background; any other cursor may follow, and is then read at once."""
        start_s = self._clock()
        if cursor not in self._read_steps:
            self._read_steps = self._begin(cursor).result()
            following = cursor + len(self._offsets) * self.sequences_per_step
            self._ahead = following, self._thread.submit(self._read, following)
        self.data_wait_s += self._clock() - start_s
        for hear in self._hear:
            hear(cursor, index_samples(cursor + self._offsets[0], self._skipped), self._read_steps[cursor])
        return self._read_steps[cursor]

    def is_read(self, cursor: int, timeout_s: float) -> bool:
        """Whether the step at `cursor` has been read, or cannot be, within `timeout_s`: `batch` then need not wait."""
        return cursor in self._read_steps or bool(wait([self._begin(cursor)], timeout_s).done)

    def _begin(self, cursor: int) -> "Future[dict[int, list[Microbatch]]]":
        """Have the step at `cursor` read in the background, unless it is read already."""
        if self._ahead is None or self._ahead[0] != cursor:
            self._ahead = cursor, self._thread.submit(self._read, cursor)
        return self._ahead[1]

    def _read(self, cursor: int) -> dict[int, list[Microbatch]]:
        """The step at `cursor` and, if steps are small, those after it."""
        index = index_samples(cursor + self._offsets.reshape(-1), self._skipped)
        if self.is_growing:
            self._await(cursor)
        source, sample = self._order.locate(index)
        self._packer.ask(source, sample)
        self._ask(cursor)
        rows = cut_context(self._packer.pack(source, sample), self._slices)
        if len(self._packer.streams) > 1:
            rows = replace(rows, sources=torch.from_numpy(source))
        # Pinned here, in the background, rather than when the step is about to begin. Views of pinned rows are pinned.
        microbatches = split_rows(rows.map(partial(pin, device=self._device)), self._b)
        per_step = len(microbatches) // len(self._offsets)
        cursors = cursor + np.arange(len(self._offsets)) * self.sequences_per_step
        return {int(at): microbatches[n * per_step : (n + 1) * per_step] for n, at in enumerate(cursors)}

    @property
    def is_growing(self) -> bool:
        """Whether not all tokens are there, so that a batch may take as long as tokenizing."""
        return not all(stream.is_whole for stream in self._packer.streams)

    def _await(self, cursor: int) -> None:
        """Wait until the streams have the windows of all samples that are read at `cursor`, or their ends: of other ranks', too,
        so that none waits in a collective for one that waits for tokens."""
        stop = cursor + len(self._offsets) * self.sequences_per_step
        source, position = self._order.place(index_samples(np.arange(cursor, stop), self._skipped))
        sizes, context = self._order.sizes.copy(), self._packer.context
        for number, stream in enumerate(self._packer.streams):
            own = position[source == number]
            if isinstance(stream, GrowingStream) and len(own):
                window = int(self._order.windows[number])
                stream.wait_for((int(own.max()) // window + 1) * window * context + 1, self._is_over, self._say)
            if stream.is_whole:
                sizes[number] = self._packer.count(number)
        self._order = replace(self._order, sizes=sizes)

    def _ask(self, cursor: int) -> None:
        """Have the streams fetch the steps behind those that are read at `cursor`, unless all is mapped into memory."""
        if all(stream.is_mapped for stream in self._packer.streams):
            return
        first, per_step = cursor + len(self._offsets) * self.sequences_per_step, self.sequences_per_step
        stop = first + self._steps_ahead * per_step
        begin = self._asked if first <= self._asked <= stop else first
        for step in range(begin, stop, per_step):
            self._packer.ask(*self._order.locate(index_samples(step + self._offsets[0], self._skipped)))
        self._asked = stop

    def close(self) -> None:
        self._is_over.set()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def open_packer(
    prepared: Prepared, split: Split, context: int, pack: Mode, overlong: Overlong = "skip", seed: int = 0
) -> Packer:
    """The packer of a split of all sources. DataError where a source has nothing to train on that fits into a row."""
    streams = [source.streams[split] for source in prepared.sources]
    keys = [key_of(source.name, seed) for source in prepared.sources]
    packer = Packer(streams, context, pack, prepared.eos_id, overlong, keys)
    for source, size in zip(prepared.sources, packer.sizes, strict=True):
        if split == "train":
            refuse_no_rows(source.name, source.streams[split], size, context)
    return packer


def split_rows(rows: Microbatch, size: int) -> list[Microbatch]:
    """Cut [n, T] into microbatches of [size, T]: contiguous views."""
    return [rows.select(first, first + size) for first in range(0, len(rows.input_ids), size)]


def validation_batches(
    prepared: Prepared,
    split: Split = "validation",
    *,
    seed: int = 0,
    context: int,
    pack: Mode,
    overlong: Overlong = "skip",
    sequences_per_microbatch: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    slices: ContextSlices | None = None,
    limit: int | None = None,
) -> Iterator[Microbatch]:
    """One pass over the validation split, or another: every sequence of every source once, on one of the dp ranks, cut by
    `slices`. A microbatch has sequences of one source, the same on all ranks.

    limit (train.validation_sequences): at most this many, a fixed random choice independent of the seed. Each rank gets the same
    number of microbatches, filled up with sequences without labels (all -100), so a loss summed over labels is exact.
    """
    packer = open_packer(prepared, split, context, pack, overlong, seed)
    source, sample = _list_samples(packer.sizes, limit)
    for number in range(len(packer.streams)):
        own = sample[source == number]
        yield from batch_rows(packer, own, sequences_per_microbatch, dp_rank, dp_size, slices, number)


def batch_rows(
    packer: Packer,
    samples: np.ndarray,
    size: int,
    dp_rank: int,
    dp_size: int,
    slices: ContextSlices | None = None,
    source: int = 0,
) -> Iterator[Microbatch]:
    """Samples of a source, each on one of the dp ranks, in microbatches of `size`, as many on every rank: the last ones are
    filled up with rows without labels."""
    missing = -len(samples) % (dp_size * size)
    rounds = np.append(samples, np.full(missing, NO_SAMPLE)).reshape(-1, dp_size, size)[:, dp_rank]
    ahead = max(1, min(TOKENS_ASKED_AHEAD // packer.context, SAMPLES_ASKED_AHEAD) // size)
    for index, each in enumerate(rounds):
        for row in rounds[index + ahead if index else 0 : index + ahead + 1]:
            packer.ask(np.full_like(row, source), row)
        rows = replace(packer.pack(np.full_like(each, source), each), source=source)
        yield cut_context(rows, slices or ContextSlices(packer.context))


def _list_samples(sizes: list[int], limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(source, sample) of all samples, or of the first `limit` of a permutation: [n] int64 each."""
    total = sum(sizes)
    starts = np.cumsum([0, *sizes])
    chosen = np.arange(total)
    if limit is not None and limit < total:
        index = np.arange(limit, dtype=np.uint64)
        chosen = np.sort(permute(index, np.full_like(index, total), np.zeros_like(index)).astype(np.int64))
    source = np.searchsorted(starts, chosen, side="right") - 1
    return source, chosen - starts[source]
