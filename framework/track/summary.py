"""The report that ends every run: report.png (curves), goodput.png and report.txt (one page), from run_info.json, metrics.jsonl
and goodput.jsonl only, so that it can be written again at any time: `write_report(run_dir)`."""

import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from framework.errors import RecipeError
from framework.lease import Lease
from framework.track.console import format_count, format_duration
from framework.track.goodput import GOODPUT_FILE, Account, TimePart, describe_goodput, name_of, price_of, read_account
from framework.track.jsonl import LOADS_FILE, METRICS_FILE, is_whole, read_records
from framework.track.report import Curve, Observer, RunInfo, load_run_info

REPORT_TEXT = "report.txt"
REPORT_PICTURE = "report.png"
GOODPUT_PICTURE = "goodput.png"
# Useful work in blue, what belongs to each step beside it, then what surrounds it, and what failures cost in red.
COLORS = {
    TimePart.STEP: "#2f6db5", TimePart.EXPOSED: "#7fb2e5", TimePart.DATA_WAIT: "#35a0a0", TimePart.CHECKPOINT: "#7e5fb0",
    TimePart.VALIDATION: "#b79bd8", TimePart.COMPILE: "#e0a020", TimePart.START_UP: "#f0cf7a", TimePart.QUEUE: "#b5b5b5",
    TimePart.RECOVERY: "#c2322d", TimePart.LOST: "#e8837a", TimePart.CLOSE: "#6e6e6e", TimePart.OFF: "#dedede",
}  # fmt: skip
# Red, green and blue of a colour on which text is white.
DARK = 400
# Beyond so many starts each has no bar of its own: the last ones are shown.
SHOWN_STARTS = 24

# Reports at the end of a run over which the load of experts is averaged.
LAST_LOADS = 20

_CURVES = (
    "step",
    "tokens",
    "loss",
    "lr",
    "gradient_norm",
    "step_s",
    "tokens_per_s",
    "data_wait_s",
    "exposed_communication_s",
    "memory_bytes",
    "mfu",
)


class Summary(Observer):
    """Writes the report, made of the run's files, when a run ends, however it ends; says where the time went and where it is."""

    def __init__(self, run_dir: Path, say: Callable[[str], None], lease: Lease | None = None):
        self._run_dir, self._say, self._lease = run_dir, say, lease
        self._run: RunInfo | None = None

    def open(self, run: RunInfo) -> None:
        self._run = run

    def close(self, exit_code: int | None) -> None:
        if exit_code is None:
            return
        account, run = read_account(self._run_dir), self._run
        try:
            self._say(f"report: {', '.join(str(path) for path in write_report(self._run_dir, self._lease))}")
        finally:
            if account is not None and run is not None:
                self._say("\n".join(describe_goodput(account, price_of(run), run.device != "cpu")))


@dataclass(frozen=True)
class Curves:
    """The metrics of a run by column, one value per reported step."""

    columns: dict[str, list[Any]]
    validation: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    # Imbalance of experts: (step, mean over layers, largest).
    imbalance: list[tuple[int, float, float]] = field(default_factory=list)
    load: dict[str, list[int]] = field(default_factory=dict)  # tokens of each expert in the last reports, by layer
    last: dict[str, Any] = field(default_factory=dict)  # the last record
    # The last loss of each source: of a step that had it, and of a validation.
    by_source: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)
    scores: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # (step, score) of tasks, by name

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def write_report(run_dir: Path, lease: Lease | None = None) -> list[Path]:
    """Write report.txt and, if a step was reported, report.png; returns what was written. lease: of a run that is launched."""
    lease = lease or Lease(run_dir)
    run = load_run_info(run_dir)
    load = add_loads(read_records(run_dir / LOADS_FILE, LAST_LOADS))
    curves = replace(collect_curves(filter(is_whole, read_records(run_dir / METRICS_FILE))), load=load)
    written = []
    if curves["step"]:
        written.append(run_dir / REPORT_PICTURE)
        lease.write(written[-1], draw(run, curves))
    account = read_account(run_dir)
    if account is not None:
        written.append(run_dir / GOODPUT_PICTURE)
        lease.write(written[-1], draw_goodput(account, run.run_id))
    written.append(run_dir / REPORT_TEXT)
    lease.write(written[-1], describe(run, curves, run_dir, account).encode())
    return written


