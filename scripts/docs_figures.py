"""Writes docs/figures/data.js, the numbers of the site's figures: each is what the code that plans and trains says.

    python scripts/docs_figures.py               # write it anew; tests/unit/test_docs_figures.py says when it is stale
    python scripts/docs_figures.py --pictures    # and docs/figures/*.png from the built site, which GitHub shows (needs Chromium)

A figure's numbers are what its script, docs/figures/NAME.js, draws; scripts compute nothing but places and colours.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from framework.errors import ScheduleError  # noqa: E402
from framework.mesh.layout import part  # noqa: E402
from framework.mesh.token_layout import ContextSlices  # noqa: E402
from framework.mesh.topology import Topology  # noqa: E402
from framework.model.load import load_config  # noqa: E402
from framework.parallel.pipeline.draw import COLORS  # noqa: E402
from framework.parallel.pipeline.schedules import SCHEDULES, make_schedule  # noqa: E402
from framework.parallel.pipeline.simulate import peak_live, simulate, unit_costs  # noqa: E402
from framework.plan.candidate import OFFLOADED  # noqa: E402
from framework.plan.cluster import ClusterRates, place_group  # noqa: E402
from framework.plan.forecast_memory import MemoryForecast  # noqa: E402
from framework.plan.page_charts import KINDS  # noqa: E402
from framework.plan.plan import Plan, make_plan  # noqa: E402
from framework.plan.time import TimeModel  # noqa: E402
from framework.recipe.compose import compose  # noqa: E402

FIGURES = REPOSITORY / "docs" / "figures"
DATA = FIGURES / "data.js"
HEAD = "// Written by scripts/docs_figures.py from the code's own numbers.\n"
MIB = 1 << 20
CONTEXT = 4096
MODELS = {"llama3_2_1b": "Llama 3.2 1B", "llama3_1_8b": "Llama 3.1 8B", "llama3_1_70b": "Llama 3.1 70B"}
CLUSTERS = {"h100_ib": "H100, InfiniBand", "h100_efa": "H100, EFA"}


@cache
def plan_of(model: str, *overrides: str, cluster: str = "h100_ib") -> Plan:
    """The plan of a shipped model in bf16 on GPUs, one sequence on each."""
    words = [f"model={model}", f"cluster={cluster}", "launch.device=cuda", f"batch.context={CONTEXT}"]
    recipe = compose([*words, "batch.sequences_per_microbatch=1", "batch.sequences_per_step=8", *overrides]).require()
    return make_plan(recipe, load_config(recipe.model))


@cache
def times_of(plan: Plan) -> TimeModel:
    return TimeModel(plan.shape, plan.recipe, ClusterRates.from_recipe(plan.recipe))


def sharded(plan: Plan, zero: int, ranks: int, **values: Any) -> Any:
    """The candidate in which dp has all ranks."""
    return replace(plan.candidate, dp=ranks, zero=zero, shard=ranks if zero else 1, **{"accumulation": 1, **values})


def kinds_in_mib(memory: MemoryForecast) -> list[int]:
    """MiB of the fullest rank by kind, in the order of KINDS."""
    found = memory.fullest.kinds
    return [round(found.get(kind, 0) / MIB) for kind in KINDS]


def zero() -> dict[str, Any]:
    """Memory of a GPU by ZeRO's stage and degree."""
    degrees, policies = [2**power for power in range(11)], ["none", "selective", "full"]
    models = {}
    for name, words in MODELS.items():
        plan = plan_of(name, "launch.ranks=8")
        rates = times_of(plan).cluster
        rows = {
            policy: [
                [
                    [*kinds_in_mib(plan.memory_model.forecast(each, rates, None)), _milliseconds(plan, each)]
                    for each in (sharded(plan, stage, ranks, checkpointing=policy) for stage in range(4))
                ]
                for ranks in degrees
            ]
            for policy in policies
        }
        limit = plan.memory_model.forecast(plan.candidate, rates, None).limit
        models[words] = {"limit": round(limit / MIB), "rows": rows}
    return {"kinds": KINDS, "degrees": degrees, "policies": policies, "models": models}


def _milliseconds(plan: Plan, candidate: Any) -> float:
    return round(times_of(plan).forecast(candidate).step_s * 1e3, 1)


