"""The account of a run for people: a table, a line, a picture."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from framework.track.console import format_duration
from framework.track.goodput import UNPAID, Account, Part
from framework.track.goodput_log import read_account
from framework.track.report import RunInfo, StepReport

GOODPUT_PICTURE = "goodput.png"
# Useful work in blue, what belongs to each step beside it, then what surrounds it, and what failures cost in red.
COLORS = {
    Part.STEP: "#2f6db5", Part.EXPOSED: "#7fb2e5", Part.DATA_WAIT: "#35a0a0", Part.CHECKPOINT: "#7e5fb0",
    Part.VALIDATION: "#b79bd8", Part.COMPILE: "#e0a020", Part.START_UP: "#f0cf7a", Part.QUEUE: "#b5b5b5",
    Part.RECOVERY: "#c2322d", Part.LOST: "#e8837a", Part.CLOSE: "#6e6e6e", Part.OFF: "#dedede",
}  # fmt: skip
# Beyond so many starts each has no bar of its own: the last ones are shown.
SHOWN_STARTS = 24
# Of the time, below which a part is not worth a word in a line.
LEAST_SHARE = 0.005


class GoodputTable:
    """Says where the time went when a run ends."""

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self._run_dir, self._say = run_dir, say
        self._run: RunInfo | None = None

    def open(self, run: RunInfo) -> None:
        self._run = run

    def report(self, report: StepReport) -> None:
        """The rank notes its time itself."""

    def rewind(self, step: int) -> None:
        """Nothing: time that was spent stays spent."""

    def close(self, exit_code: int) -> None:
        account = read_account(self._run_dir)
        if account is not None and self._run is not None:
            self._say("\n".join(describe_goodput(account, price_of(self._run), self._run.device != "cpu")))


def price_of(run: RunInfo) -> float | None:
    """What a rank costs in an hour, if that was said."""
    price: float | None = run.config.get("launch", {}).get("price_per_gpu_hour")
    return price


def describe_goodput(account: Account, price: float | None, is_gpu: bool) -> Iterator[str]:
    """The table: share, time, hours times ranks and what these cost by part; parts without time left out."""
    starts = f"{len(account.rows)} start{'s' * (len(account.rows) != 1)}"
    yield f"goodput: {account.ettr:.1%} of {format_duration(account.on_s)} were steps that count, {starts}"
    unit = "GPU hours" if is_gpu else "rank hours"
    yield f"  {'':<22}{'share':>7}{'time':>11}{unit:>12}" + ("" if price is None else f"{'cost':>11}")
    shares: dict[Part, float | None] = {**account.shares, Part.OFF: None}
    for part in Part:
        if account.seconds[part] > 0:
            paid_s = None if part in UNPAID else account.rank_seconds[part]
            yield _row(name_of(part), shares[part], account.seconds[part], paid_s, price)
    yield _row("all", 1.0, account.on_s, sum(account.rank_seconds.values()), price)


def _row(name: str, share: float | None, seconds: float, paid_s: float | None, price: float | None) -> str:
    paid = "-" if paid_s is None else f"{paid_s / 3600:,.3g}"
    cost = "" if price is None else f"{'-' if paid_s is None else f'{paid_s / 3600 * price:.2f}':>11}"
    return f"  {name:<22}{'-' if share is None else f'{share:.1%}':>7}{format_duration(seconds):>11}{paid:>12}{cost}"


def summarize_goodput(account: Account, price: float | None, is_gpu: bool) -> str:
    """The account in a line: the largest parts, what they were of, and the price."""
    shares = sorted(account.shares.items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"{name_of(part)} {share:.1%}" for part, share in shares if share >= LEAST_SHARE)
    hours = sum(account.rank_seconds.values()) / 3600
    cost = "" if price is None else f", cost {hours * price:.2f}"
    return f"{shown} of {format_duration(account.on_s)}; {hours:,.3g} {'GPU' if is_gpu else 'rank'} hours{cost}"


def name_of(part: Part) -> str:
    """As people read it."""
    return {Part.START_UP: "start-up", Part.COMPILE: "warm-up"}.get(part, part.replace("_", " "))


def draw_goodput(account: Account, title: str) -> bytes:
    """A PNG: the whole run as one bar with the share of each part, and below it a bar for each start."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(enumerate(account.rows, start=1))[-SHOWN_STARTS:]
    unit_s, unit = _choose_unit(account.wall_s)
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


def _draw_bar(axes: Any, position: float, lengths: dict[Part, float], says: bool = False) -> None:
    """Parts end to end. says: write its length into each that has room for it."""
    left = 0.0
    for part in Part:
        length = lengths.get(part, 0.0)
        if length > 0:
            axes.barh(position, length, left=left, color=COLORS[part], edgecolor="white", linewidth=0.4, height=0.72)
            if says and length >= 4:
                dark = part in (Part.STEP, Part.DATA_WAIT, Part.CHECKPOINT, Part.RECOVERY, Part.CLOSE)
                color = "white" if dark else "black"
                axes.text(left + length / 2, position, f"{length:.0f}%", ha="center", va="center", color=color)
        left += length


def _draw_legend(figure: Any, account: Account) -> None:
    from matplotlib.patches import Patch

    shown = [part for part in Part if account.seconds[part] > 0]
    patches = [Patch(color=COLORS[part]) for part in shown]
    labels = [f"{name_of(part)} {format_duration(account.seconds[part])}" for part in shown]
    figure.legend(patches, labels, loc="outside lower center", ncols=5, frameon=False)


def _choose_unit(seconds: float) -> tuple[float, str]:
    for unit_s, unit in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit_s:
            return unit_s, unit
    return 1.0, "seconds"