def collect_curves(records: Iterable[dict[str, Any]]) -> Curves:
    """Columns of the records; one pass, so that only the columns are held."""
    columns: dict[str, list[Any]] = {name: [] for name in _CURVES}
    validation, last, imbalance = [], {}, []
    by_source, held_out = dict[str, float](), dict[str, float]()
    scores: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, column in columns.items():
            column.append(record[name])
        if record["validation_loss"] is not None:
            validation.append((record["step"], record["validation_loss"]))
            held_out = record.get("validation_losses", {})  # a run may have begun before there was such a field
        by_source |= record.get("source_losses", {})
        for name, score in record.get("scores", {}).items():
            scores.setdefault(name, []).append((record["step"], score))
        if record.get("expert_imbalance_max") is not None:
            imbalance.append((record["step"], record["expert_imbalance_mean"], record["expert_imbalance_max"]))
        last = record
    return Curves(columns, validation, imbalance, last=last, by_source=by_source, held_out=held_out, scores=scores)


def add_loads(records: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    """The tokens of each expert in all of the records, by layer."""
    sums: dict[str, list[int]] = {}
    for record in records:
        for layer, load in record["expert_loads"].items():
            sums[layer] = [a + b for a, b in zip(sums.get(layer, [0] * len(load)), load, strict=True)]
    return sums


def read_loads(run_dir: Path) -> dict[str, list[int]]:
    """The tokens of each expert in the last records of a run, by layer. RecipeError where it has recorded none."""
    if not (run_dir / LOADS_FILE).exists():
        raise RecipeError(f"--loads {run_dir}: has no {LOADS_FILE}: give the folder of a run of a mixture of experts")
    return add_loads(read_records(run_dir / LOADS_FILE, LAST_LOADS))


def describe(run: RunInfo, curves: Curves, run_dir: Path, account: Account | None = None) -> str:
    """The page of text."""
    blocks = [_what_was_run(run)]
    if curves["step"]:
        blocks += [_results(run, curves), _experts(curves), _speed(run, curves), _traffic(curves.last["traffic"])]
    else:
        blocks.append(["Results", "  no step was reported"])
    if account is not None:
        blocks.append(list(describe_goodput(account, price_of(run), run.device != "cpu")))
    blocks.append(_files(run_dir))
    is_done = bool(curves["step"]) and curves["step"][-1] >= run.total_steps
    commands = run.next_commands(is_done, is_saved=is_done or (run_dir / "checkpoints.json").exists())
    if commands:
        blocks.append(["Next", *_table(list(commands.items()))])
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def draw(run: RunInfo, curves: Curves) -> bytes:
    """The four curves over steps as a PNG; of a mixture of experts their load below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = 3 if curves.load and curves.imbalance else 2
    figure = Figure(figsize=(11, 3.5 * rows), dpi=120, layout="constrained")
    figure.suptitle(describe_title(run))
    loss, lr, norm, rate, *experts = figure.subplots(rows, 2).flat
    for axes, name, title, unit in (
        (loss, "loss", "Loss", "nats per token"),
        (lr, "lr", "Learning rate", "rate"),
        (norm, "gradient_norm", "Gradient norm before clipping", "norm"),
        (rate, "tokens_per_s", "Throughput of the whole run", "tokens/s"),
    ):
        _plot(axes, curves["step"], curves[name], is_noisy=name != "lr")
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    _mark_borders((loss, lr, norm, rate), run, curves["step"][-1])
    if curves.validation:
        loss.plot(*zip(*curves.validation, strict=True), color="C1", marker="o", markersize=4, label="validation")
    if run.unigram_entropy is not None:
        loss.axhline(run.unigram_entropy, color="0.4", linestyle="--", linewidth=1, label="unigram entropy")
    loss.legend(frameon=False)
    if any(value > 0 for value in curves["gradient_norm"]):
        norm.set_yscale("log")
    # A line that was lost is filled in without a rate.
    rate.set_ylim(0, 1.2 * max(filter(isfinite, curves["tokens_per_s"]), default=0) or 1)
    rate.yaxis.set_major_formatter(lambda value, _: format_count(value))
    lr.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    if experts:
        _draw_imbalance(experts[0], curves.imbalance)
        _draw_loads(figure, experts[1], curves.load)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def _mark_borders(plots: Iterable[Any], run: RunInfo, last_step: int) -> None:
    """A line where each stage begins of which a step is reported, with its name in the first plot where there is room, which the
    parts of a ramp may not leave."""
    for place, axes in enumerate(plots):
        named = -math.inf
        for name, start in run.stages.items():
            if start < last_step:
                axes.axvline(max(1, start), color="0.6", linestyle=":", linewidth=start > 0)
            if place == 0 and start < last_step and start - named > last_step / 10:
                named = start
                spot = {"xy": (max(1, start), 1), "xycoords": axes.get_xaxis_transform()}
                axes.annotate(name, **spot, textcoords="offset points", xytext=(3, -10), fontsize=8, color="0.4")


def _draw_imbalance(axes: Any, imbalance: list[tuple[int, float, float]]) -> None:
    """The curves of the mean over layers and of the worst layer."""
    steps, means, largest = zip(*imbalance, strict=True)
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, largest, color="C3", linewidth=1.2, marker=marker, label="worst layer")
    axes.plot(steps, means, color="C0", linewidth=1.8, marker=marker, label="mean over layers")
    axes.set(title="Imbalance of experts", xlabel="step", ylabel="largest load / mean load")
    axes.set_ylim(bottom=1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _draw_loads(figure: Any, axes: Any, load: dict[str, list[int]]) -> None:
    """A heat map of layers x experts: white where an expert has the mean load of its layer, red where more, blue where less."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    widest = max(map(len, load.values()))
    shares = [[x * len(row) / (sum(row) or 1) for x in row] + [math.nan] * (widest - len(row)) for row in load.values()]
    largest = max(2.0, *(share for row in shares for share in row if share == share))
    norm = TwoSlopeNorm(1.0, 0.0, largest)
    image = axes.imshow(shares, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=norm)
    axes.set(title=f"Load of experts, last {LAST_LOADS} reports", xlabel="expert", ylabel="layer")
    every = -(-len(load) // 12)
    axes.set_yticks(range(0, len(load), every), [layer.removeprefix("layers.") for layer in load][::every])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, label="load / mean load of the layer")


def _plot(axes: Any, steps: list[int], values: list[float], is_noisy: bool) -> None:
    """The values; where they are noisy and many, pale behind their means over a hundredth of the run each."""
    width = len(values) // 100
    if not is_noisy or width < 2:
        axes.plot(steps, values, color="C0", linewidth=1.5, marker="o" if len(values) == 1 else None, label="training")
        return
    axes.plot(steps, values, color="C0", alpha=0.3, linewidth=0.8)
    axes.plot(*thin(steps, values, width), color="C0", linewidth=1.8, label=f"training, mean of {width} reports")


def thin(steps: Sequence[float], values: Sequence[float], width: int) -> Curve:
    """Means of the steps, and of the values that are finite, of `width` neighbours each."""
    parts = [slice(start, start + width) for start in range(0, len(values), width)]
    means = [statistics.fmean(list(filter(isfinite, values[part])) or [math.nan]) for part in parts]
    return [statistics.fmean(steps[part]) for part in parts], means


def _what_was_run(run: RunInfo) -> list[str]:
    active = (
        f", {format_count(run.num_parameters_active)} active" if run.num_parameters_active < run.num_parameters else ""
    )
    optim, precision = run.config.get("optim", {}), run.config.get("precision", {})
    stage = " in the last stage trained" * bool(run.stages)
    return [
        f"Run {run.run_id}",
        *_table(
            [
                ("model", f"{run.model}, {format_count(run.num_parameters)} parameters{active}"),
                ("layout", _where(run)),
                (
                    "batch",
                    f"{format_count(run.tokens_per_step)} tokens per step{stage}, {run.total_steps} steps asked for",
                ),
                ("optimizer", f"{optim.get('name', '')}, {_join(optim, 'lr', 'weight_decay', 'clip_norm')}"),
                ("precision", _join(precision, "compute", "master", "reduce")),
            ]
        ),
    ]


def _results(run: RunInfo, curves: Curves) -> list[str]:
    steps, losses = curves["step"], curves["loss"]
    rows = [
        ("steps", f"{steps[-1]} of {run.total_steps}, {format_count(curves['tokens'][-1])} tokens"),
        ("loss", f"{losses[-1]:.4f} at step {steps[-1]}; {losses[0]:.4f} at step {steps[0]}"),
    ]
    rows += [(f"  of {name}", f"{loss:.4f} in the last step that had it") for name, loss in curves.by_source.items()]
    if curves.validation:
        step, loss = curves.validation[-1]
        behind = [pair for pair in curves.validation if pair[0] > run.data_step] or curves.validation[-1:]
        best_step, best = min(behind, key=lambda pair: pair[1])
        rows.append(("validation loss", f"{loss:.4f} at step {step}; lowest {best:.4f} at step {best_step}"))
    rows += [(f"  of {name}", f"{loss:.4f} in the last validation") for name, loss in curves.held_out.items()]
    for name, pairs in curves.scores.items():
        (step, score), (first, began) = pairs[-1], pairs[0]
        rows.append((name, f"{score:.4f} at step {step}" + f"; {began:.4f} at step {first}" * (len(pairs) > 1)))
    if run.unigram_entropy is not None:
        rows.append(("unigram entropy", f"{run.unigram_entropy:.4f}, the loss of knowing token frequencies only"))
    if curves.last["skipped_steps"]:
        rows.append(("skipped steps", f"{curves.last['skipped_steps']}, for values that were not finite, or spikes"))
    if curves.last.get("spikes"):
        rows.append(("spikes", f"{curves.last['spikes']}"))
    if curves.last.get("rewinds"):
        ranges = ", ".join(f"{first:,} to {stop:,}" for first, stop in curves.last["skipped_samples"])
        rows.append(("rewinds", f"{curves.last['rewinds']}; samples left out: {ranges}"))
    return ["Results (nats per token)", *_table(rows)]


def _experts(curves: Curves) -> list[str]:
    last = curves.last
    if last.get("expert_imbalance_max") is None:
        return []
    layers = last["expert_imbalance"]
    worst = max(layers, key=layers.__getitem__)
    spread = f"{last['expert_imbalance_mean']:.2f} mean over layers; largest {layers[worst]:.2f}, of {worst}"
    rows = [("imbalance", f"{spread} (largest load over mean load)")]
    if last["router_entropy"] is not None:
        most = max((math.log(len(load)) for load in curves.load.values()), default=math.nan)
        rows.append(("router entropy", f"{last['router_entropy']:.3f} nats mean over layers, of at most {most:.3f}"))
    if last["dropped_tokens"]:
        rows.append(("dropped tokens", f"{format_count(last['dropped_tokens'])}, a token once for each expert"))
    return ["Experts in the last step", *_table(rows)]


def _speed(run: RunInfo, curves: Curves) -> list[str]:
    # A line that was lost is filled in without times.
    known = {
        name: [each for each in values if each is not None and isfinite(each)]
        for name, values in curves.columns.items()
    }
    step_s, data_wait_s, exposed_s = (known[name] for name in ("step_s", "data_wait_s", "exposed_communication_s"))
    if not step_s:
        return []
    total_s = sum(step_s)
    rows = [
        ("time", f"{format_duration(total_s)} in {len(step_s)} reported steps"),
        ("step", f"{statistics.median(step_s):.3g} s median, {max(step_s):.3g} s longest"),
        ("throughput", f"{format_count(statistics.median(known['tokens_per_s']))} tokens/s median"),
    ]
    rates = curves.last["tokens_per_s_per_rank"]
    if len(rates) > 1:
        slowest = rates.index(min(rates))
        rows.append(("slowest rank", f"{slowest} with {format_count(rates[slowest])} tokens/s in the last step"))
    if known["mfu"] and run.peak_flops:
        peak = f"{format_count(run.peak_flops)}FLOP/s per device (dense bf16)"
        rows.append(("mfu", f"{statistics.median(known['mfu']):.1%} median of a peak of {peak}"))
    rows.append(("data wait", f"{sum(data_wait_s) / total_s if total_s else 0:.2%} of the time"))
    rows.append(("exposed communication", f"{sum(exposed_s) / total_s if total_s else 0:.2%} of the time"))
    rows.append(("memory", f"{max(known['memory_bytes']) / 2**20:.0f} MiB at the peak of rank 0"))
    return ["Speed", *_table(rows)]


def _traffic(traffic: dict[str, dict[str, int]]) -> list[str]:
    rows = [
        (axis, f"{counts['calls']} calls, {format_count(counts['bytes'])}B") for axis, counts in sorted(traffic.items())
    ]
    return ["Traffic of rank 0 in the last step", *_table(rows)] if rows else []


def _files(run_dir: Path) -> list[str]:
    names = (
        ("recipe.yaml", "the recipe, composed"),
        (METRICS_FILE, "every metric, defined in docs/metrics.md"),
        (LOADS_FILE, "tokens of each expert"),
        (REPORT_PICTURE, "curves"),
        (GOODPUT_FILE, "where the time of each start went"),
        (GOODPUT_PICTURE, "the same, drawn"),
        ("checkpoints", "states to resume from"),
        ("checkpoints.url", "where they lie"),
        ("wandb", "the mirror for wandb"),
    )
    rows = [(str(run_dir / name), what) for name, what in names if (run_dir / name).exists()]
    return ["Files", *_table(rows)]


def describe_title(run: RunInfo) -> str:
    """The run's name, model and layout in a line."""
    return f"{run.run_id}: {run.model}, {format_count(run.num_parameters)} parameters, {_where(run)}"


def _where(run: RunInfo) -> str:
    degrees = ", ".join(f"{axis}={size}" for axis, size in run.degrees.items() if size > 1)
    return f"{run.world} rank{'s' * (run.world > 1)}{f' ({degrees})' if degrees else ''} on {run.device}"


def _join(group: dict[str, Any], *keys: str) -> str:
    return ", ".join(f"{key} {group[key]}" for key in keys if key in group)


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {value}" for name, value in rows if value]


def draw_goodput(account: Account, title: str) -> bytes:
    """A PNG: the whole run as one bar with the share of each part, and below it a bar for each start."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(enumerate(account.rows, start=1))[-SHOWN_STARTS:]
    units = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
    unit_s, unit = next((each for each in units if account.wall_s >= 2 * each[0]), units[-1])
    figure = Figure(figsize=(11, 3.2 + 0.32 * len(rows)), dpi=120, layout="constrained", facecolor="white")
    figure.suptitle(f"{title}   {account.ettr:.1%} of {format_duration(account.on_s)} were steps that count")
    whole, starts = figure.subplots(2, 1, height_ratios=(1, 0.6 + 0.45 * len(rows)))
    _draw_bar(whole, 0.0, {part: 100 * share for part, share in account.shares.items()}, says=True)
    whole.set(xlim=(0, 100), yticks=[], xlabel="% of the time, off left out")
    for position, (_, row) in enumerate(rows):
        _draw_bar(starts, position, {part: seconds / unit_s for part, seconds in row.items()})
    starts.set_yticks(range(len(rows)), [str(number) for number, _ in rows])
    starts.set(xlabel=unit, ylabel="start", ylim=(len(rows) - 0.4, -0.6))
    for axes in (whole, starts):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    starts.grid(axis="x", alpha=0.25)
    starts.set_axisbelow(True)
    _draw_legend(figure, account)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def _draw_bar(axes: Any, position: float, lengths: dict[TimePart, float], says: bool = False) -> None:
    """Draw the parts end to end. says: write the length into each that has room for it."""
    left = 0.0
    for part in TimePart:
        length = lengths.get(part, 0.0)
        if length > 0:
            axes.barh(position, length, left=left, color=COLORS[part], edgecolor="white", linewidth=0.4, height=0.72)
            if says and length >= 4:
                is_dark = sum(bytes.fromhex(COLORS[part][1:])) < DARK
                color = "white" if is_dark else "black"
                axes.text(left + length / 2, position, f"{length:.0f}%", ha="center", va="center", color=color)
        left += length


def _draw_legend(figure: Any, account: Account) -> None:
    from matplotlib.patches import Patch

    shown = [part for part in TimePart if account.seconds[part] > 0]
    patches = [Patch(color=COLORS[part]) for part in shown]
    labels = [f"{name_of(part)} {format_duration(account.seconds[part])}" for part in shown]
    figure.legend(patches, labels, loc="outside lower center", ncols=5, frameon=False)