def ring() -> dict[str, Any]:
    """A ring's all-reduce, step by step: who has summed whose parts of each chunk, and who sends which chunk to its neighbour."""
    plan = plan_of("llama3_1_8b", "launch.ranks=8")
    gradient = 4 * plan.size.total
    cluster, found = times_of(plan).cluster, {}
    for ranks in range(2, 9):
        holds = [[1 << rank] * ranks for rank in range(ranks)]
        steps = [{"holds": _copied(holds), "sends": []}]
        for step in range(2 * (ranks - 1)):
            is_sum = step < ranks - 1
            # Reduce-scatter: each passes on the chunk that it has summed last. All-gather: the whole chunk that has come last.
            sends = [
                (rank, (rank - step if is_sum else rank + 1 - (step - ranks + 1)) % ranks) for rank in range(ranks)
            ]
            sent = {(rank, chunk): holds[rank][chunk] for rank, chunk in sends}
            for (rank, chunk), parts in sent.items():
                to = (rank + 1) % ranks
                holds[to][chunk] = holds[to][chunk] | parts if is_sum else parts
            steps[-1]["sends"] = [list(each) for each in sends]
            steps.append({"holds": _copied(holds), "sends": []})
        assert all(parts == (1 << ranks) - 1 for own in holds for parts in own), (
            "a ring leaves every rank the whole sum"
        )
        seconds = cluster.collective("all_reduce", gradient, place_group(ranks, 1, 8, ranks))
        found[ranks] = {"steps": steps, "milliseconds": round(seconds * 1e3, 1)}
    return {"gradient": gradient, "ranks": found}


def _copied(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(each) for each in rows]


def tensor() -> dict[str, Any]:
    """The rows and columns of a layer's weights on each tensor-parallel rank."""
    wanted = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
    degrees: dict[int, Any] = {}
    for degree in (1, 2, 4, 8):
        words = (f"parallel.tp={degree}", "launch.ranks=8", "zero.stage=3")
        plan = plan_of("llama3_1_8b", *words)
        # All layers are alike: laying out one shows them.
        small = plan_of("llama3_1_8b", *words, "model.config.num_hidden_layers=1")
        layouts = [small.of_rank(rank).layouts for rank in range(degree)]
        weights = {
            region: {
                name: {
                    "shape": layouts[0][f"model.layers.0.{block}.{name}.weight"].shape,
                    "ranks": [own[f"model.layers.0.{block}.{name}.weight"].runs for own in layouts],
                }
                for name in names
            }
            for (region, names), block in zip(wanted.items(), ("self_attn", "mlp"), strict=True)
        }
        time = times_of(plan).forecast(plan.candidate)
        degrees[degree] = {
            "weights": weights,
            "sent_mib": round(plan.tensor_bytes[0] / MIB),
            "step_ms": round(time.step_s * 1e3, 1),
            "tp_ms": round(time.parts["tp"] * 1e3, 1),
        }
    return {"tokens": CONTEXT, "degrees": degrees}


def pipeline() -> dict[str, Any]:
    """Schedules: for each rank its actions in order, `F03` a forward of stage 0 for microbatch 3, a number an idle time."""
    found: dict[str, Any] = {}
    for name, spec in SCHEDULES.items():
        virtual = spec.virtual_stages or 2
        for ranks in (2, 4, 8):
            for microbatches in (ranks, 2 * ranks, 3 * ranks):
                try:
                    schedule = make_schedule(name, ranks, microbatches, virtual)
                except ScheduleError as error:
                    found.setdefault(name, {})[f"{ranks} {microbatches}"] = {"refused": str(error)}
                    continue
                timeline = simulate(schedule, unit_costs(schedule.num_stages))
                found.setdefault(name, {})[f"{ranks} {microbatches}"] = {
                    "length": timeline.length,
                    "bubble": round(timeline.bubble, 4),
                    "live": [each / virtual for each in peak_live(schedule)],
                    "virtual": virtual,
                    "ranks": [" ".join(_write_actions(rank)) for rank in timeline.ranks],
                }
    return {"colors": {kind.value: color for kind, color in COLORS.items()}, "schedules": found}


