"""doctor --measure: what ranks measured becomes a file by which a plan foretells the same, of this machine and no other."""

import itertools
import time
from dataclasses import replace

import pytest
import torch
import yaml

from framework.cli import main
from framework.commands.measure import (
    MeasureOrder,
    check_measured,
    choose_file,
    describe_findings,
    describe_group,
    describe_machine,
    find_differences,
    fit_line,
    measure_command,
    write_text,
)
from framework.commands.timings import Effort, choose_edges, combine, time_call
from framework.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, RecipeError
from framework.launch import agent
from framework.launch.agent import Outcome
from framework.plan.cluster import COLLECTIVES, ClusterRates
from framework.plan.find import correct
from framework.recipe.compose import compose
from framework.recipe.schema import ClusterMeasured, Launch, Recipe

CPU = torch.device("cpu")
TINY = Effort(
    edges=(16, 64),
    wide=128,
    memory_bytes=(1 << 16, 1 << 20),
    message_bytes=(1 << 12, 1 << 20),
    contexts=(32, 64),
    features=(8, 16),
    width=32,
    tokens=64,
    disk_bytes=1 << 20,
    pause_s=1e-4,
    rounds=2,
    point_s=0.002,
)
HERE = ClusterMeasured("Some CPU, family 1, model 2", 4, [], "2.13.0")
ORDER = MeasureOrder("cpu", 2, 2, ["bf16", "fp32"], ".", "result.json", None)
SHAPES = [(m, k, n) for m in (16, 64) for k in (16, 64) for n in (16, 64, 128)]
GRADIENTS = [shape[::-1] for shape in SHAPES]
FOUND = {
    "matmul": {"bf16": [(*s, 0.0002 * s[0]) for s in SHAPES], "fp32": [(*s, 0.0001 * s[0]) for s in SHAPES]},
    "gradient": {"bf16": [(*s, 0.0003 * s[2]) for s in GRADIENTS], "fp32": [(*s, 0.00015 * s[2]) for s in GRADIENTS]},
    "memory": [(0.1, 20.0), (10.0, 8.0)],
    "attention": {
        dtype: [(c, d, 1e-5 * c * d * rate, 0.7e-5 * c * d * rate) for c in (32, 64) for d in (8, 16)]
        for dtype, rate in (("bf16", 1), ("fp32", 0.25))
    },
    "softmax": 0.5,
    "overhead_s": 4e-6,
    "host_rate": 6e9,
    "disk_rate": 1e9,
    "links": {kind: [(0.004, 80.0), (1.0, 700.0), (8.0, 6000.0)] for kind in COLLECTIVES},
}


