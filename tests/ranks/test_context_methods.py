"""Attention over the ranks of cp is attention of one process: outputs, gradients, bytes, work and memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm import collectives
from framework.comm.communicator import read_traffic, subtract_traffic, sum_traffic
from framework.comm.connect import Mesh, connect
from framework.mesh.token_layout import ContextSlices
from framework.mesh.topology import Topology
from framework.parallel.attention import blocks, ulysses
from framework.parallel.attention.attention import ContextAttention
from framework.parallel.attention.block_attention import AttentionBlock, BlockAttention
from framework.parallel.attention.kernels import Result
from framework.parallel.attention.visible_rows import Documents, Scores
from tests.grid import IN_TURN, few_of
from tests.ranks.pool import RankPool
from tests.ranks.test_tensor_memory import peak_of
from tests.visible_pairs import documents_of, visible_pairs

pytestmark = IN_TURN

CPU = torch.device("cpu")
TOLERANCE = 1e-12
ITEM_BYTES = {torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}


@dataclass(frozen=True)
class Layout:
    """How ranks share a sequence."""

    ulysses: int
    ring: int
    method: Literal["ring", "gather"] = "ring"

    def __str__(self) -> str:
        return f"ulysses {self.ulysses}, {self.method} {self.ring}"


@dataclass(frozen=True)
class Case:
    """A kind of attention. documents: the first rows of documents of each sequence."""

    context: int = 37
    sequences: int = 2
    heads: int = 4
    kv_heads: int = 4
    width: int = 8
    v_width: int = 8
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    documents: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Sequences:
    """What all ranks draw alike. q, k, v: [B, heads, context, D]; gradient: [B, context, H, Dv]; sinks: [H]; first_rows: [B,
    context]."""

    q: Tensor
    k: Tensor
    v: Tensor
    gradient: Tensor
    scores: Scores
    sinks: Tensor | None
    first_rows: Tensor | None


def draw(case: Case, dtype: torch.dtype = torch.float64) -> Sequences:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    B, C = case.sequences, case.context
    first_rows = None
    if case.documents is not None:
        starts = torch.zeros(B, C, dtype=torch.int64)
        for sequence, rows in zip(starts, case.documents, strict=True):
            sequence[list(rows)] = torch.tensor(rows)
        first_rows = starts.cummax(1).values
    return Sequences(
        normal(B, case.heads, C, case.width),
        normal(B, case.kv_heads, C, case.width),
        normal(B, case.kv_heads, C, case.v_width),
        normal(B, C, case.heads, case.v_width),
        Scores(case.width**-0.5, case.window, case.softcap),
        normal(case.heads) if case.has_sinks else None,
        first_rows,
    )


def attend_densely(of: Sequences) -> Tensor:
    """Causal attention as it is defined, with all scores at once: [B, C, H, Dv]."""
    groups, C = of.q.shape[1] // of.k.shape[1], of.q.shape[2]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (of.k, of.v))
    scores = of.q @ k.transpose(2, 3) * of.scores.scale
    if of.scores.softcap is not None:
        scores = of.scores.softcap * torch.tanh(scores / of.scores.softcap)
    rows = torch.arange(C)
    sees = rows[:, None] >= rows
    if of.scores.window is not None:
        sees = sees & (rows[:, None] - rows < of.scores.window)
    if of.first_rows is not None:
        sees = sees & (rows >= of.first_rows[:, None, :, None])
    scores = scores.masked_fill(~sees, -torch.inf)
    if of.sinks is not None:
        scores = torch.cat([scores, of.sinks[:, None, None].expand(*scores.shape[:3], 1)], dim=3)
    return (scores.softmax(-1)[..., :C] @ v).transpose(1, 2)


def expect(of: Sequences) -> dict[str, Tensor]:
    """out and gradients, each with tokens in dim 1, but those of sinks."""
    inputs = {"q": of.q, "k": of.k, "v": of.v} | ({} if of.sinks is None else {"sinks": of.sinks})
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out = attend_densely(Sequences(**{**vars(of), **leaves}))
    gradients = torch.autograd.grad(out, list(leaves.values()), of.gradient)
    found = dict(zip(leaves, gradients, strict=True))
    return {name: x if name == "sinks" else x.transpose(1, 2) for name, x in found.items()} | {"out": out.detach()}


class Share:
    """What one rank computes of some sequences."""

    def __init__(self, of: Sequences, slices: ContextSlices):
        self.scores, self.slices = of.scores, slices
        # Padding is not zero: it must change nothing whatever it is.
        self.q, self.k, self.v = (self.cut(x.transpose(1, 2), 3).transpose(1, 2) for x in (of.q, of.k, of.v))
        self.sinks = of.sinks if of.sinks is None else of.sinks.clone().requires_grad_()
        self.gradient = self.cut(of.gradient, 0)
        self.documents = None
        if of.first_rows is not None:
            documents = documents_of(of.first_rows)
            self.documents = Documents(documents.starts, slices.context + slices.padding)

    def cut(self, x: Tensor, fill: int) -> Tensor:
        cut = self.slices.cut(x, fill)
        return cut.clone().requires_grad_() if cut.is_floating_point() else cut

    def attend(self, attention: ContextAttention) -> Tensor:
        return attention(self.q, self.k, self.v, self.scores, self.sinks, self.documents)

    def differentiate(self, out: Tensor) -> dict[str, Tensor]:
        names = {"q": self.q, "k": self.k, "v": self.v} | ({} if self.sinks is None else {"sinks": self.sinks})
        gradients = torch.autograd.grad(out, list(names.values()), self.gradient)
        return {name: x if name == "sinks" else x.transpose(1, 2) for name, x in zip(names, gradients, strict=True)}


def connect_context(rank: int, rendezvous: str, layout: Layout) -> Mesh:
    topology = Topology(cp=layout.ulysses * layout.ring, ulysses=layout.ulysses)
    return connect(topology, CPU, rendezvous, rank, timeout_s=60)


def make_attention(mesh: Mesh, layout: Layout, context: int, block: BlockAttention | None = None) -> ContextAttention:
    slices = ContextSlices(context, layout.ulysses, layout.ring, mesh.axis("cp").rank)
    return ContextAttention(slices, mesh.axis("ulysses"), mesh.axis("ring"), layout.method, block or BlockAttention())


def attention_error(found: Tensor, whole: Tensor, slices: ContextSlices) -> float:
    """The largest difference of a rank's tokens, [B, C, ...], from those of [B, context, ...]; of sinks, [H], as they are."""
    difference = found - whole if found.ndim == 1 else (found - slices.cut(whole, 0))[:, : slices.valid_local]
    return difference.abs().max().item() if difference.numel() else 0.0