def _write_actions(rank: Sequence[Any]) -> Iterator[str]:
    clock = 0.0
    for each in rank:
        if each.start > clock:
            yield f"{each.start - clock:g}"
        yield f"{each.action.kind.value}{each.action.stage}.{each.action.microbatch}"
        clock = each.end


MESHES = {
    "dp 8: one node": Topology(dp=8, shard=8, ranks_per_node=8),
    "dp 16, shards in a node (HSDP)": Topology(dp=16, shard=8, ranks_per_node=8),
    "dp 4, tp 8": Topology(dp=4, tp=8, shard=4, ranks_per_node=8),
    "pp 2, dp 2, cp 2, tp 4": Topology(pp=2, dp=2, cp=2, tp=4, shard=4, ranks_per_node=8),
    "pp 4, dp 2, tp 8": Topology(pp=4, dp=2, tp=8, shard=2, ranks_per_node=8),
    "pp 2, dp 4, tp 4, ep 8": Topology(pp=2, dp=4, tp=4, ep=8, expert_tp=1, shard=4, ranks_per_node=8),
}
DEGREES = ("pp", "dp", "cp", "tp")
SHOWN_AXES = (*DEGREES, "shard", "replica", "ep", "expert_batch")


def mesh() -> dict[str, Any]:
    """Coordinates of every rank, and the group it is in along each axis, by the group's first rank."""
    found = {}
    for name, topology in MESHES.items():
        ranks = range(topology.world)
        found[name] = {
            "nodes": topology.world // 8,
            "coordinates": {axis: [topology.index(axis, rank) for rank in ranks] for axis in DEGREES},
            "sizes": {axis: topology.size(axis) for axis in DEGREES},
            "groups": {
                axis: [topology.ranks(axis, rank)[0] for rank in ranks]
                for axis in SHOWN_AXES
                if topology.size(axis) > 1
            },
        }
    return found


def experts() -> dict[str, Any]:
    """The experts that each rank's router chooses, how many rows go to each, and the rank that has it."""
    experts, chosen, tokens = 8, 2, 6
    found: dict[str, Any] = {}
    for words, bias in (("even", 0.0), ("some experts are popular", 2.2)):
        generator = torch.Generator().manual_seed(7)
        for degree in (2, 4, 8):
            ranks = []
            for _ in range(degree):
                scores = torch.randn(tokens, experts, generator=generator)
                scores[:, :2] += bias
                index = scores.topk(chosen).indices
                counts = index.flatten().bincount(minlength=experts)
                ranks.append({"chosen": index.tolist(), "rows": counts.tolist()})
            owners = [
                next(rank for rank in range(degree) if expert in range(*part(experts, rank, degree)))
                for expert in range(experts)
            ]
            found.setdefault(words, {})[degree] = {"ranks": ranks, "owners": owners}
    return {"experts": experts, "routers": found}


def context() -> dict[str, Any]:
    """Tokens of each rank, and the pairs of query and key that it computes in each step of the ring."""
    tokens, found = 64, {}
    for degree in (2, 4, 8):
        cuts = {
            "zig-zag": [ContextSlices(tokens, ring=degree, rank=rank).intervals for rank in range(degree)],
            # A contiguous part each, as Ulysses cuts: a ring over it is what zig-zag is there to avoid.
            "in order": [ContextSlices(tokens, ulysses=degree, rank=rank).intervals for rank in range(degree)],
        }
        found[degree] = {
            name: {
                "intervals": ranks,
                "pairs": [
                    [_count_pairs(ranks[rank], ranks[(rank - step) % degree]) for rank in range(degree)]
                    for step in range(degree)
                ],
            }
            for name, ranks in cuts.items()
        }
    return {"tokens": tokens, "degrees": found}


def _count_pairs(queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]]) -> int:
    """Pairs in which a causal query sees the key."""
    return sum(
        max(0, min(stop, row + 1) - start)
        for first, last in queries
        for row in range(first, last)
        for start, stop in keys
    )


OFFLOADS = {
    "nothing": (),
    "optimizer": ("memory.offload.optimizer=1",),
    "optimizer, to a disk": (
        "memory.offload.optimizer=1", "memory.offload.home=disk", "memory.offload.disk_path=/scratch"
    ),
    "optimizer and parameters": ("memory.offload.optimizer=1", "memory.offload.parameters=1"),
    "activations": ("memory.offload.activations=1",),
    "all three": tuple(f"memory.offload.{name}=1" for name in OFFLOADED),
}  # fmt: skip


