"""Machines as data: what a cluster's file says is what a plan computes with, and what is wrong in one is said."""

from dataclasses import asdict, replace
from math import log

import pytest

from framework.host import PEAK_BF16_FLOPS, peak_flops
from framework.plan.candidate import resolve_target
from framework.plan.cluster import COLLECTIVES, ClusterRates, Grid
from framework.recipe import machines
from framework.recipe.compose import compose
from framework.recipe.machines import BY_GPU, KINDS, find_cluster, find_cluster_problems, read_shipped
from framework.recipe.schema import Cluster as Described
from framework.recipe.schema import Launch, Recipe
from framework.train.reports import find_peak

SHIPPED = (
    *("h100_ib", "h100_efa", "h200_ib", "h800_ib", "a100_ib", "b200_ib", "b300_ib", "gb200_nvl72", "gb300_nvl72"),
    *("mi300x_roce", "laptop"),
)
# Published with the issue: bus bandwidth in GB/s at 256 MB, of eight GPUs on each node.
EFA_NODES = (1, 2, 4, 8, 16, 32, 64)
EFA = {
    "all_reduce": (436, 362, 160, 100, 85, 65, 33),
    "all_gather": (250, 185, 119, 69, 55, 28, 11),
    "reduce_scatter": (250, 182, 116, 69, 55, 28, 11),
}


def shipped(name):
    return ClusterRates.from_group(read_shipped(name))


def plain(**changes):
    """Of one rate and one latency everywhere: what algebra is checked on."""
    bare = shipped("h100_ib")
    link = replace(
        bare.links["send"],
        start_s=0.0,
        spans=tuple(replace(s, rate=1e11, hop_s=1e-5) for s in bare.links["send"].spans),
    )
    return replace(bare, links=dict.fromkeys(COLLECTIVES, link), **changes)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_gives_rates_in_plain_units(name):
    cluster = shipped(name)
    assert cluster.name == name
    assert 1e9 < cluster.memory_rate < 1e13
    assert set(cluster.links) == set(KINDS) == set(COLLECTIVES)
    assert 0 < cluster.matmul_seconds(4096, 4096, 4096) < 60
    assert list(find_cluster_problems(Recipe(cluster=read_shipped(name)))) == []


def test_peaks_are_those_by_which_training_reports_mfu():
    for gpu, file in BY_GPU.items():
        described = read_shipped(file)
        assert described.matmul["bf16"].peak_tflops * 1e12 == dict(PEAK_BF16_FLOPS)[gpu] == peak_flops(f"NVIDIA {gpu}")
    own = replace(read_shipped("h100_ib"), device="H20")
    assert find_peak("NVIDIA H20", own) == 989.4e12
    assert find_peak("NVIDIA H200", own) == dict(PEAK_BF16_FLOPS)["H200"]
    assert find_peak("NVIDIA H20", Described()) is None
    assert find_peak("cpu", read_shipped("laptop")) is None


@pytest.mark.parametrize(
    ("launch", "name", "is_assumed"),
    [
        (Launch(gres="gpu:h100"), "h100_ib", False),
        (Launch(gres="gpu:nvidia_a100_80gb:8"), "a100_ib", False),
        (Launch(gres="gpu"), "h100_ib", True),
        (Launch(gres="gpu:l40s"), "h100_ib", True),  # no file of it is shipped
        (Launch(kind="slurm", gres="gpu:h100", device="cpu"), "laptop", True),
        (Launch(kind="slurm", gres=None), "laptop", True),
    ],
)
def test_without_a_name_the_recipes_gpu_chooses_and_another_is_said_to_be_assumed(launch, name, is_assumed):
    described, assumed = find_cluster(Recipe(launch=launch))
    assert (described.name, assumed) == (name, is_assumed)
    named = Recipe(launch=launch, cluster=read_shipped("b200_ib"))
    assert find_cluster(named) == (named.cluster, False)