def find_errors(
    rank: int,
    world: int,
    rendezvous: str,
    layout: Layout,
    cases: dict[str, Case],
    sabotage: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, dict[str, float]]:
    """Body: for each case the largest difference of out and each gradient from those of one process."""
    mesh, found = connect_context(rank, rendezvous, layout), {}
    for name, case in cases.items():
        sequences = draw(case)
        with sabotage():
            attention = make_attention(mesh, layout, case.context)
            share = Share(sequences, attention.slices)
            out = share.attend(attention)
            results = share.differentiate(out) | {"out": out.detach()}
        if "sinks" in results:
            collectives.all_reduce(results["sinks"], mesh.axis("cp"))
        found[name] = {
            what: attention_error(results[what], whole, attention.slices) for what, whole in expect(sequences).items()
        }
        assert out.is_contiguous()
    mesh.close()
    return found


CASES = {
    "causal": Case(),
    "even": Case(context=32, sequences=1),
    "grouped heads": Case(kv_heads=2, sequences=1),
    "one key-value head": Case(kv_heads=1),
    "unequal widths": Case(width=6, v_width=4, kv_heads=2),
    "window": Case(window=5),
    "wide window": Case(window=21),
    "documents": Case(documents=((0, 3, 20), (0, 9, 10, 31))),
    "documents and window": Case(documents=((0, 3, 20), (0, 9, 10, 31)), window=7, kv_heads=2),
    "soft-cap": Case(softcap=1.5),
    "sinks": Case(has_sinks=True),
    "sinks and window": Case(has_sinks=True, window=6, kv_heads=1),
    "everything": Case(41, 2, 8, 2, 6, 4, 9, 2.0, has_sinks=True, documents=((0, 17), (0, 5, 6, 30))),
    "uneven groups": Case(heads=12, kv_heads=6, width=4, v_width=2),
    "shared groups": Case(heads=12, kv_heads=3, width=4, v_width=2),
    "fewer tokens than parts": Case(context=5),
}
LAYOUTS = [
    *(Layout(1, ring, method) for ring, method in product((2, 4), ("ring", "gather"))),
    *(Layout(ulysses, 1) for ulysses in (2, 4)),
    *(Layout(2, 2, method) for method in ("ring", "gather")),
    Layout(1, 1),
    Layout(1, 3),
]
# Each method among all ranks, both at once, and one rank: fewer ranks say the same of shorter ways.
EACH_ONCE = (Layout(1, 4), Layout(1, 4, "gather"), Layout(4, 1), Layout(2, 2), Layout(1, 1))