def offload() -> dict[str, Any]:
    """Bytes of a rank on device, host and disk, and the time of a step, by what is offloaded."""
    rows: dict[str, Any] = {}
    for words, keys in OFFLOADS.items():
        plan = plan_of("llama3_1_8b", "launch.ranks=8", "zero.stage=3", *keys)
        memory = plan.memory_model.forecast(plan.candidate, times_of(plan).cluster, None)
        time = times_of(plan).forecast(plan.candidate)
        rows[words] = {
            "keys": keys,
            "device": kinds_in_mib(memory),
            "host": {kind: round(size / MIB) for kind, size in memory.fullest.on_host.items() if size},
            "disk": round(memory.fullest.disk / MIB),
            "step_ms": round(time.step_s * 1e3, 1),
            "offload_ms": round(time.parts["offload"] * 1e3, 1),
        }
    return {"kinds": KINDS, "limit": round(memory.limit / MIB), "rows": rows}


def scaling() -> dict[str, Any]:
    """Tokens per second of a GPU by the number of GPUs, all of them dp: with one microbatch each, and with one batch for all."""
    degrees, batch = [2**power for power in range(11)], 1024
    series: dict[str, Any] = {}
    for cluster, cluster_words in CLUSTERS.items():
        for model in ("llama3_2_1b", "llama3_1_8b"):
            plan = plan_of(model, "launch.ranks=8", cluster=cluster)
            for mode in ("the batch grows", "one batch"):
                for stage in range(4):
                    row = []
                    for ranks in degrees:
                        each = sharded(
                            plan, stage, ranks, accumulation=1 if mode == "the batch grows" else batch // ranks
                        )
                        time = times_of(plan).forecast(each)
                        memory = plan.memory_model.forecast(each, times_of(plan).cluster, None)
                        exposed = time.parts["gathers"] + time.parts["reductions"]
                        row.append([
                            round(time.tokens_per_s_and_rank), round(time.mfu, 4), round(time.step_s, 4),
                            round((exposed + time.parts["contention"]) / time.step_s, 4), round(memory.fullest.reserved / MIB),
                        ])  # fmt: skip
                    series[f"{cluster_words}|{MODELS[model]}|{mode}|{stage}"] = row
            limit = memory.limit
    return {"degrees": degrees, "batch": batch, "limit": round(limit / MIB), "series": series}


FIGURE_DATA = (zero, ring, tensor, pipeline, mesh, experts, context, offload, scaling)


def write_data() -> str:
    """The text of data.js."""
    made = ",\n".join(f"{json.dumps(each.__name__)}: {_write(each())}" for each in FIGURE_DATA)
    return f"{HEAD}figures.setData({{\n{made}\n}});\n"


def _write(value: Any, depth: int = 2) -> str:
    """JSON with a line for each entry down to a depth, so that a changed number is a changed line."""
    if depth and isinstance(value, dict):
        inner = ",\n".join(f"{json.dumps(str(key))}: {_write(each, depth - 1)}" for key, each in value.items())
        return f"{{\n{inner}\n}}"
    return json.dumps(value, separators=(",", ":"))


def write_pictures() -> None:
    """Write each figure as it begins, in the light colours, as a picture for pages without scripts."""
    from tests.browser.chromium import Chromium, Tab, find_chromium

    program = find_chromium()
    if program is None:
        raise SystemExit("no Chromium: scripts/install_browser.sh")
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        subprocess.run([sys.executable, "-m", "mkdocs", "build", "--site-dir", site], cwd=REPOSITORY, check=True)
        browser = Chromium(program, Path(folder, "profile"))
        done: set[str] = set()
        for page in sorted(set(site.glob("*.html")) - {site / "404.html"}):
            tab = Tab(browser, page)
            for name in tab.ask("[...document.querySelectorAll('figure.live')].map((each) => each.dataset.figure)"):
                if name not in done:
                    done.add(name)
                    tab.picture(FIGURES / f"{name}.png", f"figure[data-figure={name}]")
            tab.close()
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pictures", action="store_true")
    arguments = parser.parse_args()
    DATA.write_text(write_data(), encoding="utf-8")
    if arguments.pictures:
        write_pictures()
