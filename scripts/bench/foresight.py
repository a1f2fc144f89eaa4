"""Forecasts held against published runs: nanotron on H100s, as the Ultra-Scale Playbook measured it.

    python scripts/bench/foresight.py --csv FILE [--json] [--worst 10] [--told] [--fit]

The file has a row for each run: size (1B, 3B, 8B, 80B), nodes of eight H100, dp, tp, pp, mbs, ga, gbs, zero; tps, tokens per
second and GPU, and mem, peak allocated GiB of the first stage's rank, both empty where the run failed. Forecasts are those of
`scripts/bench/nanotron.py`; `--fit` fits its parameters to one half of the runs, by a hash of their layouts. Both are reported.

Which failed runs failed for lack of memory the file does not say. Left out are those that nanotron cannot run at all
(`find_refusal`), and those of which the file itself shows that memory was enough: a run with the same model, tp and pp, with as
many microbatches under way and as long ones or longer, whose measured bytes plus what this run's states need more stay below the
limit. All other failures count as failures by memory.
"""

import argparse
import csv
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations, groupby
from math import exp, log
from pathlib import Path
from typing import Any

from transformers.models.llama import LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from framework.errors import MeshwrightError
from framework.plan.candidate import Candidate
from framework.plan.cluster import ClusterRates
from framework.plan.shape import make_shape
from framework.recipe.machines import read_shipped
from scripts.bench.nanotron import GIB, UNITS, Choice, Fitted, Llama, Nanotron, find_refusal, split_blocks

CONTEXT = 4096
VOCABULARY = 131072
# hidden, layers, heads, heads of keys, intermediate, whether the embeddings are tied. The playbook says that the 3B model has 24
# heads; its script for these runs has 32, and runs with tp=16 and 32 ran, which 24 heads do not allow. Bytes and FLOPs do not
# depend on it.
SIZES = {
    "1B": (2048, 16, 32, 32, 8192, True),
    "3B": (3072, 28, 32, 32, 8192, True),
    "8B": (4096, 32, 32, 32, 14336, False),
    "80B": (8192, 80, 64, 64, 28672, False),
    "70B": (8192, 80, 64, 8, 28672, False),
}
COUNTS = ("nodes", "dp", "tp", "pp", "mbs", "ga", "gbs", "zero")
MEASURED = ("tps", "mem")
HALVES = ("fitting", "held back")


class TableError(MeshwrightError):
    """A file that is no table of runs."""


@dataclass(frozen=True)
class Row:
    """A published run. gbs: sequences that the file says of a step, which a few rows' microbatches are not; tps, mem: None where
    it failed."""

    line: int
    size: str
    candidate: Candidate
    nodes: int
    gbs: int
    tps: float | None
    mem: float | None

    @property
    def half(self) -> str:
        """The half that it belongs to, by what was chosen before the run."""
        c = self.candidate
        accumulation, rest = divmod(self.gbs, c.dp * c.sequences)
        chosen = (
            self.size,
            self.nodes,
            c.dp,
            c.tp,
            c.pp,
            c.sequences,
            c.accumulation if rest else accumulation,
            c.zero,
        )
        return HALVES[hashlib.sha256("|".join(map(str, chosen)).encode()).digest()[0] % 2]

    @property
    def model(self) -> str:
        """The model that ran. Pipelines of 80B with ZeRO 0 and tp within a node are the 70B of eight heads of keys: so says the
        column mfu, over tps, which is FLOPs of a token."""
        is_grouped = (
            self.size == "80B" and self.candidate.pp > 1 and self.candidate.zero == 0 and self.candidate.tp <= 8
        )
        return "70B" if is_grouped else self.size

    @property
    def group(self) -> tuple[str, int]:
        """Runs that a user would choose among."""
        return self.size, self.nodes


@dataclass(frozen=True)
class Outcome:
    """A row and what is foretold of it. refusal: why it cannot run at all; fits: on every rank; by_memory: the run failed, and
    nothing in the file says that memory was enough."""

    row: Row
    refusal: str | None
    fits: bool
    by_memory: bool
    tps: float
    mem: float

    @property
    def ran(self) -> bool:
        """Whether there is a measurement."""
        return self.row.tps is not None