@pytest.mark.parametrize("layout", few_of(LAYOUTS, (Layout(1, 4, "gather"), Layout(2, 2)).__contains__), ids=str)
def test_attention_is_that_of_one_process(pool: RankPool, layout: Layout) -> None:
    for errors in pool.run(layout.ulysses * layout.ring, find_errors, layout, CASES):
        wrong = {name: each for name, each in errors.items() if not max(each.values()) <= TOLERANCE}
        assert not wrong
        assert errors.keys() == CASES.keys()


def send_small_messages() -> AbstractContextManager[Any]:
    """Keys and values travel in 6 portions or some more and heads in 4 pieces, where they would be one."""
    patches = ExitStack()
    patches.enter_context(patch.multiple(blocks, PORTION_PAIRS=1, MOST_PORTIONS=6))
    patches.enter_context(patch.object(ulysses, "PIECE_PAIRS", 1))
    return patches


@pytest.mark.parametrize(
    "layout",
    few_of([Layout(1, 4), Layout(1, 2, "gather"), Layout(2, 2), Layout(4, 1)], lambda layout: layout == Layout(2, 2)),
    ids=str,
)
def test_messages_cut_in_several_change_nothing(pool: RankPool, layout: Layout) -> None:
    names = ("grouped heads", "one key-value head", "wide window", "documents and window", "sinks", "everything")
    names += ("shared groups",)
    cases = {name: CASES[name] for name in names}
    for errors in pool.run(layout.ulysses * layout.ring, find_errors, layout, cases, send_small_messages):
        assert not {name: each for name, each in errors.items() if not max(each.values()) <= TOLERANCE}


# --- what is sent


def measure_traffic(
    rank: int,
    world: int,
    rendezvous: str,
    layout: Layout,
    cases: dict[str, tuple[Case, torch.dtype]],
    sabotage: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, list[dict[str, int]]]:
    """Body: for each case the bytes of this rank by axis, forward and backward."""
    mesh, found = connect_context(rank, rendezvous, layout), {}
    for name, (case, dtype) in cases.items():
        with sabotage():
            attention = make_attention(mesh, layout, case.context)
            share = Share(draw(case, dtype), attention.slices)
            readings = [read_traffic(mesh.axes)]
            out = share.attend(attention)
            readings.append(read_traffic(mesh.axes))
            share.differentiate(out)
            readings.append(read_traffic(mesh.axes))
        differences = (sum_traffic(subtract_traffic(after, before)) for before, after in pairwise(readings))
        found[name] = [{axis: sums["bytes"] for axis, sums in each.items()} for each in differences]
    mesh.close()
    return found