def cluster_of(text, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return ClusterRates.from_group(compose(["experiment=quickstart", f"cluster={file}"]).require().cluster)


def test_a_plan_by_the_file_takes_as_long_as_what_was_measured(tmp_path):
    group = describe_group(ORDER, FOUND, HERE, 8 << 30, 64 << 30)
    cluster = cluster_of(write_text("mine", group, ORDER, HERE), tmp_path)
    assert (cluster.ranks_per_node, cluster.memory_bytes) == (2, 8 << 30)
    for dtype in ORDER.dtypes:
        for m, k, n, tflops in FOUND["matmul"][dtype]:
            seconds = cluster.matmul_seconds(m, k, n, dtype)
            assert 2e-12 * m * k * n / seconds == pytest.approx(tflops, rel=1e-3)
    for kind in COLLECTIVES:
        for size, micros in FOUND["links"][kind]:
            assert cluster.collective_seconds(kind, size * 1e6, 2, 1) == pytest.approx(micros * 1e-6, rel=1e-3)
    flops = 1e9
    for dtype, rows in FOUND["attention"].items():
        for context, features, *rates in rows:
            for rate, back in zip(rates, (False, True), strict=True):
                seconds = cluster.attention_seconds(flops, dtype, backward=back, shape=(context, features))
                assert seconds - 4e-6 == pytest.approx(1e-12 * flops / rate, rel=1e-3)
    for dtype, rows in FOUND["gradient"].items():
        for out, tokens, inner, tflops in rows:
            seconds = cluster.gradient_seconds(tokens, inner, out, 1e9, dtype)
            assert 2e-12 * out * tokens * inner / seconds == pytest.approx(tflops, rel=1e-3)
    assert cluster.softmax_seconds(1e6) == pytest.approx(1e6 / 0.5e9, rel=1e-3)
    assert cluster.memory_seconds(1e7) == pytest.approx(1e7 / 8e9 + 4e-6, rel=1e-3)
    assert any("best 12.8 GFLOP/s" in line for line in describe_findings(group, ORDER))


def test_what_layouts_have_taken_longer_slows_all_that_was_measured(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(write_text("mine", describe_group(ORDER, FOUND, HERE, 8 << 30, 64 << 30), ORDER, HERE))
    group = compose(["experiment=quickstart", f"cluster={file}"]).require().cluster
    slower = correct(group, {"computation": 2.0, "memory": 3.0, "links": 4.0, "host": 1.0}, "slower")
    before, after = ClusterRates.from_group(group), ClusterRates.from_group(slower)
    own = before.overhead_s

    def factor(seconds, less=0.0):
        return (seconds(after) - less) / (seconds(before) - less)

    assert factor(lambda each: each.matmul_seconds(16, 64, 64, "fp32")) == pytest.approx(2, 1e-3)
    assert factor(lambda each: each.gradient_seconds(16, 64, 64, 1e9, "fp32")) == pytest.approx(2, 1e-3)
    assert factor(lambda each: each.attention_seconds(1e9, "fp32", shape=(32, 8)), own) == pytest.approx(2, 1e-3)
    assert factor(lambda each: each.softmax_seconds(1e6)) == pytest.approx(3, 1e-3)
    assert factor(lambda each: each.memory_seconds(1e7), own) == pytest.approx(3, 1e-3)
    for kind in COLLECTIVES:
        assert factor(lambda each, kind=kind: each.collective_seconds(kind, 1e6, 2, 1)) == pytest.approx(4, 1e-3)


def test_a_gpus_file_has_its_data_sheets_peak_and_between_nodes_what_is_shipped(tmp_path):
    here = replace(HERE, gpus=["NVIDIA H100 80GB HBM3"] * 2)
    order = replace(ORDER, device="cuda", ranks=2, threads=8, dtypes=["bf16", "fp32"])
    found = FOUND | {"matmul": {dtype: [(*s, 10.0 * s[0]) for s in SHAPES] for dtype in order.dtypes}}
    cluster = cluster_of(
        write_text("mine", describe_group(order, found, here, 80 << 30, 640 << 30), order, here), tmp_path
    )
    assert cluster.peak_flops["bf16"] == 989.4e12
    assert cluster.peak_flops["fp8"] == 1978.9e12
    assert cluster.device == "NVIDIA H100 80GB HBM3"
    assert (cluster.processors, cluster.tile) == (132, (128, 256))
    assert [span.nodes for span in cluster.links["all_gather"].spans] == [1, 2, 8, 64]
    assert cluster.links["all_gather"].spans[1].rate == 345e9
    assert 2e-12 * 64**3 / cluster.matmul_seconds(64, 64, 64) == pytest.approx(640.0, rel=1e-3)


def test_a_line_has_the_least_relative_errors_and_no_negative_part():
    assert fit_line([(1.0, 12.0), (10.0, 30.0), (100.0, 210.0)]) == pytest.approx((10.0, 2.0))
    latency, slope = fit_line([(1.0, 1.0), (10.0, 14.0), (100.0, 160.0)])
    assert latency == 0.0
    assert 1.0 < slope < 1.7
    assert fit_line([(1.0, 50.0), (2.0, 40.0)])[1] > 0


def test_of_what_ranks_found_the_medians_count():
    ranks = [{"a": [(1, 2.0)], "b": 1.0}, {"a": [(1, 9.0)], "b": 5.0}, {"a": [(1, 3.0)], "b": 2.0}]
    assert combine(ranks) == {"a": [[1, 3.0]], "b": 2.0}


def test_a_call_that_is_held_up_now_and_then_moves_no_median():
    pauses = itertools.cycle([0.002] * 4 + [0.1])
    assert 0.002 < time_call(lambda: time.sleep(next(pauses)), CPU, 0.0) < 0.05


def test_edges_that_would_take_too_long_are_left_out():
    assert choose_edges(CPU, torch.float32, replace(TINY, pass_s=60.0)) == TINY.edges
    assert choose_edges(CPU, torch.float32, replace(TINY, edges=(8, 16, 64), pass_s=0.0)) == (8, 16)


def test_a_measured_file_is_of_one_machine(capsys):
    here = describe_machine()
    assert find_differences(here, here) == []
    own = Recipe(cluster=replace(compose(["cluster=laptop"]).draft.cluster, measured=here))
    check_measured(own)
    assert capsys.readouterr().err == ""
    check_measured(replace(own, cluster=replace(own.cluster, measured=replace(here, torch="1.0"))))
    assert "measured with torch 1.0" in capsys.readouterr().err
    for change in ({"processor": "Another, family 1, model 1"}, {"cores": 999}, {"gpus": ["NVIDIA H100"] * 8}):
        other = replace(own, cluster=replace(own.cluster, measured=replace(here, **change)))
        with pytest.raises(RecipeError, match="cluster=laptop was measured on another machine than this one"):
            check_measured(other)
        check_measured(replace(other, launch=Launch(kind="slurm")))  # which runs there


def test_files_of_others_are_kept_and_names_that_no_choice_could_have_refused(tmp_path):
    with pytest.raises(RecipeError, match="name ends in"):
        choose_file("machine", [])
    assert str(choose_file("", [])) == "measured.yaml"
    assert choose_file("", [tmp_path]) == tmp_path / "cluster" / "measured.yaml"
    text = write_text("mine", describe_group(ORDER, FOUND, HERE, 8 << 30, 64 << 30), ORDER, HERE)
    for content, said in ((text, "of another machine"), ("name: x\n", "which doctor has not measured"), ("[", "not")):
        file = tmp_path / "mine.yaml"
        file.write_text(content)
        with pytest.raises(RecipeError, match=said):
            measure_command(Recipe(), file)
        assert file.read_text() == content
    with pytest.raises(RecipeError, match="this is a folder"):
        measure_command(Recipe(), tmp_path)
    with pytest.raises(RecipeError, match="measures the machine that it stands on"):
        measure_command(Recipe(launch=Launch(kind="slurm")), tmp_path / "new.yaml")


def test_an_interrupted_measurement_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "run_ranks", lambda *_: Outcome(EXIT_INTERRUPTED))
    assert measure_command(Recipe(), tmp_path / "new.yaml", effort=TINY) == EXIT_INTERRUPTED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.grid
def test_the_ranks_of_this_machine_write_a_file_that_plan_reads(tmp_path, capsys):
    file = tmp_path / "cluster" / "here.yaml"
    recipe = Recipe(run=replace(Recipe().run, root=str(tmp_path)))
    assert measure_command(recipe, file, effort=TINY) == EXIT_DONE
    assert f"cluster={file}" in capsys.readouterr().out
    written = yaml.safe_load(file.read_text())
    assert written["measured"]["processor"] == describe_machine().processor
    assert [row[:3] for row in written["matmul"]["fp32"]["measured"]][:2] == [[16, 16, 16], [16, 16, 64]]
    assert [size for size, _ in written["links"]["send"]["measured"]] == [0.004096, 1.0486]
    assert [each.name for each in tmp_path.iterdir()] == ["cluster"], "what was written to time the disk is gone"
    assert main(["check", "experiment=quickstart", "--recipes", str(tmp_path), "cluster=here"]) == EXIT_DONE
    assert "devices_per_node: 2" in capsys.readouterr().out
    # Of the same machine it may be written anew; by the command a lone --measure does not take an override for its file.
    assert main(["doctor", "--measure", "train.stepz=3"]) == EXIT_USER
    assert "train.stepz" in capsys.readouterr().err