def read_rows(path: Path) -> list[Row]:
    """The runs of a file. Raises TableError with line and column of what is wrong."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in ("size", *COUNTS, *MEASURED) if name not in (reader.fieldnames or ())]
            if missing:
                raise TableError(
                    f"{path}: no column {', '.join(missing)}; columns needed: size, {', '.join(COUNTS + MEASURED)}"
                )
            rows = [_read_row(path, reader.line_num, each) for each in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read as a CSV file: {error}") from error
    if not rows:
        raise TableError(f"{path}: has no rows")
    return rows


def _read_row(path: Path, line: int, cells: dict[str, Any]) -> Row:
    size = (cells["size"] or "").strip()
    if size not in SIZES:
        raise TableError(f"{path}:{line}: size={size!r} is unknown; known are {', '.join(SIZES)}")
    numbers = {name: _read_number(path, line, name, cells[name]) for name in (*COUNTS, *MEASURED)}
    counts = {}
    for name in COUNTS:
        value = numbers[name]
        if value is None or value != int(value) or value < (name != "zero"):
            raise TableError(
                f"{path}:{line}: {name}={cells[name]!r} must be a whole number{'' if name == 'zero' else ' above 0'}"
            )
        counts[name] = int(value)
    if counts["zero"] not in (0, 1):
        raise TableError(f"{path}:{line}: zero={counts['zero']} is not known of nanotron, which has 0 and 1")
    if (numbers["tps"] is None) != (numbers["mem"] is None):
        raise TableError(f"{path}:{line}: tps and mem must both be given, or both be empty where a run failed")
    if any(value is not None and value <= 0 for value in (numbers["tps"], numbers["mem"])):
        raise TableError(f"{path}:{line}: tps and mem must be above 0, or empty where a run failed")
    world = counts["dp"] * counts["tp"] * counts["pp"]
    if -(-world // 8) != counts["nodes"]:
        raise TableError(f"{path}:{line}: dp x tp x pp = {world} ranks are not {counts['nodes']} nodes of eight")
    candidate = Candidate(
        dp=counts["dp"],
        tp=counts["tp"],
        pp=counts["pp"],
        sequence=counts["tp"] > 1,
        zero=counts["zero"],
        shard=counts["dp"] if counts["zero"] else 1,
        sequences=counts["mbs"],
        accumulation=counts["ga"],
        context=CONTEXT,
    )
    return Row(line, size, candidate, counts["nodes"], counts["gbs"], numbers["tps"], numbers["mem"])


def _read_number(path: Path, line: int, name: str, cell: Any) -> float | None:
    text = cell.strip() if isinstance(cell, str) else ""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise TableError(f"{path}:{line}: {name}={text!r} is not a number")
    return value


@cache
def read_llama(size: str) -> Llama:
    """The model of a size, from a config of transformers."""
    hidden, layers, heads, key_heads, intermediate, is_tied = SIZES[size]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=is_tied,
        max_position_embeddings=CONTEXT,
    )
    return Llama.of(make_shape(config), CONTEXT)


@cache
def read_cluster() -> ClusterRates:
    """The nodes that the runs were made on."""
    return ClusterRates.from_group(read_shipped("h100_efa"))


def foretell(rows: Sequence[Row], fitted: Fitted, is_told: bool = False) -> list[Outcome]:
    """Foretell each row, and whether a failure was one of memory. is_told: with the campaign of each run as if the file said it,
    which is the one whose throughput is nearer to what was measured."""
    machines = {model: Nanotron(read_llama(model), read_cluster(), fitted) for model in {row.model for row in rows}}
    ran: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        if row.mem is not None:
            ran.setdefault(_alike(row), []).append(row)
    outcomes = []
    for row in rows:
        machine = machines[row.model]
        choice = _told(machine, row) if is_told and row.tps else machine.choose(row.candidate)
        memory = machine.memory(row.candidate, choice)
        refusal = find_refusal(machine.llama, row.candidate)
        by_memory = row.mem is None and refusal is None
        if by_memory:
            by_memory = not _memory_sufficed(machine, row, ran.get(_alike(row), ()))
        seconds = machine.time(row.candidate, choice)
        first = memory.stages[0].allocated / GIB
        outcomes.append(
            Outcome(row, refusal, machine.fits(row.candidate), by_memory, seconds.tokens_per_s_and_rank, first)
        )
    return outcomes


def _told(machine: Nanotron, row: Row) -> Choice:
    def miss(choice: Choice) -> float:
        return abs(log(machine.time(row.candidate, choice).tokens_per_s_and_rank / (row.tps or 1.0)))

    return min(machine.campaigns(row.candidate), key=miss)


def _alike(row: Row) -> tuple[str, int, int]:
    return row.size, row.candidate.tp, row.candidate.pp


def _memory_sufficed(machine: Nanotron, row: Row, ran: Sequence[Row]) -> bool:
    """Whether a run that needed as much or more, but for states, shows that this one had memory enough."""
    needed, wanted = _state_bytes(machine, row.candidate), row.candidate
    for other in ran:
        each = other.candidate
        under_way = min(each.accumulation, each.pp) >= min(wanted.accumulation, wanted.pp)
        if other.mem is not None and each.sequences >= wanted.sequences and under_way:
            more = max(0.0, needed - _state_bytes(machine, each))
            if other.mem * GIB + more <= machine.limit():
                return True
    return False


def _state_bytes(machine: Nanotron, candidate: Candidate) -> float:
    """Bytes of parameters, gradients and optimizer on the rank that has most of them."""
    llama, pp = machine.llama, candidate.pp
    numel = max(llama.numel(each, pp) for each in split_blocks(llama, pp)) / candidate.tp
    return numel * (8 + 12 / (candidate.dp if candidate.zero else 1))


# --- what the issue asks for


def summarize(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """The eight numbers. Errors are |forecast / measured - 1|. A number is None where the file has nothing to take it of."""
    ran = [each for each in outcomes if each.ran]
    memory, throughput = _memory_errors(ran), _throughput_errors(ran)
    failed = [each for each in outcomes if each.by_memory]
    called = [each for each in outcomes if each.refusal is None and each.fits]
    groups = [
        list(group) for _, group in groupby(sorted(ran, key=lambda each: each.row.group), lambda each: each.row.group)
    ]
    pairs = [sign for group in groups for sign in _compare_pairs(group)]
    return {
        "memory_median": _quantile(memory, 0.5),
        "memory_p90": _quantile(memory, 0.9),
        "throughput_median": _quantile(throughput, 0.5),
        "throughput_p90": _quantile(throughput, 0.9),
        "failures_right": _share([not each.fits for each in failed]),
        "false_fits": _share([each.by_memory for each in called]),
        "tau": sum(pairs) / len(pairs) if pairs else None,
        "regret_median": _quantile([_regret(group) for group in groups], 0.5),
    }


def _memory_errors(ran: Sequence[Outcome]) -> list[float]:
    return [abs(each.mem / each.row.mem - 1) for each in ran if each.row.mem]


def _throughput_errors(ran: Sequence[Outcome]) -> list[float]:
    return [abs(each.tps / each.row.tps - 1) for each in ran if each.row.tps]


def _compare_pairs(group: Sequence[Outcome]) -> Iterator[int]:
    """For each pair of runs: 1 where the forecasts are in the order of what was measured, -1 where not, 0 at a tie of forecasts.
    Runs that were equally fast are no pair."""
    for left, right in combinations(group, 2):
        measured = (left.row.tps or 0.0) - (right.row.tps or 0.0)
        if measured:
            product = measured * (left.tps - right.tps)
            yield (product > 0) - (product < 0)


def _regret(group: Sequence[Outcome]) -> float:
    """Share by which the layout that the forecasts would choose was slower than the fastest."""
    allowed = [each for each in group if each.fits] or list(group)
    chosen = max(allowed, key=lambda each: each.tps)
    return 1 - (chosen.row.tps or 0.0) / max(each.row.tps or 0.0 for each in group)


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Between two values by a straight line; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _share(answers: Sequence[bool]) -> float | None:
    return statistics.fmean(answers) if answers else None


# --- fit

# What bounds a row's part of the loss: rows of the other campaign than the one foretold must not drag parameters.
MEMORY_CLIP, TIME_CLIP = 0.3, 0.6
TAIL_WEIGHT = 1.0
# Found from the file's failures and from who repeated what; a search by errors would not see them.
NOT_SEARCHED = {"reserve_gib", "repeated"}
# Where the search begins: round numbers of the right order.
START = replace(
    Fitted(),
    host_layer_s=4e-3,
    passes=2.5,
    ring_step_s=0.05e-3,
    slow_step_s=0.2e-3,
    ahead=30.0,
    bucket_s=0.5e-3,
    far_s=0.5,
)


def fit(rows: Sequence[Row], start: Fitted, rounds: int) -> Fitted:
    """A search along one parameter after another, by logarithmic errors of memory and throughput: their means, clipped,
    and their 90th percentiles. Which campaign made a run is foretold anew for each round."""
    ran = [row for row in rows if row.tps is not None]
    steps = {each.name: 0.2 for each in fields(Fitted) if each.name not in NOT_SEARCHED}
    best = start
    for _ in range(rounds):
        choices = [_machine(row, best).choose(row.candidate) for row in ran]
        least = _loss(ran, choices, best)
        for name in steps:
            for sign in (1, -1):
                tried = replace(best, **{name: getattr(best, name) * (1 + sign * steps[name])})
                loss = _loss(ran, choices, tried)
                if loss < least - 1e-9:
                    best, least = tried, loss
                    break
            else:
                steps[name] /= 2
    return best


def _machine(row: Row, fitted: Fitted) -> Nanotron:
    return Nanotron(read_llama(row.model), read_cluster(), fitted)


def _loss(ran: Sequence[Row], choices: Sequence[Choice], fitted: Fitted) -> float:
    machines = {size: Nanotron(read_llama(size), read_cluster(), fitted) for size in SIZES}
    memory, time = [], []
    for row, choice in zip(ran, choices, strict=True):
        machine = machines[row.model]
        mem = machine.first_stage(row.candidate, choice).allocated / GIB
        tps = machine.time(row.candidate, choice).tokens_per_s_and_rank
        memory.append(abs(log(mem / (row.mem or mem))))
        time.append(abs(log(tps / (row.tps or tps))))
    tails = (_quantile(memory, 0.9) or 0.0) + (_quantile(time, 0.9) or 0.0)
    clipped = [min(MEMORY_CLIP, each) for each in memory] + [min(TIME_CLIP, each) for each in time]
    return 2 * statistics.fmean(clipped) + TAIL_WEIGHT * tails


# --- what is printed


def render_table(outcomes: Sequence[Outcome]) -> str:
    """The numbers for each number of nodes, for both halves and for all runs."""
    columns = list(summarize(outcomes))
    lines = [f"{'nodes':<10}{'runs':>6}{'failed':>8}" + "".join(f"{name:>19}" for name in columns)]
    counts = sorted({each.row.nodes for each in outcomes})
    parts: list[tuple[str, list[Outcome]]] = [
        (str(nodes), [each for each in outcomes if each.row.nodes == nodes]) for nodes in counts
    ]
    halves = [(half, [each for each in outcomes if each.row.half == half]) for half in HALVES]
    for name, part in [*parts, *halves, ("all", list(outcomes))]:
        lines.append(
            f"{name:<10}{sum(each.ran for each in part):>6}{sum(not each.ran for each in part):>8}"
            + render_numbers(part)
        )
    failed = [each for each in outcomes if not each.ran]
    refused = sum(each.refusal is not None for each in failed)
    memory = sum(each.by_memory for each in failed)
    lost = sum(each.ran and not (each.fits and each.refusal is None) for each in outcomes)
    lines += [
        "",
        f"failed runs: {len(failed)}: {refused} that nanotron cannot run, {memory} by memory, {len(failed) - refused - memory} "
        "for other reasons (the file shows that memory was enough)",
        f"runs that ran, though they are foretold to fail: {lost}",
    ]
    return "\n".join(lines)


def render_noise(outcomes: Sequence[Outcome]) -> str:
    """Agreement of runs that differ in nothing but ZeRO: their throughputs, and the order of two layouts of a group by the runs
    of one stage as a forecast of the other's, with the forecasts' own order of the same pairs."""
    found: dict[tuple[tuple[str, int], Candidate], dict[int, Outcome]] = {}
    for each in outcomes:
        if each.ran:
            layout = replace(each.row.candidate, zero=0, shard=1)
            found.setdefault((each.row.group, layout), {})[each.row.candidate.zero] = each
    twins = [(group, (runs[0], runs[1])) for (group, _), runs in found.items() if len(runs) == 2]
    apart = [abs(log((one.row.tps or 1.0) / (other.row.tps or 1.0))) for _, (one, other) in twins]
    pairs = [(left, right) for (group, left), (other, right) in combinations(twins, 2) if group == other]
    if not pairs:
        return "no two layouts of a group ran with ZeRO 0 and 1"
    by_twin = [
        sign
        for pair in pairs
        for sign in _compare_pairs([replace(one, tps=other.row.tps or 0.0) for one, other in pair])
    ]
    own = [sign for pair in pairs for stage in zip(*pair, strict=True) for sign in _compare_pairs(stage)]
    median, tail = (exp(_quantile(apart, share) or 0.0) for share in (0.5, 0.9))
    return (
        f"{len(twins)} pairs of runs differ in nothing but ZeRO: throughputs apart by {median:.2f} in the median, {tail:.2f} at "
        f"the 90th percentile\ntau of {len(pairs)} pairs of their layouts: {statistics.fmean(by_twin):.3f} of one stage's order "
        f"with the other's, {statistics.fmean(own):.3f} of forecasts"
    )


def render_numbers(outcomes: Sequence[Outcome]) -> str:
    """One line of the table."""
    return "".join(f"{'-' if value is None else f'{value:.3f}':>19}" for value in summarize(outcomes).values())


def render_parameters(fitted: Fitted) -> str:
    """Each fitted parameter with its unit and what it is."""
    return "\n".join(
        f"  {name:<14}{getattr(fitted, name):>12.4g} {unit:<8}{meaning}" for name, (unit, meaning) in UNITS.items()
    )


def render_worst(outcomes: Sequence[Outcome], count: int) -> str:
    """The runs whose throughput is foretold worst."""
    ran = [each for each in outcomes if each.row.tps]
    worst = sorted(ran, key=lambda each: -abs(log(each.tps / (each.row.tps or 1.0))))[:count]
    lines = [f"{'line':>6} {'run':<38}{'tok/s':>9}{'foretold':>10}{'GiB':>7}{'foretold':>10}"]
    for each in worst:
        at = each.row.candidate
        name = f"{each.row.size} dp{at.dp} tp{at.tp} pp{at.pp} mbs{at.sequences} ga{at.accumulation} zero{at.zero}"
        lines.append(
            f"{each.row.line:>6} {name:<38}{each.row.tps:>9.0f}{each.tps:>10.0f}{each.row.mem:>7.1f}{each.mem:>10.1f}"
        )
    return "\n".join(lines)


def report_fit(rows: Sequence[Row], rounds: int, say: Callable[[str], None]) -> None:
    """Fit to one half of the rows, and report on both."""
    best = fit([row for row in rows if row.half == HALVES[0]], START, rounds)
    say(render_parameters(best))
    say(render_table(foretell(rows, best)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="one object of eight numbers")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="also list the N worst forecasts")
    parser.add_argument("--told", action="store_true", help="as if the campaign of each run were known")
    parser.add_argument("--fit", action="store_true", help="fit the parameters anew to one half: minutes")
    parser.add_argument("--rounds", type=int, default=8, help="of the search of --fit")
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.csv)
    except TableError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.fit:
        report_fit(rows, options.rounds, lambda text: print(text, flush=True))
        return 0
    outcomes = foretell(rows, Fitted(), options.told)
    if options.json:
        print(json.dumps(summarize(outcomes)))
        return 0
    print(render_table(outcomes))
    print(render_noise(outcomes))
    print(f"\nfitted parameters ({len(UNITS)}):")
    print(render_parameters(Fitted()))
    if options.worst:
        print("\n" + render_worst(outcomes, options.worst))
    return 0


if __name__ == "__main__":
    sys.exit(main())