def expect_traffic(layout: Layout, case: Case, dtype: torch.dtype, num_steps: int | None) -> list[dict[str, int]]:
    """Bytes by axis, forward and backward: num_steps messages of K/V in a ring, ring - 1 if None."""
    u, item_bytes, sum_bytes = layout.ulysses, ITEM_BYTES[dtype], max(4, ITEM_BYTES[dtype])
    rows = case.sequences * ContextSlices(case.context, u, layout.ring).tokens_local
    # With fewer key-value heads than ranks, a rank gets one, and all others send it theirs of that.
    kv_heads = max(1, case.kv_heads // u)
    kv_width, steps = case.width + case.v_width, layout.ring - 1 if num_steps is None else num_steps
    kv = u * rows * kv_heads * kv_width
    heads_in = (u - 1) * rows * (case.heads // u * case.width + kv_heads * kv_width) * item_bytes
    heads_out = (u - 1) * rows * case.heads // u * case.v_width * item_bytes
    forward = {"ulysses": heads_in + heads_out, "ring": steps * kv * item_bytes}
    backward = {"ulysses": heads_in + heads_out, "ring": steps * kv * (item_bytes + sum_bytes)}
    return [{axis: count for axis, count in each.items() if count} for each in (forward, backward)]


TRAFFIC = {
    "fp32": (Case(kv_heads=2, v_width=6), torch.float32),
    "bf16": (Case(kv_heads=2, width=6), torch.bfloat16),
    "one key-value head": (Case(kv_heads=1), torch.bfloat16),
    "documents": (Case(documents=((0, 3, 20), (0, 9, 10, 31))), torch.float32),
}


@pytest.mark.parametrize(
    ("layout", "sabotage"),
    few_of(
        product(EACH_ONCE[:4], (nullcontext, send_small_messages)),
        lambda layout, sabotage: (
            layout == (Layout(2, 2) if sabotage is send_small_messages else Layout(1, 4, "gather"))
        ),
    ),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_bytes_are_those_of_theory(pool: RankPool, layout: Layout, sabotage: Callable[[], Any]) -> None:
    expected = {name: expect_traffic(layout, *case, None) for name, case in TRAFFIC.items()}
    assert pool.run(4, measure_traffic, layout, TRAFFIC, sabotage) == [expected] * 4


def test_a_ring_sends_only_what_a_window_needs(pool: RankPool) -> None:
    """Chunks of 5 rows on 4 ranks: a window of 3 ends in the chunk before, which the rank before or behind has (steps 1 and 3);
    one of 8 reaches the chunk before that, too."""
    cases = {window: Case(context=40, window=window) for window in (1, 3, 8)}
    found = pool.run(4, measure_traffic, Layout(1, 4), {str(w): (case, torch.float32) for w, case in cases.items()})
    for window, steps in ((1, 0), (3, 2), (8, 3)):
        expected = expect_traffic(Layout(1, 4), cases[window], torch.float32, steps)
        assert [of[str(window)] for of in found] == [expected] * 4


# --- who computes what


class CountingBlocks(BlockAttention):
    """Counts pairs of a query and a key, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = [0, 0]

    def forward(self, block: AttentionBlock) -> Any:
        self.pairs[0] += count_visible(block)
        return super().forward(block)

    def backward(self, block: AttentionBlock, result: Result) -> Any:
        self.pairs[1] += count_visible(block)
        return super().backward(block, result)


def count_visible(block: AttentionBlock) -> int:
    pairs = visible_pairs(block.q_rows, block.k_rows, block.scores, block.documents)
    return block.heads.q.shape[1] * pairs


def count_pairs(rank: int, world: int, rendezvous: str, layouts: list[Layout], cases: list[Case]) -> list[list[int]]:
    """Body: for each layout and case the pairs of queries and keys that this rank computes, forward and backward."""
    found = []
    for number, layout in enumerate(layouts):
        mesh = connect_context(rank, f"{rendezvous}-{number}", layout)
        for case in cases:
            block = CountingBlocks()
            attention = make_attention(mesh, layout, case.context, block)
            share = Share(draw(case, torch.float32), attention.slices)
            share.differentiate(share.attend(attention))
            found.append(block.pairs)
        mesh.close()
    return found


def test_every_rank_computes_as_many_pairs_and_none_twice(pool: RankPool) -> None:
    layouts = [Layout(1, 4), Layout(1, 4, "gather"), Layout(2, 2), Layout(4, 1)]
    cases = [Case(context=256, sequences=1, width=4, v_width=4, window=window) for window in (None, 40)]
    by_rank = pool.run(4, count_pairs, layouts, cases)
    whole = [256 * 257 // 2, 41 * 20 + 216 * 40]
    for number, counts in enumerate(zip(*by_rank, strict=True)):
        for direction in (0, 1):
            pairs = [each[direction] for each in counts]
            assert sum(pairs) == 4 * whole[number % 2]
            if number % 2 == 0:
                assert max(pairs) <= 1.02 * min(pairs)


# --- what is held

LONG = Case(context=2**15, sequences=1, heads=16, kv_heads=8, width=16, v_width=16)
SHARED = {"ring": Layout(1, 4), "gather": Layout(1, 4, "gather"), "ulysses": Layout(4, 1), "both": Layout(2, 2)}


class AllocatingBlocks(BlockAttention):
    """Takes the memory of results and computes nothing: time grows with the square of tokens, memory does not."""

    def forward(self, block: AttentionBlock) -> Any:
        q = block.heads.q
        return _new_zeros(q), q.new_zeros(q.shape[:3])

    def backward(self, block: AttentionBlock, result: Result) -> Any:
        return _new_zeros(block.heads.q), _new_zeros(block.heads.k), _new_zeros(block.heads.v)


def _new_zeros(like: Tensor) -> Tensor:
    """Zeros [B, H, n, D] in the order of torch's kernels, tokens before heads."""
    B, H, n, D = like.shape
    return like.new_zeros(B, n, H, D).transpose(1, 2)


def measure_peaks(
    rank: int, world: int, rendezvous: str, layouts: list[Layout], case: Case, block: BlockAttention
) -> list[int]:
    """Body: for each layout the most bytes that this rank holds in attention, forward and backward: q, k, v, out, their gradients
    and what they take to compute."""
    found = []
    for number, layout in enumerate(layouts):
        if rank >= layout.ulysses * layout.ring:
            continue
        mesh = connect_context(rank, f"{rendezvous}-{number}", layout)
        attention = make_attention(mesh, layout, case.context, block)
        found.append(measure_peak(attention, case))
        mesh.close()
    return found


def project_once(out: Tensor) -> Tensor:
    """What a model's projection does behind attention: it keeps `out` until its backward has made the gradient, and no longer."""
    return F.linear(out.flatten(2), torch.zeros(1, out.shape[2] * out.shape[3], requires_grad=True)).sum()


def measure_peak(attention: ContextAttention, case: Case) -> int:
    C = attention.slices.tokens_local
    shapes = ((case.heads, case.width), (case.kv_heads, case.width), (case.kv_heads, case.v_width))
    with torch.profiler.profile(profile_memory=True) as profile:
        # As projections do, it makes new tensors, which only attention keeps.
        source = torch.zeros((), requires_grad=True)
        inputs = ((source.expand(1, C, *shape) + 1).transpose(1, 2) for shape in shapes)
        project_once(attention(*inputs, Scores(1.0))).backward()
    return peak_of(profile)


# What one rank holds of what one of four does.
LEAST_RATIO = 3.5


@pytest.mark.parametrize("method", few_of(SHARED, lambda method: method == "ulysses"))
def test_a_rank_of_four_holds_its_share_of_a_long_sequence(pool: RankPool, method: str) -> None:
    """32k tokens. The median counts: gloo's threads may be late to give back what they sent."""
    (whole, *_), *_ = by_rank = pool.run(
        4, measure_peaks, [Layout(1, 1)] + 3 * [SHARED[method]], LONG, AllocatingBlocks()
    )
    assert LEAST_RATIO * median(peak for found in by_rank for peak in found[-3:]) <= whole