def test_cpu_ranks_of_this_machine_have_its_cores_and_memory(monkeypatch):
    monkeypatch.setattr(machines, "count_cores", lambda: 3)
    monkeypatch.setattr(machines, "count_host_memory", lambda: 6 * 2**30)
    described, assumed = find_cluster(Recipe(launch=Launch(device="cpu")))
    assert assumed
    assert "3 cores, 6 GiB" in described.name
    assert described.matmul == read_shipped("laptop").matmul
    assert list(find_cluster_problems(Recipe(cluster=described))) == []
    for ranks, gib in ((1, 6), (3, 2), (6, 1)):
        recipe = Recipe(launch=Launch(device="cpu", ranks=ranks))
        assert ClusterRates.from_recipe(recipe).memory_bytes == gib * 2**30


def test_a_named_cluster_says_what_its_devices_are_where_the_recipe_does_not():
    assert resolve_target(Recipe(cluster=read_shipped("h100_ib"))).launch.device == "cuda"
    assert resolve_target(Recipe(cluster=read_shipped("laptop"))).launch.device == "cpu"
    assert resolve_target(Recipe(cluster=read_shipped("h100_ib"), launch=Launch(device="cpu"))).launch.device == "cpu"


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"nodes": [1, 1]}, "links.send.nodes", "rise"),
        ({"nodes": [2, 4]}, "links.send.nodes", "begin with 1"),
        ({"hop_us": [1.0]}, "links.send.hop_us", "1 values for the 2"),
        ({"measured": [[2.0, 1.0], [1.0, 1.0]]}, "links.send.measured", "must rise"),
    ],
)
def test_a_link_that_does_not_fit_is_said_with_its_key(changes, key, said):
    described = read_shipped("h100_ib")
    links = described.links | {"send": replace(described.links["send"], **changes)}
    assert_said(replace(described, links=links), key, said)


@pytest.mark.parametrize(
    ("measured", "said"),
    [([[1.0, 1.0, 1.0]], "all above 0"), ([[1.0] * 4, [2.0, 2.0, 1.0, 1.0]], "not a grid of 2 x 2 x 1 shapes")],
)
def test_matmuls_that_are_no_grid_are_said_with_their_key(measured, said):
    described = read_shipped("h100_ib")
    matmul = {"bf16": replace(described.matmul["bf16"], measured=measured)}
    assert_said(replace(described, matmul=matmul), "matmul.bf16.measured", said)


def test_what_a_file_lacks_or_nobody_knows_is_said_with_its_key():
    described = read_shipped("h100_ib")
    links = {kind: link for kind, link in described.links.items() if kind != "send"}
    assert_said(replace(described, links=links), "links", "send missing")
    assert_said(replace(described, matmul=described.matmul | {"bf17": described.matmul["bf16"]}), "matmul.bf17", "fp8")
    assert_said(replace(described, matmul={}), "matmul", "no rate of bf16 or fp32")
    matmul = {"bf16": replace(described.matmul["bf16"], attention=[[1.0]])}
    assert_said(replace(described, matmul=matmul), "matmul.bf16.attention", "TFLOP/s in backward")
    assert_said(replace(Described(), price_per_hour=2.0), "price_per_hour", "cluster=h100_ib, say")


def assert_said(described, key, said):
    [problem] = find_cluster_problems(Recipe(cluster=described))
    assert problem.key == f"cluster.{key}"
    assert said in f"{problem.message} {problem.fix}"


def test_an_unknown_cluster_and_numbers_out_of_range_are_said_on_the_command_line():
    def problems(*words):
        found = compose(["experiment=quickstart", *words]).problems
        return {each.key: f"{each.message} {each.fix}" for each in found}

    unknown = problems("cluster=h100")
    assert "did you mean cluster=h100_ib? there are: a100_ib, b200_ib, b300_ib, gb200_nvl72" in unknown["cluster"]
    assert "doctor --measure FILE" in problems("cluster=none.yaml")["cluster"]
    wrong = problems(
        *(
            "cluster=h100_ib",
            "cluster.memory_gb=0",
            "cluster.matmul.bf16.share=1.2",
            "cluster.links.send.gb_per_s=[0,1]",
        )
    )
    assert {key: text.split("must be ")[1] for key, text in wrong.items()} == {
        "cluster.memory_gb": "a number of at least 0.001 ",
        "cluster.matmul.bf16.share": "a number from 0.001 to 1 ",
        "cluster.links.send.gb_per_s": "a number of at least 1e-06 ",
    }


