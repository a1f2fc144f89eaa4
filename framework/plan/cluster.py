"""A cluster's rates, read from the recipe's group `cluster`: seconds of a matmul, a pass over memory and a collective.

Matmul [rows, inner] x [inner, columns]. The output is cut into tiles, of which `processors` are computed at the same time, so

    seconds = overhead + max(waves * tile FLOPs * (inner + ramp) / inner / (rate of a processor), bytes / memory rate)

with waves = ceil(tiles / processors). A measured file adds what this leaves out: on its grid of shapes the ratio of measured to
modelled seconds, between them interpolated in the logarithm of all three sizes, beyond them the nearest.

Collective of n ranks on k nodes, r = n / k of them on each. A ring passes k times between nodes and n - k times inside of one:

    seconds = start + hops * latency of a hop + passes * (n - 1) / n * bytes / rate          passes: 2 of an all-reduce, else 1

The rate is the bus bandwidth that nccl-tests reports for all devices of k nodes. What a node's network carries is divided among
its devices, whose other groups send at the same time: a group with r of a node's d devices gets r / d of it.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import ceil, exp, log, log2
from typing import Literal, get_args

from framework.plan.candidate import remember
from framework.recipe.derive import count_nodes, count_ranks
from framework.recipe.machines import find_cluster
from framework.recipe.schema import Cluster as ClusterRecipe
from framework.recipe.schema import Recipe

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
# Kinds whose ring crosses a node's network once for all ranks of the node; in the others each rank sends its own bytes.
RINGS = ("all_reduce", "all_gather", "reduce_scatter")
ITEMSIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1, "nvfp4": 0.5625}
# The dtypes whose rate stands in for one that a file does not have, the first that it has.
ALIKE = {
    "nvfp4": ("mxfp8", "fp8", "bf16", "fp16", "tf32", "fp32"),
    "mxfp8": ("fp8", "bf16", "fp16", "tf32", "fp32"),
    "fp8": ("bf16", "fp16", "tf32", "fp32"),
    "bf16": ("fp16", "tf32", "fp32"),
    "fp16": ("bf16", "tf32", "fp32"),
    "tf32": ("fp32", "bf16", "fp16"),
    "fp32": ("tf32", "bf16", "fp16"),
    "fp64": ("fp32", "tf32", "bf16", "fp16"),
}
# Where a matmul has too few tiles for all processors, libraries cut smaller ones. They load more bytes for a FLOP: (tiles in
# place of one, share of the rate that they reach).
SMALLER_TILES = ((1, 1.0), (2, 0.9), (4, 0.75))


@dataclass(frozen=True)
class Grid:
    """Values on a grid of points, interpolated in the logarithms of the coordinates; beyond the grid as at its nearest point.

    axes: rising logarithms; values: one for each point, the last axis fastest."""

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    def at(self, *sizes: float) -> float:
        """The value at these coordinates (not logarithms)."""
        corners = [(0, 1.0)]
        for axis, size in zip(self.axes, sizes, strict=True):
            low = min(max(bisect_right(axis, log(size)) - 1, 0), max(len(axis) - 2, 0))
            high = min(low + 1, len(axis) - 1)
            width = axis[high] - axis[low]
            share = min(max((log(size) - axis[low]) / width, 0.0), 1.0) if width else 0.0
            sides = ((low, 1 - share), (high, share))
            corners = [
                (place * len(axis) + side, weight * part) for place, weight in corners for side, part in sides if part
            ]
        return sum(weight * self.values[place] for place, weight in corners)


@dataclass(frozen=True)
class Group:
    """Ranks of a communicator, and the nodes on which they lie."""

    size: int
    nodes: int


def place_group(size: int, stride: int, ranks_per_node: int, world: int) -> Group:
    """Place a group of `size` ranks, `stride` apart."""
    if size == 1 or world <= ranks_per_node:
        return Group(size, 1)
    return Group(size, min(size, -(-size * stride // ranks_per_node)))


@dataclass(frozen=True)
class LinkSpan:
    """Rates of a collective among the ranks of so many nodes."""

    nodes: int
    rate: float
    """Bytes/s by the convention of nccl-tests (bus bandwidth), without latencies."""
    hop_s: float
    """Latency of a step between the nodes."""


@dataclass(frozen=True)
class Link:
    """Rates of a kind of collective. spans: by rising number of nodes; start_s: latency before the first step; correction:
    logarithm of measured over modelled seconds by ranks of a group and bytes."""

    start_s: float
    spans: tuple[LinkSpan, ...]
    correction: Grid | None = None

    def at(self, nodes: int) -> LinkSpan:
        """The span for `nodes`, interpolated in the logarithms of nodes and rate; beyond the last one equal to it."""
        place = bisect_right([each.nodes for each in self.spans], nodes)
        low, high = self.spans[max(place - 1, 0)], self.spans[min(place, len(self.spans) - 1)]
        if nodes <= low.nodes or low.nodes == high.nodes:
            return low
        share = log(nodes / low.nodes) / log(high.nodes / low.nodes)
        return LinkSpan(nodes, exp((1 - share) * log(low.rate) + share * log(high.rate)), high.hop_s)

    def latency_s(self, kind: str, ranks: int, nodes: int) -> float:
        """Seconds of a collective without bytes: of the ring, or of an all-reduce the tree where that has fewer steps."""
        inside, between = self.at(1).hop_s, self.at(nodes).hop_s
        if kind == "send":
            return self.start_s + between
        near, passes = ceil(ranks / nodes), 2 if kind == "all_reduce" else 1
        steps_between, steps_inside = nodes - 1, ranks - nodes
        if kind == "all_to_all":
            steps_inside = near - 1
        elif kind == "all_reduce" and nodes > 1 and (depth := ceil(log2(nodes))) < steps_between:
            steps_between, steps_inside = depth, near - 1
        return self.start_s + passes * (steps_inside * inside + steps_between * between)


@dataclass(frozen=True)
class ClusterRates:
    """Rates of a device and of the links between devices, in bytes, FLOPs and seconds."""

    name: str
    """Name of the cluster's file."""
    device: str
    """Part of the name that the driver reports."""
    ranks_per_node: int
    memory_bytes: int
    """Memory of one device."""
    host_bytes: int
    """Main memory of a node that the run may take."""
    peak_flops: Mapping[str, float]
    """FLOP/s by dtype, dense, by the maker's data sheet; of a measured CPU its best matmul."""
    matmul_rate: Mapping[str, float]
    """FLOP/s by dtype that the best matmul reaches."""
    attention_share: float
    """Share of the peak that attention reaches in forward."""
    attention_backward_share: float
    memory_rate: float
    """Bytes/s that a pass over large tensors reads and writes."""
    host_rate: float
    """Bytes/s between a device and its host's memory, one way."""
    disk_rate: float
    """Bytes/s of a node's disk."""
    links: Mapping[Collective, Link]
    node_disk_bytes: int | None = None
    """Room on a node's own disks; None: unknown."""
    price_per_hour: float = 0.0
    """Price of one device in dollars; 0 if unknown."""
    failures_per_device_hour: float = 0.0
    overhead_s: float = 0.0
    """Launch of one kernel."""
    processors: int = 1
    tile: tuple[int, int] = (1, 1)
    ramp: int = 0
    softmax_rate: float = 0.0
    """Logits/s of a log-softmax; 0: as fast as memory."""
    corrections: Mapping[str, Grid] = field(default_factory=dict)
    """Logarithm of measured over modelled seconds of a matmul by dtype, on a grid of rows, inner size and columns."""
    gradients: Mapping[str, Grid] = field(default_factory=dict)
    """The same of weight gradients."""
    attention_curves: Mapping[str, tuple[Grid, Grid]] = field(default_factory=dict)
    """FLOP/s of attention in forward and backward on a grid of context and features of a head: by kernel those of bf16, and by
    dtype those of the kernel that was measured."""
    ranks_per_domain: int = 0
    """Devices that NVLink joins where they are more than a node's; links then count such domains in place of nodes."""
    memory_curve: Grid | None = None
    """Measured rates of passes over memory, by bytes."""
    is_assumed: bool = False
    """Whether the recipe names neither a cluster nor a GPU of a shipped file."""

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "ClusterRates":
        """The recipe's cluster. CPU ranks divide a node's memory; each is taken to compute as fast as one of its devices."""
        described, is_assumed = find_cluster(recipe)
        whole, launch = cls.from_group(described, is_assumed), recipe.launch
        ranks = ceil(count_ranks(recipe) / count_nodes(recipe))
        if whole.device == "cpu":
            whole = replace(
                whole, ranks_per_node=ranks, memory_bytes=whole.memory_bytes * whole.ranks_per_node // ranks
            )
        if launch.kind == "slurm" and launch.memory_per_rank_gb is not None:
            asked = int(launch.memory_per_rank_gb * 1e9) * ranks
            whole = replace(whole, host_bytes=min(whole.host_bytes, asked))
        return whole

    @classmethod
    def from_group(cls, group: ClusterRecipe, is_assumed: bool = False) -> "ClusterRates":
        """The cluster of the keys of one file."""
        assert group.name is not None, "a cluster's file names it"
        bare = cls(
            name=group.name,
            device=group.device,
            ranks_per_node=group.devices_per_node,
            memory_bytes=round(group.memory_gb * 2**30),
            host_bytes=round((group.host_memory_gb or group.devices_per_node * group.memory_gb) * 2**30),
            peak_flops={dtype: each.peak_tflops * 1e12 for dtype, each in group.matmul.items()},
            matmul_rate={dtype: each.share * each.peak_tflops * 1e12 for dtype, each in group.matmul.items()},
            attention_share=group.attention_share,
            attention_backward_share=group.attention_backward_share,
            memory_rate=group.memory_gb_per_s * 1e9,
            host_rate=group.host_gb_per_s * 1e9,
            disk_rate=group.disk_gb_per_s * 1e9,
            links={kind: _read_link(kind, group) for kind in COLLECTIVES},
            node_disk_bytes=None if group.node_disk_gb is None else round(group.node_disk_gb * 2**30),
            price_per_hour=group.price_per_hour or 0.0,
            failures_per_device_hour=1 / group.device_mtbf_hours if group.device_mtbf_hours else 0.0,
            overhead_s=group.overhead_us * 1e-6,
            processors=group.processors,
            tile=group.tile,
            ramp=group.ramp,
            softmax_rate=1e9 * (group.softmax_g_per_s or 0.0),
            attention_curves={
                name: _read_attention(rows)
                for name, rows in (
                    *group.attention.items(),
                    *((dtype, each.attention) for dtype, each in group.matmul.items()),
                )
                if rows
            },
            ranks_per_domain=group.devices_per_domain or 0,
            memory_curve=_read_curve(group.memory_measured),
            is_assumed=is_assumed,
        )
        return replace(
            bare,
            corrections={
                dtype: bare.compare(dtype, each.measured) for dtype, each in group.matmul.items() if each.measured
            },
            gradients={
                dtype: bare.compare(dtype, each.gradient) for dtype, each in group.matmul.items() if each.gradient
            },
        )

    def matmul_seconds(self, rows: int, inner: int, columns: int, dtype: str = "bf16") -> float:
        """Seconds of [rows, inner] x [inner, columns]; 0 where a size is 0, such as for an expert without tokens."""
        if not rows * inner * columns:
            return 0.0
        return self._corrected(rows, inner, columns, dtype, False)

    def gradient_seconds(self, tokens: int, inner: int, columns: int, added_bytes: float, dtype: str = "bf16") -> float:
        """Seconds of dW += dY^T X, dY: [tokens, columns], X: [tokens, inner]. added_bytes: moved by the addition; not counted
        where weight gradients were measured."""
        if self._known_dtype(dtype) in self.gradients:
            return self._corrected(columns, tokens, inner, dtype, True)
        # A matmul's own kernel adds, or a pass of the same bytes: without a launch of its own.
        added_s = self.memory_seconds(added_bytes) - self.overhead_s if added_bytes else 0.0
        return self.matmul_seconds(inner, tokens, columns, dtype) + added_s

    @remember()
    def _corrected(self, rows: int, inner: int, columns: int, dtype: str, is_gradient: bool) -> float:
        seconds = self._model_matmul(rows, inner, columns, dtype)
        grid = (self.gradients if is_gradient else self.corrections).get(self._known_dtype(dtype))
        return seconds if grid is None else seconds * exp(grid.at(rows, inner, columns))

    def attention_seconds(
        self,
        flops: float,
        dtype: str = "bf16",
        *,
        backward: bool = False,
        shape: tuple[int, int] | None = None,
        kernel: str = "",
    ) -> float:
        """Seconds of attention's matmuls of so many FLOPs: of the pairs that its mask leaves, two matmuls in forward and five in
        backward. shape: tokens of a sequence and features of a head, which a kernel's rate depends on. kernel: where the file
        knows it; else the one that was measured, else a share of the peak."""
        if not flops:
            return 0.0
        known = self._known_dtype(dtype)
        curves = self.attention_curves.get(kernel if known in ("bf16", "fp16") else "") or self.attention_curves.get(
            known
        )
        if curves is not None and shape is not None:
            return flops / curves[backward].at(*shape) + self.overhead_s
        share = self.attention_backward_share if backward else self.attention_share
        return flops / (share * self.peak_flops[known]) + self.overhead_s

    def softmax_seconds(self, logits: float) -> float:
        """Seconds of the logarithms of so many logits' softmax, where exponentials rather than memory say how long; else 0."""
        return logits / self.softmax_rate if self.softmax_rate else 0.0

    def memory_seconds(self, num_bytes: float) -> float:
        """Seconds of a pass over memory that reads and writes so many bytes in all."""
        if not num_bytes:
            return 0.0
        rate = self.memory_rate if self.memory_curve is None else self.memory_curve.at(max(num_bytes, 1.0))
        return num_bytes / rate + self.overhead_s

    def collective(self, kind: Collective, num_bytes: float, group: Group) -> float:
        """`collective_seconds` of a group."""
        return self.collective_seconds(kind, num_bytes, group.size, group.nodes)

    def message(self, num_bytes: float, group: Group) -> float:
        """Seconds of a message to a neighbour: in a pipeline the slowest, which leaves its node where any does."""
        return self.collective_seconds("send", num_bytes, 2, min(group.nodes, 2))

    def collective_seconds(self, kind: Collective, num_bytes: float, ranks: int, nodes: int) -> float:
        """Seconds of a collective of `ranks` ranks that lie on `nodes` nodes. num_bytes: of the whole tensor: what an all-gather
        returns, a reduce-scatter or an all-reduce takes, an all-to-all takes of one rank, a message is."""
        if ranks < 2 or not num_bytes:
            return 0.0
        nodes = min(nodes, ranks)
        latency_s, byte_s = self._cost(kind, ranks, nodes)
        seconds = latency_s + byte_s * num_bytes
        correction = self.links[kind].correction
        return seconds if correction is None else seconds * exp(correction.at(ranks, num_bytes))

    def compare(self, dtype: str, measured: Sequence[Sequence[float]]) -> Grid:
        """Logarithms of measured over modelled seconds. measured: [rows, inner, columns, TFLOP/s] of a full grid of shapes."""
        table = {(rows, inner, columns): tflops for rows, inner, columns, tflops in measured}
        axes = [sorted({shape[axis] for shape in table}) for axis in range(3)]
        values = [
            log(2e-12 * rows * inner * columns / table[rows, inner, columns])
            - log(self._model_matmul(int(rows), int(inner), int(columns), dtype))
            for rows, inner, columns in product(*axes)
        ]
        return Grid(tuple(tuple(map(log, axis)) for axis in axes), tuple(values))

    @cached_property
    def _tiles(self) -> tuple[tuple[float, float, float], ...]:
        """(rows, columns, share of the rate) of each size of tiles."""
        rows, columns = self.tile
        if self.processors == 1:
            return ((rows, columns, 1.0),)
        return tuple((rows / max(1, part // 2), columns / min(2, part), share) for part, share in SMALLER_TILES)

    def _model_matmul(self, rows: int, inner: int, columns: int, dtype: str) -> float:
        rate = self.matmul_rate[self._known_dtype(dtype)]
        least = min(
            ceil(ceil(rows / tile_rows) * ceil(columns / tile_columns) / self.processors)
            * (tile_rows * tile_columns / share)
            for tile_rows, tile_columns, share in self._tiles
        )
        # Filling and emptying take as long whatever the dtype: with faster multiplication as many more columns.
        ramp = self.ramp * rate / self.matmul_rate[self._known_dtype("bf16")]
        compute_s = 2.0 * least * self.processors * (inner + ramp) / rate
        num_bytes = ITEMSIZE[dtype] * (rows * inner + inner * columns + rows * columns)
        return self.overhead_s + max(compute_s, num_bytes / self.memory_rate)

    def _known_dtype(self, dtype: str) -> str:
        """The dtype whose rate counts: of those that a file has, the one that multiplies most like it."""
        return next(each for each in (dtype, *ALIKE[dtype]) if each in self.peak_flops)

    @remember()
    def _cost(self, kind: Collective, ranks: int, nodes: int) -> tuple[float, float]:
        """(seconds of latency, seconds of a byte of the whole tensor)."""
        link, near = self.links[kind], ceil(ranks / nodes)
        inside, between = link.at(1), link.at(nodes)
        rate = between.rate if nodes > 1 else inside.rate
        if nodes > 1 and kind in RINGS:
            rate *= min(1.0, near / max(self.ranks_per_node, self.ranks_per_domain))
        if nodes > 1 and near > 1:
            rate = min(rate, inside.rate)
        return link.latency_s(kind, ranks, nodes), _passed_share(kind, ranks) / rate


def _passed_share(kind: str, ranks: int) -> float:
    """Bytes that pass a rank's link over the bytes of the whole tensor."""
    if kind == "send":
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def _read_link(kind: Collective, group: ClusterRecipe) -> Link:
    each = group.links[kind]
    spans = tuple(
        LinkSpan(nodes, rate * 1e9, hop_us * 1e-6)
        for nodes, rate, hop_us in zip(each.nodes, each.gb_per_s, each.hop_us, strict=True)
    )
    link = Link(each.start_us * 1e-6, spans)
    if each.measured_mb is not None:
        size = each.measured_mb * 1e6
        near = group.devices_per_domain or group.devices_per_node
        spans = tuple(_without_latency(kind, link, span, size, near) for span in spans)
        link = replace(link, spans=spans)
    if each.measured:
        link = replace(link, correction=_compare_link(kind, link, max(2, group.devices_per_node), each.measured))
    return link


def _without_latency(kind: str, link: Link, span: LinkSpan, num_bytes: float, devices: int) -> LinkSpan:
    """The bus bandwidth of a span without the latencies that were measured along with it."""
    ranks = devices * span.nodes
    if ranks < 2:
        return span
    passed = _passed_share(kind, ranks) * num_bytes
    sending_s = passed / span.rate
    # Latency that would explain most of what was measured is wrong for this size: at least half is bytes.
    rate = passed / max(sending_s - link.latency_s(kind, ranks, span.nodes), sending_s / 2)
    return replace(span, rate=rate)


def _compare_link(kind: str, link: Link, ranks: int, measured: Sequence[Sequence[float]]) -> Grid:
    """Logarithms of measured over modelled seconds. measured: [10^6 bytes, microseconds] among the ranks of a node, by rising
    size."""
    latency_s, span = link.latency_s(kind, ranks, 1), link.at(1)
    values = [
        log(1e-6 * micros / (latency_s + _passed_share(kind, ranks) * 1e6 * size / span.rate))
        for size, micros in measured
    ]
    return Grid(((log(ranks),), tuple(log(1e6 * size) for size, _ in measured)), tuple(values))


def _read_curve(measured: Sequence[Sequence[float]]) -> Grid | None:
    """Rates in bytes a second by bytes."""
    if not measured:
        return None
    return Grid((tuple(log(1e6 * size) for size, _ in measured),), tuple(1e9 * rate for _, rate in measured))


def _read_attention(measured: Sequence[Sequence[float]]) -> tuple[Grid, Grid]:
    """FLOP/s by context and features of a head, in forward and in backward."""
    rows = sorted(map(tuple, measured))
    axes = tuple(tuple(sorted({log(row[axis]) for row in rows})) for axis in range(2))
    forward, backward = (tuple(1e12 * row[column] for row in rows) for column in (2, 3))
    return Grid(axes, forward), Grid(axes, backward)
