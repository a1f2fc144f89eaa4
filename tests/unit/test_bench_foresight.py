"""Forecasts held against published runs: what is read, what is compared, and nanotron's closed forms."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from math import inf
from pathlib import Path

import pytest

from framework.plan.candidate import Candidate
from scripts.bench.foresight import (
    Row,
    TableError,
    fit,
    foretell,
    main,
    read_cluster,
    read_llama,
    read_rows,
    render_noise,
    summarize,
)
from scripts.bench.nanotron import GIB, UNITS, Choice, Fitted, Nanotron, find_refusal, split_blocks

HEADER = "size,nodes,dp,tp,pp,mbs,ga,gbs,zero,mfu,tps,mem"
# As published: runs and one that failed.
PUBLISHED = (
    "1B,1,8,1,1,1,32,256,0,38.3,39273.0,36.7",
    "1B,1,8,1,1,1,32,256,1,38.1,39006.0,24.2",
    "1B,1,2,2,2,4,32,256,1,40.0,35063.0,27.7",
    "1B,1,2,2,2,64,2,256,1,,,",
    "8B,2,1,1,16,1,256,256,0,32.7,5426.0,60.4",
)
KEYS = {
    "memory_median",
    "memory_p90",
    "throughput_median",
    "throughput_p90",
    "failures_right",
    "false_fits",
    "tau",
    "regret_median",
}


def _write(folder: Path, lines: Sequence[str], header: str = HEADER) -> Path:
    path = folder / "runs.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def _machine(size: str = "1B", **changes: float) -> Nanotron:
    return Nanotron(read_llama(size), read_cluster(), replace(Fitted(), **changes))


def test_published_runs_are_foretold(tmp_path, capsys):
    assert main(["--csv", str(_write(tmp_path, PUBLISHED)), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers.keys() == KEYS
    assert numbers["memory_p90"] < 0.15
    assert numbers["throughput_p90"] < 0.35
    assert numbers["failures_right"] == 1
    assert numbers["false_fits"] == 0
    # Two pairs of three are in order on one node, and the fastest is chosen among the two that ZeRO makes almost equal.
    assert numbers["regret_median"] < 0.12


def test_the_table_lists_the_parameters(tmp_path, capsys):
    assert main(["--csv", str(_write(tmp_path, PUBLISHED)), "--worst", "2"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in UNITS)
    assert len(UNITS) <= 12
    assert {field.name for field in fields(Fitted)} == set(UNITS)
    assert "1 by memory" in shown
    assert "foretold" in shown


def test_right_forecasts_have_no_error(tmp_path):
    rows = read_rows(_write(tmp_path, PUBLISHED))
    exact = [
        replace(each.row, tps=each.tps, mem=each.mem) if each.ran else each.row for each in foretell(rows, Fitted())
    ]
    numbers = summarize(foretell(exact, Fitted()))
    assert numbers["memory_p90"] == numbers["throughput_p90"] == numbers["regret_median"] == 0
    assert numbers["tau"] == 1


def test_reversed_forecasts_are_seen(tmp_path):
    rows = read_rows(_write(tmp_path, PUBLISHED[:3]))
    reversed_rows = [replace(each.row, tps=1e6 / each.tps) for each in foretell(rows, Fitted())]
    numbers = summarize(foretell(reversed_rows, Fitted()))
    assert numbers["tau"] == -1
    assert numbers["regret_median"]
    assert numbers["regret_median"] > 0


def test_a_file_without_runs_or_failures_has_gaps(tmp_path):
    numbers = summarize(foretell(read_rows(_write(tmp_path, PUBLISHED[3:4])), Fitted()))
    assert numbers["memory_median"] is None
    assert numbers["tau"] is None
    assert numbers["failures_right"] == 1
    numbers = summarize(foretell(read_rows(_write(tmp_path, PUBLISHED[:1])), Fitted()))
    assert numbers["failures_right"] is None
    assert numbers["false_fits"] == 0


def test_a_failure_that_memory_does_not_explain_is_no_failure_by_memory(tmp_path):
    failed = "1B,1,8,1,1,1,32,256,1,,,"
    alone, shown = (
        foretell(read_rows(_write(tmp_path, lines)), Fitted())[-1] for lines in ([failed], [PUBLISHED[0], failed])
    )
    # With ZeRO 0 the same layout ran, and needs more.
    assert alone.by_memory
    assert not shown.by_memory


def test_fit_finds_what_made_the_runs(tmp_path):
    rows = read_rows(_write(tmp_path, (*PUBLISHED, "8B,4,2,8,2,2,64,256,1,8.2,1359.0,15.2")))
    truth = replace(Fitted(), host_layer_s=Fitted().host_layer_s, passes=Fitted().passes * 1.3)
    made = [replace(each.row, tps=each.tps, mem=each.mem) for each in foretell(rows, truth) if each.ran]
    found = fit(made, Fitted(), rounds=4)
    assert found.passes == pytest.approx(truth.passes, rel=0.1)


@pytest.mark.parametrize(
    ("lines", "header", "said"),
    [
        (PUBLISHED, "size,nodes,dp,tp,pp,mbs,ga,gbs,zero,mfu,tps", "no column mem"),
        (["2B,1,8,1,1,1,32,256,0,38.3,39273.0,36.7"], HEADER, ":2: size='2B' is unknown; known are 1B, 3B, 8B, 80B"),
        (["1B,1,8,1,one,1,32,256,0,38.3,39273.0,36.7"], HEADER, ":2: pp='one' is not a number"),
        (["1B,1,8,1,1,0,32,256,0,38.3,39273.0,36.7"], HEADER, "mbs='0' must be a whole number above 0"),
        (["1B,1,8,1,1,1.5,32,256,0,38.3,39273.0,36.7"], HEADER, "mbs='1.5' must be a whole number"),
        (["1B,1,8,1,1,1"], HEADER, "ga=None must be a whole number above 0"),
        (["1B,1,8,1,1,1,32,256,3,38.3,39273.0,36.7"], HEADER, "zero=3 is not known of nanotron"),
        (["1B,2,8,1,1,1,32,256,0,38.3,39273.0,36.7"], HEADER, "8 ranks are not 2 nodes of eight"),
        (["1B,1,8,1,1,1,32,256,0,38.3,39273.0,"], HEADER, "tps and mem must both be given"),
        (["1B,1,8,1,1,1,32,256,0,38.3,-1,36.7"], HEADER, "must be above 0"),
        (["1B,1,8,1,1,1,32,256,0,38.3,nan,36.7"], HEADER, "tps='nan' is not a number"),
        ([], HEADER, "has no rows"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path, capsys, lines, header, said):
    path = _write(tmp_path, lines, header)
    with pytest.raises(TableError, match=r"runs\.csv"):
        read_rows(path)
    assert main(["--csv", str(path)]) == TableError.exit_code
    assert said in capsys.readouterr().err


def test_a_missing_file_and_a_binary_one_are_refused(tmp_path):
    with pytest.raises(TableError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(TableError, match="cannot be read"):
        read_rows(tmp_path / "binary.csv")


# --- nanotron


def test_states_are_20_bytes_a_parameter_and_zero_1_shards_12():
    machine = _machine()
    for zero, bytes_each in ((0, 20), (1, 8 + 12 / 8)):
        held = machine.memory(Candidate(dp=8, zero=zero), Choice(False, inf)).stages[0].held
        states = sum(held[kind] for kind in ("parameters", "gradients", "master", "optimizer"))
        # Norms beside the layers' are not counted.
        assert states == pytest.approx(bytes_each * machine.llama.parameters, rel=1e-4)


@pytest.mark.parametrize("size", ["1B", "3B", "8B", "80B"])
def test_stages_have_every_layer_once(size):
    llama = read_llama(size)
    for pp in (1, 2, 4, 8, 16, 32, 64, 128):
        stages = split_blocks(llama, pp)
        assert len(stages) == pp
        assert sum(each.layers for each in stages) == llama.layers
        others = [name for each in stages for name in each.others]
        assert others == ["embedding", "norm", "head", "cast", "loss"]


def test_what_nanotron_cannot_run_is_said():
    llama = read_llama("1B")
    assert find_refusal(llama, Candidate(dp=8)) is None
    assert "without any block" in str(find_refusal(llama, Candidate(pp=16, accumulation=256)))
    assert "pp - 1 = 7" in str(find_refusal(llama, Candidate(pp=8, accumulation=4)))
    assert "does not divide 32 heads" in str(find_refusal(llama, Candidate(tp=64)))
    large = read_llama("8B")
    assert find_refusal(large, Candidate(pp=32, zero=1, dp=2, accumulation=64)) is None
    assert "DDP refuses" in str(find_refusal(large, Candidate(pp=32, zero=0, dp=2, accumulation=64)))


def test_1f1b_holds_as_many_microbatches_as_stages_follow():
    forecast = _machine("8B").memory(Candidate(pp=4, dp=2, accumulation=64), Choice(False, 0))
    held = [each.held["activations"] for each in forecast.stages]
    layers = [each.layers for each in split_blocks(read_llama("8B"), 4)]
    per_layer = {
        round(size / (4 - place) / count) for place, (size, count) in enumerate(zip(held, layers, strict=True))
    }
    assert max(per_layer) - min(per_layer) <= 1
    assert held[0] > held[-1]


def test_the_last_stage_holds_the_logits_twice_and_thrice_where_the_host_is_ahead():
    fast = _machine("8B")
    slow = replace(fast, fitted=replace(fast.fitted, host_layer_s=1.0))
    for machine, accumulation, forwards, expected in (
        (fast, 1, 1, 8),
        (fast, 2, 0, 8),
        (fast, 2, inf, 12),
        (slow, 2, inf, 8),
    ):
        memory = machine.memory(Candidate(accumulation=accumulation), Choice(False, forwards))
        assert memory.stages[0].held["logits"] == 4096 * 131072 * expected


def test_a_layout_beyond_the_limit_does_not_fit():
    machine = _machine("8B")
    small, large = Candidate(dp=1, tp=8), Candidate(dp=1, tp=8, sequences=64)
    assert machine.memory(small, machine.choose(small)).spare > 0
    forecast = machine.memory(large, machine.choose(large))
    assert forecast.spare < 0
    assert forecast.limit < 79.1 * GIB


def test_parts_of_a_step_answer_to_their_parameter():
    candidate = Candidate(dp=2, tp=4, pp=4, zero=1, accumulation=32)
    slow, fast = Choice(True, 0), Choice(False, inf)
    machine = _machine()
    assert machine.time(candidate, slow).parts["pp"] > 50 * machine.time(candidate, fast).parts["pp"]
    # Two neighbours of a stage, 31 further microbatches, then three stages once: three tensors of two announcements of 0.1 s.
    assert machine.time(candidate, slow).parts["pp"] == pytest.approx((2 * 31 + 3) * 3 * 2 * 0.1)
    few, many = (machine.time(replace(candidate, accumulation=count), fast).step_s for count in (8, 64))
    assert many > 5 * few
    forecast = machine.time(candidate, fast)
    assert forecast.step_s == pytest.approx(sum(forecast.parts.values()))
    assert 0 < forecast.mfu < 1


def test_collectives_beside_matmuls_cost_what_is_longer():
    alone, machine = Candidate(sequences=4), _machine("8B")
    assert machine.exposed_seconds(alone, 0.0) == 0
    candidate = replace(alone, tp=8)
    nothing_beside = 10 * 2 * candidate.tokens * 4096 * 7 / 8 / machine.cluster.links["all_gather"].at(1).rate
    assert 0.6 * nothing_beside < machine.exposed_seconds(candidate, 0.0) < 0.95 * nothing_beside
    # A latency counts in full wherever messages outlast what runs beside them, and is no part of a byte's seconds twice.
    wide = replace(alone, tp=16)
    more = machine.exposed_seconds(wide, 1e-3) - machine.exposed_seconds(wide, 0.0)
    assert 0 < more < 10 * 1e-3


def test_pipelines_of_the_largest_model_with_zero_0_have_grouped_heads(tmp_path):
    lines = ("80B,16,4,8,4,1,64,256,0,10.4,226.0,63.0", "80B,16,8,16,1,2,16,256,1,23.0,445.0,58.7")
    rows = read_rows(_write(tmp_path, lines))
    assert [row.model for row in rows] == ["70B", "80B"]
    assert {row.group for row in rows} == {("80B", 16)}
    whole, grouped = read_llama("80B"), read_llama("70B")
    assert whole.parameters - grouped.parameters == 80 * 2 * 8192 * (8192 - 1024)
    # The column mfu over tps says the same: FLOPs of a token of the two models.
    assert grouped.flops_per_token / whole.flops_per_token == pytest.approx(0.893, abs=0.01)


def test_microbatches_are_those_of_the_row_whatever_gbs_says(tmp_path):
    named, whole = read_rows(
        _write(tmp_path, ("1B,32,64,4,1,1,64,256,0,4.1,4208.0,9.3", "1B,32,64,4,1,1,4,256,0,4.1,4208.0,9.3"))
    )
    assert (named.candidate.accumulation, whole.candidate.accumulation) == (64, 4)
    assert named.half == whole.half
    machine = _machine()
    assert machine.choose(named.candidate).is_first
    assert not machine.choose(whole.candidate).is_first


def test_a_campaign_that_is_told_is_the_nearer_one(tmp_path):
    lines = [f"1B,2,2,2,4,8,16,256,{zero},1.0,9.0,9.0" for zero in (0, 1)]
    lines += [f"1B,2,4,2,2,4,16,256,{zero},1.0,9.0,9.0" for zero in (0, 1)]
    machine, made = _machine(), []
    for row in read_rows(_write(tmp_path, lines)):
        # Each layout with ZeRO 0 as the first campaign ran it, with ZeRO 1 as the second.
        choice = machine.campaigns(row.candidate)[row.candidate.zero]
        made.append(replace(row, tps=machine.time(row.candidate, choice).tokens_per_s_and_rank))
    assert summarize(foretell(made, Fitted(), is_told=True))["throughput_p90"] == 0
    noise = render_noise(foretell(made, Fitted()))
    assert "2 pairs of runs differ in nothing but ZeRO" in noise
    assert "tau of 1 pairs of their layouts" in noise
    assert render_noise(foretell(made[:2], Fitted())) == "no two layouts of a group ran with ZeRO 0 and 1"


@pytest.mark.parametrize(
    ("size", "layout", "is_first"),
    [
        ("8B", {"dp": 32, "tp": 4, "pp": 4, "accumulation": 8}, True),
        ("8B", {"dp": 128, "tp": 2, "pp": 2, "sequences": 2, "accumulation": 1}, False),
        ("3B", {"dp": 4, "tp": 32, "pp": 1, "accumulation": 64}, False),
        ("3B", {"dp": 2, "tp": 32, "pp": 2, "accumulation": 128}, True),
        ("8B", {"dp": 4, "tp": 4, "pp": 16, "sequences": 2, "accumulation": 32}, True),
        ("70B", {"dp": 8, "tp": 8, "pp": 4, "accumulation": 32}, False),
    ],
)
def test_the_campaign_follows_from_the_layout(size, layout, is_first):
    assert _machine(size).choose(Candidate(zero=1, shard=layout["dp"], **layout)).is_first == is_first


def test_a_row_names_its_line(tmp_path):
    rows = read_rows(_write(tmp_path, PUBLISHED))
    assert [row.line for row in rows] == [2, 3, 4, 5, 6]
    assert isinstance(rows[0], Row)
    assert rows[3].tps is None
    assert rows[4].candidate.pp == 16
