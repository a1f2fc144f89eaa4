"""A machine as numbers, made from the recipe's group `cluster`: how long a matmul, a pass over memory and a collective take.

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

from framework.recipe.clusters import find_cluster
from framework.recipe.derive import count_nodes, count_ranks
from framework.recipe.schema import Cluster as ClusterRecipe
from framework.recipe.schema import Recipe

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
# What a ring sends over the network of a node all its ranks share; of an all-to-all or a message each rank sends its own.
RINGS = ("all_reduce", "all_gather", "reduce_scatter")
ITEMSIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Whose rate counts for a dtype of which a file has none, the first one first.
ALIKE = {
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
        """The value at these coordinates, not yet logarithms."""
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
class Span:
    """One kind of collective among the ranks of so many nodes. rate: bytes in a second by the convention of nccl-tests, without
    latencies; hop_s: latency of a step between the nodes."""

    nodes: int
    rate: float
    hop_s: float


@dataclass(frozen=True)
class Link:
    """A kind of collective. spans: by rising number of nodes; start_s: latency before the first step; correction: logarithm of
    measured over modelled seconds by ranks of a group and bytes, measured with all ranks of a node; crowded: the same measured
    with ranks that share cores."""

    start_s: float
    spans: tuple[Span, ...]
    correction: Grid | None = None
    crowded: Grid | None = None

    def at(self, nodes: int) -> Span:
        """Between two measured numbers of nodes by the logarithms of nodes and rate; beyond the last as there."""
        place = bisect_right([each.nodes for each in self.spans], nodes)
        low, high = self.spans[max(place - 1, 0)], self.spans[min(place, len(self.spans) - 1)]
        if nodes <= low.nodes or low.nodes == high.nodes:
            return low
        share = log(nodes / low.nodes) / log(high.nodes / low.nodes)
        return Span(nodes, exp((1 - share) * log(low.rate) + share * log(high.rate)), high.hop_s)

    def shared(self, turn: float, crowded: float) -> "Link":
        """Among ranks that share cores. turn: part of the time that each has of them; crowded: 0 for the ranks of `correction`, 1
        for those of `crowded`, between and beyond by the logarithm of the ranks. Where nobody has measured it, ranks copy the
        bytes themselves in their part of the time."""
        if turn == 1.0:
            return self
        if self.crowded is None:
            spans = tuple(Span(each.nodes, turn * each.rate, each.hop_s / turn) for each in self.spans)
            return replace(self, start_s=self.start_s / turn, spans=spans)
        groups, sizes = self.crowded.axes
        own = [
            0.0 if self.correction is None else self.correction.at(exp(group), exp(size))
            for group, size in product(groups, sizes)
        ]
        values = [(1 - crowded) * few + crowded * many for few, many in zip(own, self.crowded.values, strict=True)]
        return replace(self, correction=Grid((groups, sizes), tuple(values)))


@dataclass(frozen=True)
class Route:
    """What one device sends over to another: bytes in a second, one way, and seconds before the first of a message arrives."""

    rate: float
    latency_s: float

    def seconds(self, num_bytes: float, messages: int = 1) -> float:
        """Seconds of so many bytes in so many messages, one behind the other."""
        return messages * self.latency_s + num_bytes / self.rate if num_bytes else 0.0


@dataclass(frozen=True)
class Cluster:
    """Rates of one device and of the links between devices, in bytes, FLOPs and seconds.

    name: of the file. is_assumed: the recipe names neither a cluster nor a GPU that one is known of. device: a part of the name
    that the driver reports. ranks_per_node: devices of a node. peak_flops: FLOP/s by dtype, dense, by the maker's data sheet;
    of a measured CPU the best matmul. matmul_...: what the model of a matmul computes with; corrections:
    logarithms of measured over modelled seconds; alone: the same of one rank with all cores, each of whose ranks has `threads`
    else; gradients: the corrections of weight gradients. attention_share: of the peak that
    attention reaches in forward, and in backward; attention_curves: the same by dtype, context and features of a head.
    memory_rate: bytes that a pass over large tensors reads and writes in a second; memory_curve: the same by bytes; memory_alone:
    of one rank with all cores. crowd: ranks that links were measured with when they shared the cores, 0: none; turn: part of the
    time that each rank has its cores. softmax_rate: logits in a second whose logarithms of softmax are computed, 0: as fast as
    memory. host_rate: bytes from device to host in a second. disk_rate: of one node. price_per_hour: of one device, in dollars,
    0 if unknown. host_bytes: main memory of a node that the run may take; node_disk_bytes: room on its own disks, None:
    unknown. failures_per_device_hour: expected. overhead_s: of launching one kernel."""

    name: str
    device: str
    ranks_per_node: int
    memory_bytes: int
    host_bytes: int
    peak_flops: Mapping[str, float]
    matmul_rate: Mapping[str, float]
    attention_share: float
    attention_backward_share: float
    memory_rate: float
    host_rate: float
    disk_rate: float
    links: Mapping[Collective, Link]
    matmul_memory_rate: float
    matmul_overhead_s: float
    node_disk_bytes: int | None = None
    price_per_hour: float = 0.0
    failures_per_device_hour: float = 0.0
    overhead_s: float = 0.0
    processors: int = 1
    tile: tuple[int, int] = (1, 1)
    ramp: int = 0
    softmax_rate: float = 0.0
    threads: int = 1
    crowd: int = 0
    turn: float = 1.0
    corrections: Mapping[str, Grid] = field(default_factory=dict)
    alone: Mapping[str, Grid] = field(default_factory=dict)
    gradients: Mapping[str, Grid] = field(default_factory=dict)
    attention_curves: Mapping[str, tuple[Grid, Grid]] = field(default_factory=dict)
    memory_curve: Grid | None = None
    memory_alone: Grid | None = None
    is_assumed: bool = False
    # What has been asked before: a search asks for the same shapes and groups thousands of times.
    _matmuls: dict[tuple[str, int, int, int, str], float] = field(default_factory=dict, repr=False, compare=False)
    _costs: dict[tuple[Collective, int, int], tuple[float, float]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "Cluster":
        """That of the recipe's `cluster`, with as many ranks on a node as the recipe has; where it names none that of
        launch.gres, of CPU ranks a laptop's."""
        described, is_assumed = find_cluster(recipe)
        ranks, launch = ceil(count_ranks(recipe) / count_nodes(recipe)), recipe.launch
        whole = cls.from_group(described, is_assumed)
        if launch.kind == "slurm" and launch.memory_per_rank_gb is not None:
            asked = int(launch.memory_per_rank_gb * 1e9) * ranks
            whole = replace(whole, host_bytes=min(whole.host_bytes, asked))
        return whole.for_ranks(ranks, launch.threads_per_rank or launch.cpus_per_rank)

    @classmethod
    def from_group(cls, group: ClusterRecipe, is_assumed: bool = False) -> "Cluster":
        """That of the keys of one file."""
        assert group.name is not None, "a cluster's file names it"
        bare = cls(
            name=group.name,
            device=group.device,
            ranks_per_node=group.devices_per_node,
            memory_bytes=round(group.memory_gb * 2**30),
            host_bytes=round((group.host_memory_gb or group.devices_per_node * group.memory_gb) * 2**30),
            node_disk_bytes=None if group.node_disk_gb is None else round(group.node_disk_gb * 2**30),
            peak_flops={dtype: each.peak_tflops * 1e12 for dtype, each in group.matmul.items()},
            matmul_rate={dtype: each.share * each.peak_tflops * 1e12 for dtype, each in group.matmul.items()},
            matmul_memory_rate=group.memory_gb_per_s * 1e9,
            matmul_overhead_s=group.overhead_us * 1e-6,
            attention_share=group.attention_share,
            attention_backward_share=group.attention_backward_share,
            memory_rate=group.memory_gb_per_s * 1e9,
            host_rate=group.host_gb_per_s * 1e9,
            disk_rate=group.disk_gb_per_s * 1e9,
            links={},
            price_per_hour=group.price_per_hour or 0.0,
            failures_per_device_hour=1 / group.device_mtbf_hours if group.device_mtbf_hours else 0.0,
            overhead_s=group.overhead_us * 1e-6,
            processors=group.processors,
            tile=group.tile,
            ramp=group.ramp,
            softmax_rate=1e9 * (group.softmax_g_per_s or 0.0),
            threads=group.threads,
            crowd=group.crowd or 0,
            is_assumed=is_assumed,
        )
        return replace(
            bare,
            links=_read_links(group),
            corrections={
                dtype: bare.compare(dtype, each.measured) for dtype, each in group.matmul.items() if each.measured
            },
            alone={dtype: bare.compare(dtype, each.alone) for dtype, each in group.matmul.items() if each.alone},
            gradients={
                dtype: bare.compare(dtype, each.gradient) for dtype, each in group.matmul.items() if each.gradient
            },
            attention_curves={
                dtype: _read_attention(each.attention, bare.peak_flops[dtype])
                for dtype, each in group.matmul.items()
                if each.attention
            },
            memory_curve=_read_curve(group.memory_measured),
            memory_alone=_read_curve(group.memory_alone),
            _matmuls={},
            _costs={},
        )

    def matmul_seconds(self, rows: int, inner: int, columns: int, dtype: str = "bf16") -> float:
        """Seconds of [rows, inner] times [inner, columns]; none of an empty one, such as of an expert without tokens."""
        if not rows * inner * columns:
            return 0.0
        return self._corrected("", rows, inner, columns, dtype, self.corrections)

    def gradient_seconds(self, tokens: int, inner: int, columns: int, added_bytes: float, dtype: str = "bf16") -> float:
        """Seconds of dW += dY^T X of a layer with so many features in and out. added_bytes: that adding moves, where no measured
        weight gradient says what it takes."""
        if self._known_dtype(dtype) in self.gradients:
            return self._corrected("gradient", columns, tokens, inner, dtype, self.gradients)
        # A matmul's own kernel adds, or a pass of the same bytes: without a launch of its own.
        added_s = self.memory_seconds(added_bytes) - self.overhead_s if added_bytes else 0.0
        return self.matmul_seconds(inner, tokens, columns, dtype) + added_s

    def _corrected(
        self, kind: str, rows: int, inner: int, columns: int, dtype: str, corrections: Mapping[str, Grid]
    ) -> float:
        key = (kind, rows, inner, columns, dtype)
        known = self._matmuls.get(key)
        if known is None:
            known = self._model_matmul(rows, inner, columns, dtype)
            grid = corrections.get(self._known_dtype(dtype))
            if grid is not None:
                known *= exp(grid.at(rows, inner, columns))
            self._matmuls[key] = known
        return known

    def attention_seconds(
        self, flops: float, dtype: str = "bf16", *, backward: bool = False, shape: tuple[int, int] | None = None
    ) -> float:
        """Seconds of attention's matmuls of so many FLOPs: of the pairs that its mask leaves, two matmuls in forward and five in
        backward. shape: tokens of a sequence and features of a head, which a measured rate depends on."""
        share = self.attention_backward_share if backward else self.attention_share
        curves = self.attention_curves.get(self._known_dtype(dtype))
        if curves is not None and shape is not None:
            share = curves[backward].at(*shape)
        return flops / (share * self._peak(dtype)) + self.overhead_s

    def softmax_seconds(self, logits: float) -> float:
        """Seconds of the logarithms of so many logits' softmax, where exponentials rather than memory say how long; else 0."""
        return logits / self.softmax_rate if self.softmax_rate else 0.0

    def memory_seconds(self, num_bytes: float) -> float:
        """Seconds of a pass over memory that reads and writes so many bytes in all."""
        if not num_bytes:
            return 0.0
        rate = self.memory_rate if self.memory_curve is None else self.memory_curve.at(max(num_bytes, 1.0))
        return num_bytes / rate + self.overhead_s

    def collective_seconds(self, kind: Collective, num_bytes: float, ranks: int, nodes: int) -> float:
        """Seconds of a collective of `ranks` ranks that lie on `nodes` nodes. num_bytes: of the whole tensor: what an all-gather
        returns, a reduce-scatter or an all-reduce takes, an all-to-all takes of one rank, a message is."""
        if ranks < 2 or not num_bytes:
            return 0.0
        nodes = min(nodes, ranks)
        cost = self._costs.get((kind, ranks, nodes))
        if cost is None:
            cost = self._costs[kind, ranks, nodes] = self._cost(kind, ranks, nodes)
        seconds = cost[0] + cost[1] * num_bytes
        correction = self.links[kind].correction
        return seconds if correction is None else seconds * exp(correction.at(ranks, num_bytes))

    def route(self, nodes: int = 1) -> Route:
        """From a device to another one, of its own node or of another."""
        latency_s, per_byte = self._cost("send", 2, nodes)
        return Route(1 / per_byte, latency_s)

    def for_ranks(self, ranks: int, threads: int | None = None) -> "Cluster":
        """This cluster with so many ranks on each node; threads: of a rank, None: the cores divided by the ranks.

        On CPUs ranks that are more than the cores take turns, and fewer have several cores each: between the measured ranks and
        one alone by the logarithm of its threads. A GPU has one rank."""
        if self.device != "cpu":
            return self
        cores = self.ranks_per_node * self.threads
        threads = threads or max(1, cores // ranks)
        turn, most = min(1.0, cores / (ranks * threads)), cores / self.threads
        part = turn * min(1.0, threads / self.threads)
        share = min(max(log(threads / self.threads) / log(most), 0.0), 1.0) if most > 1 else 0.0
        is_known = self.crowd > self.ranks_per_node
        crowded = log(1 / turn) / log(self.crowd / self.ranks_per_node) if is_known else 0.0
        faster = self._gain_alone**share
        curve = _blend(self.memory_curve, self.memory_alone, share, part)
        return replace(
            self,
            ranks_per_node=ranks,
            threads=threads,
            memory_bytes=self.memory_bytes * self.ranks_per_node // ranks,
            peak_flops={dtype: part * faster * each for dtype, each in self.peak_flops.items()},
            corrections={dtype: self._blend_matmul(dtype, share, part) for dtype in self.matmul_rate},
            gradients={
                dtype: Grid(grid.axes, tuple(value - log(part * faster) for value in grid.values))
                for dtype, grid in self.gradients.items()
            },
            memory_rate=self.memory_rate * part * faster if curve is None else curve.values[-1],
            memory_curve=curve,
            softmax_rate=self.softmax_rate * part * faster,
            overhead_s=self.overhead_s / turn,
            turn=turn,
            links={kind: each.shared(turn, crowded) for kind, each in self.links.items()},
            _matmuls={},
            _costs={},
        )

    @property
    def _gain_alone(self) -> float:
        """How many times as fast one rank with all cores computes the largest measured matmul."""
        pairs = [(self.corrections[dtype].values[-1], each.values[-1]) for dtype, each in self.alone.items()]
        return max((exp(shared - alone) for shared, alone in pairs), default=self.ranks_per_node)

    def _blend_matmul(self, dtype: str, share: float, part: float) -> Grid:
        """Corrections between those of the measured ranks and of one alone, with a part of the time for each."""
        shared = self.corrections.get(dtype, Grid(((0.0,),) * 3, (0.0,)))
        alone = self.alone.get(dtype)
        values = alone.values if alone is not None else tuple(each - log(self._gain_alone) for each in shared.values)
        mixed = ((1 - share) * low + share * high - log(part) for low, high in zip(shared.values, values, strict=True))
        return Grid(shared.axes, tuple(mixed))

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
        compute_s = 2.0 * least * self.processors * (inner + self.ramp) / rate
        num_bytes = ITEMSIZE[dtype] * (rows * inner + inner * columns + rows * columns)
        return self.matmul_overhead_s + max(compute_s, num_bytes / self.matmul_memory_rate)

    def _peak(self, dtype: str) -> float:
        """FLOP/s of a dtype, or of one that multiplies alike."""
        return self.peak_flops[self._known_dtype(dtype)]

    def _known_dtype(self, dtype: str) -> str:
        """The dtype whose rate counts: of those that a file has, the one that multiplies most like it."""
        return next(each for each in (dtype, *ALIKE[dtype]) if each in self.peak_flops)

    def _cost(self, kind: Collective, ranks: int, nodes: int) -> tuple[float, float]:
        """(seconds of latency, seconds of a byte of the whole tensor)."""
        link, near = self.links[kind], ceil(ranks / nodes)
        inside, between = link.at(1), link.at(nodes)
        rate = between.rate if nodes > 1 else inside.rate
        if nodes > 1 and kind in RINGS:
            rate *= min(1.0, near / self.ranks_per_node)
        if nodes > 1 and near > 1:
            rate = min(rate, inside.rate)
        if kind == "send":
            return link.start_s + between.hop_s, 1 / rate
        passes = 2 if kind == "all_reduce" else 1
        return count_latency_s(kind, link, ranks, nodes), passes * (ranks - 1) / ranks / rate


def count_latency_s(kind: str, link: Link, ranks: int, nodes: int) -> float:
    """Seconds of a collective without bytes: of the ring, or of an all-reduce the tree where that has fewer steps."""
    near, passes = ceil(ranks / nodes), 2 if kind == "all_reduce" else 1
    inside, between = link.at(1).hop_s, link.at(nodes).hop_s
    steps_between = nodes - 1
    if kind == "all_reduce":
        steps_between = min(steps_between, ceil(log2(nodes)) if nodes > 1 else 0)
        steps_inside = near - 1 if steps_between < nodes - 1 else ranks - nodes
    elif kind == "all_to_all":
        steps_inside = near - 1
    else:
        steps_inside = ranks - nodes
    return link.start_s + passes * (steps_inside * inside + steps_between * between)


def _read_links(group: ClusterRecipe) -> dict[Collective, Link]:
    links: dict[Collective, Link] = {}
    for kind in COLLECTIVES:
        each = group.links[kind]
        bare = Link(
            each.start_us * 1e-6,
            tuple(
                Span(nodes, rate * 1e9, hop_us * 1e-6)
                for nodes, rate, hop_us in zip(each.nodes, each.gb_per_s, each.hop_us, strict=True)
            ),
        )
        if each.measured_mb is not None:
            size = each.measured_mb * 1e6
            spans = [
                replace(span, rate=_without_latency(kind, bare, span, size, group.devices_per_node))
                for span in bare.spans
            ]
            bare = replace(bare, spans=tuple(spans))
        if each.measured:
            rows = [(max(2, group.devices_per_node), *row) for row in each.measured]
            bare = replace(bare, correction=_compare_link(kind, bare, rows))
        if each.crowded:
            bare = replace(bare, crowded=_compare_link(kind, bare, each.crowded))
        links[kind] = bare
    return links


def _without_latency(kind: str, link: Link, span: Span, num_bytes: float, devices: int) -> float:
    """The bus bandwidth of a span without the latencies that were measured along with it."""
    ranks = devices * span.nodes
    if ranks < 2:
        return span.rate
    part = 1.0 if kind == "send" else (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
    latency_s = link.start_s + span.hop_s if kind == "send" else count_latency_s(kind, link, ranks, span.nodes)
    sending_s = part * num_bytes / span.rate
    # Latency that would explain most of what was measured is wrong for this size: at least half is bytes.
    return part * num_bytes / max(sending_s - latency_s, sending_s / 2)


def _compare_link(kind: str, link: Link, measured: Sequence[Sequence[float]]) -> Grid:
    """Logarithms of measured over modelled seconds. measured: [ranks of a group, 10^6 bytes, microseconds] on a grid."""
    table = {(int(ranks), 1e6 * size): 1e-6 * micros for ranks, size, micros in measured}
    groups, sizes = (sorted({point[axis] for point in table}) for axis in range(2))
    values = []
    for ranks, num_bytes in product(groups, sizes):
        part = 1.0 if kind == "send" else (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
        span = link.at(1)
        latency_s = link.start_s + span.hop_s if kind == "send" else count_latency_s(kind, link, int(ranks), 1)
        values.append(log(table[int(ranks), num_bytes] / (latency_s + part * num_bytes / span.rate)))
    return Grid((tuple(map(log, groups)), tuple(map(log, sizes))), tuple(values))


def _read_curve(measured: Sequence[Sequence[float]]) -> Grid | None:
    """Rates in bytes a second by bytes."""
    if not measured:
        return None
    return Grid((tuple(log(1e6 * size) for size, _ in measured),), tuple(1e9 * rate for _, rate in measured))


def _read_attention(measured: Sequence[Sequence[float]], peak: float) -> tuple[Grid, Grid]:
    """Shares of the peak by context and features of a head, in forward and in backward."""
    rows = sorted(map(tuple, measured))
    axes = tuple(tuple(sorted({log(row[axis]) for row in rows})) for axis in range(2))
    forward, backward = (tuple(1e12 * row[column] / peak for row in rows) for column in (2, 3))
    return Grid(axes, forward), Grid(axes, backward)


def _blend(shared: Grid | None, alone: Grid | None, share: float, part: float) -> Grid | None:
    """Rates between those of the measured ranks and of one alone, of which a rank has a part of the time."""
    if shared is None:
        return None
    values = alone.values if alone is not None else shared.values
    mixed = (
        part * exp((1 - share) * log(low) + share * log(high)) for low, high in zip(shared.values, values, strict=True)
    )
    return Grid(shared.axes, tuple(mixed))