def test_a_file_is_chosen_by_its_path_and_stands_for_the_whole_group(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ndevice: H100\nmatmul: {bf16: {peak_tflops: 100}}\n" + _links_text())
    words = ["experiment=quickstart", "cluster=h100_ib", f"cluster={file}", "cluster.price_per_hour=7"]
    composition = compose(words)
    described = composition.require().cluster
    assert (described.name, described.memory_gb, described.price_per_hour) == ("mine", 1.0, 7.0)
    assert composition.origins["cluster.device"] == f"{file}:2"
    file.write_text("train: {steps: 3}\n")
    [problem] = compose(words).problems
    assert "no key `name`" in problem.message
    file.write_text("name: [")
    assert "not valid YAML" in compose(words).problems[0].message


def _links_text():
    return "links: {" + ", ".join(f"{kind}: {{gb_per_s: [1.0]}}" for kind in KINDS) + "}\n"


def test_a_matmul_pays_for_tiles_and_waves_that_are_not_full():
    cluster = shipped("h100_ib")
    full = cluster.matmul_seconds(128 * 11, 8192, 256 * 12)  # 132 tiles, one for each processor
    assert cluster.matmul_seconds(128 * 11, 8192, 256 * 12 - 100) == full
    assert cluster.matmul_seconds(128 * 12, 8192, 256 * 12) > 1.3 * full
    rate = 2 * 128 * 11 * 8192 * 256 * 12 / full
    assert rate == pytest.approx(0.75 * 989.4e12 * 8192 / (8192 + 128), rel=0.05)


def test_a_thin_matmul_takes_as_long_as_its_bytes():
    cluster = shipped("h100_ib")
    num_bytes = 2 * (8192 * 8192 + 2 * 16 * 8192)
    assert cluster.matmul_seconds(16, 8192, 8192) == pytest.approx(num_bytes / 3e12 + 3e-6, rel=1e-6)
    assert cluster.matmul_seconds(16, 8192, 8192, "fp8") < cluster.matmul_seconds(16, 8192, 8192)


def test_a_matmul_is_what_was_measured_of_its_shape_and_lies_between_where_nothing_was():
    rows = [[m, k, n, 0.01 * (m + 2 * k + 3 * n) / 1000] for m in (64, 256) for k in (64, 1024) for n in (32, 512)]
    described = read_shipped("laptop")
    matmul = {"fp32": replace(described.matmul["fp32"], measured=rows)}
    cluster = ClusterRates.from_group(replace(described, matmul=matmul))
    for m, k, n, tflops in rows:
        assert 2e-12 * m * k * n / cluster.matmul_seconds(m, k, n, "fp32") == pytest.approx(tflops)
    ends = [cluster.matmul_seconds(m, 64, 32, "fp32") / m for m in (64, 256)]
    assert min(ends) < cluster.matmul_seconds(128, 64, 32, "fp32") / 128 < max(ends)
    # Beyond the grid the model goes on from the nearest point.
    assert cluster.matmul_seconds(1024, 64, 32, "fp32") / 1024 == pytest.approx(ends[1], rel=0.3)


def test_a_grid_is_linear_in_logarithms_and_constant_outside():
    grid = Grid(((log(1), log(4)), (log(1), log(100))), (0.0, 2.0, 1.0, 3.0))
    assert [grid.at(*point) for point in ((1, 1), (1, 100), (4, 1), (4, 100))] == [0, 2, 1, 3]
    assert grid.at(2, 10) == pytest.approx(1.5)
    assert grid.at(0.1, 1e6) == 2.0
    assert Grid(((log(8),),), (5.0,)).at(3) == 5.0


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    cluster = plain()
    parts = [cluster.collective_seconds(kind, 1e9, 8, 1) for kind in ("reduce_scatter", "all_gather", "all_reduce")]
    assert parts[0] + parts[1] == pytest.approx(parts[2])
    # 7 steps, of which each sends an eighth.
    assert parts[0] == pytest.approx(7 * (1e-5 + 1e9 / 8 / 1e11))
    assert cluster.collective_seconds("all_to_all", 1e9, 8, 1) == pytest.approx(parts[0])
    assert cluster.collective_seconds("send", 1e9, 2, 1) == pytest.approx(1e-5 + 1e-2)
    assert cluster.matmul_seconds(0, 8, 8) == cluster.memory_seconds(0) == 0
    assert cluster.collective_seconds("all_reduce", 1e9, 1, 1) == cluster.collective_seconds("all_gather", 0, 8, 1) == 0


def test_a_node_divides_its_network_among_the_groups_that_send_at_the_same_time():
    cluster = shipped("h100_ib")
    rate = cluster.links["all_gather"].at(2).rate
    for ranks, part in ((16, 1.0), (8, 0.5), (2, 1 / 8)):
        latency = cluster.collective_seconds("all_gather", 1e-9, ranks, 2)
        seconds = cluster.collective_seconds("all_gather", 1e9, ranks, 2) - latency
        assert seconds == pytest.approx((ranks - 1) / ranks * 1e9 / (part * rate))
    # Of an all-to-all each rank sends its own, over its own adapter.
    [two, all_of] = [cluster.collective_seconds("all_to_all", 1e9, ranks, 2) for ranks in (2, 16)]
    assert two == pytest.approx(all_of * (1 / 2) / (15 / 16), rel=0.01)


def test_many_nodes_take_a_tree_for_an_all_reduce_and_a_ring_for_others():
    cluster = plain()
    small = {
        (kind, nodes): cluster.collective_seconds(kind, 1e-9, 8 * nodes, nodes) for kind in KINDS for nodes in (1, 64)
    }
    assert small["all_reduce", 64] == pytest.approx(2 * (7 + 6) * 1e-5)
    assert small["all_gather", 64] == pytest.approx(511 * 1e-5)
    assert small["all_gather", 1] == pytest.approx(7 * 1e-5)


@pytest.mark.parametrize("kind", list(EFA))
def test_bandwidths_of_efa_are_what_was_measured_at_256_mb(kind):
    cluster = shipped("h100_efa")
    for nodes, expected in zip(EFA_NODES, EFA[kind], strict=True):
        ranks = 8 * nodes
        passes = 2 if kind == "all_reduce" else 1
        seconds = cluster.collective_seconds(kind, 256e6, ranks, nodes)
        assert passes * (ranks - 1) / ranks * 256e6 / seconds / 1e9 == pytest.approx(expected, rel=0.01)
    three, four = (cluster.collective_seconds(kind, 256e6, 8 * nodes, nodes) for nodes in (3, 4))
    assert cluster.collective_seconds(kind, 256e6, 16, 2) < three < four


def test_measured_collectives_take_what_was_measured():
    described = read_shipped("laptop")
    link = replace(described.links["all_reduce"], measured=[[0.004, 60], [1.0, 900], [16.0, 20000]])
    links = described.links | {"all_reduce": link}
    cluster = ClusterRates.from_group(replace(described, devices_per_node=2, links=links))
    for size, micros in link.measured:
        assert cluster.collective_seconds("all_reduce", size * 1e6, 2, 1) == pytest.approx(micros * 1e-6)
    assert 60e-6 < cluster.collective_seconds("all_reduce", 1e5, 2, 1) < 900e-6


def test_a_run_may_go_on_with_another_cluster_and_keeps_it_in_its_recipe(tmp_path):
    from framework.launch.identity import may_change
    from framework.recipe.compose import load_recipe, save_recipe

    assert may_change("cluster.matmul.bf16.share")
    recipe = compose(["experiment=quickstart", "cluster=h100_efa"]).require()
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert asdict(recipe.cluster)["links"]["all_reduce"]["nodes"] == list(EFA_NODES)
