"""What a recipe leaves open is decided once, by the launcher, and written down: device, compute dtype, commit of weights."""

import json
import socket
import time
from contextlib import suppress

import httpx
import huggingface_hub
import pytest
import torch

from framework.comm import connect
from framework.comm.connect import choose_device
from framework.errors import EXIT_NODE, ModelError, NodeError, RecipeError
from framework.launch.process import check_node, hash_code, take_fingerprint
from framework.launch.resume import keep_settled
from framework.launch.settle import settle, settle_device
from framework.model import hub
from framework.model.hub import find_folder, pin_revision
from framework.model.load import load_config
from framework.recipe.compose import compose
from framework.recipe.schema import Launch, Model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("launch", "world", "gpus", "device"),
    [
        (Launch(), 1, 0, "cpu"),
        (Launch(), 1, 1, "cuda"),
        (Launch(), 8, 8, "cuda"),
        (Launch(), 2, 1, "cpu"),
        (Launch(device="cpu"), 1, 8, "cpu"),
        (Launch(device="cuda"), 2, 2, "cuda"),
        (Launch(kind="slurm", gres="gpu"), 16, 0, "cuda"),
        (Launch(kind="slurm", gres=None), 16, 8, "cpu"),
        (Launch(kind="slurm", gres=None, device="cuda"), 16, 0, "cuda"),
    ],
)
def test_the_device_is_that_of_this_machine_or_of_the_nodes_that_are_asked_for(launch, world, gpus, device):
    assert settle_device(launch, world, lambda: gpus).device == device


@pytest.mark.parametrize(("visible", "device"), [("0,1", "cuda"), ("0", "cpu")])
def test_the_gpus_that_launch_environment_shows_to_ranks_are_counted(tmp_path, monkeypatch, visible, device):
    """A torch that sees what CUDA would show: this machine may have no GPU."""
    (tmp_path / "torch.py").write_text(
        "import os\nclass cuda:\n    def device_count():\n        return len(os.environ['CUDA_VISIBLE_DEVICES'].split(','))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    variables = f'launch.environment={{CUDA_VISIBLE_DEVICES: "{visible}"}}'
    assert settle(compose([variables, "launch.ranks=2", "precision=fp32"]).require()).launch.device == device


@pytest.mark.parametrize(("gpus", "fix"), [(0, "sees no GPU here: use launch.device=cpu"), (1, "use launch.ranks=1")])
def test_too_few_gpus_here_are_refused_before_any_rank_starts(gpus, fix):
    with pytest.raises(RecipeError, match=fix):
        settle_device(Launch(device="cuda"), 2, lambda: gpus)


def test_a_compiler_that_is_missing_is_said_before_any_rank_starts(tmp_path, monkeypatch):
    recipe = compose(["memory.compile=always", "precision=fp32", "launch.device=cpu"]).require()
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    with pytest.raises(RecipeError, match=r"no C\+\+ compiler here .*use memory.compile=never"):
        settle(recipe)
    (tmp_path / "compiler").touch(mode=0o755)
    assert settle(recipe).memory.compile == "always"


def test_layers_are_not_compiled_where_a_gpu_has_no_compiler_beside_it(tmp_path, monkeypatch, capsys):
    recipe = compose(["launch.device=cuda", "launch.ranks=2"]).require()
    monkeypatch.setattr("framework.launch.settle._count_gpus", lambda launch: 2)
    monkeypatch.setenv("CC", str(tmp_path / "compiler"))
    assert settle(recipe).memory.compile == "never"
    assert "caution  memory.compile=auto is never: there is no C compiler" in capsys.readouterr().err
    (tmp_path / "compiler").touch(mode=0o755)
    assert settle(recipe).memory.compile == "auto"


@pytest.mark.parametrize("overrides", [[], ["launch=slurm", "launch.nodes=1", "batch.sequences_per_step=64"]])
def test_a_settled_recipe_leaves_nothing_to_the_ranks(overrides):
    recipe = settle(compose(overrides).require())
    assert recipe.launch.device in ("cpu", "cuda")
    assert recipe.precision.compute in ("bf16", "fp32")
    assert settle(recipe) == recipe


def test_a_run_keeps_its_dtype_and_its_commit_where_a_resume_leaves_them_open():
    weights = ("model.weights=o/n", "data.bpe_vocab=null")
    begun = compose([*weights, f"model.revision={COMMIT}", "precision=bf16"]).require()
    again = keep_settled(begun, compose([*weights]).require())
    assert (again.precision.compute, again.model.revision) == ("bf16", COMMIT)
    assert keep_settled(begun, compose(["precision=fp32"]).require()).precision.compute == "fp32"
    assert (
        keep_settled(begun, compose(["model.weights=o/other", "data.bpe_vocab=null"]).require()).model.revision is None
    )


def test_a_rank_never_chooses_its_device():
    with pytest.raises(AssertionError, match="the launcher resolves it"):
        choose_device("auto")


@pytest.mark.parametrize(
    ("local_rank", "visible", "bound", "index"),
    [
        (0, 8, False, 0),
        (7, 8, False, 7),
        (3, 1, True, 0),
        (0, 0, False, None),
        (3, 3, False, None),
        (1, 1, False, None),
    ],
)
def test_a_node_with_too_few_gpus_is_left_out_and_none_of_its_ranks_trains_on_a_cpu(
    tmp_path, monkeypatch, local_rank, visible, bound, index
):
    """visible: GPUs that torch sees; bound: SLURM shows each rank its own one only."""
    (tmp_path / "slurm").mkdir()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    for name in connect.BOUND_GPUS:
        monkeypatch.delenv(name, raising=False)
    if bound:
        monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    if index is not None:
        check_node(tmp_path, "cuda", 0)
        assert choose_device("cuda") == torch.device("cuda", index)
        return
    with pytest.raises(NodeError, match="torch sees") as caught:
        check_node(tmp_path, "cuda", 0)
    assert caught.value.exit_code == EXIT_NODE
    assert (tmp_path / "slurm" / "bad-nodes").read_text() == "n7\n"


def test_a_fingerprint_tells_recipes_and_code_apart(tmp_path):
    recipe = settle(compose([]).require())
    one, other = take_fingerprint(recipe), take_fingerprint(settle(compose(["optim.lr=1"]).require()))
    assert {name for name in one if one[name] != other[name]} == {"recipe"}
    (tmp_path / "a.py").write_text("x = 1\n")
    before = hash_code(tmp_path)
    (tmp_path / "note.txt").write_text("not code")
    assert hash_code(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert hash_code(tmp_path) != before


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache with one commit of owner/name, as huggingface_hub lays it out. Whoever looks up a host has asked the hub."""
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (snapshot / "model.safetensors").touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    asked = []

    def look_up(host, *_, **__):
        asked.append(host)
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)  # the client's, which tries five times within 23 s
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return asked


def test_a_rank_finds_the_pinned_weights_without_asking_the_hub(cache):
    pinned = Model(weights="owner/name", revision=COMMIT)
    assert find_folder("owner/name", COMMIT).name == COMMIT
    assert load_config(pinned, find_folder).hidden_size == 64
    assert pin_revision(pinned) == pinned  # nor does a launcher whose recipe names the commit
    assert cache == []


def test_the_launcher_writes_down_the_newest_commit_and_has_asked_for_it(cache):
    assert pin_revision(Model(weights="owner/name")).revision == COMMIT
    assert cache  # not reachable here: the commit is the newest that is known


@pytest.mark.parametrize("index", [None, {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}])
def test_a_commit_of_which_files_are_missing_here_is_fetched_again(cache, index):
    folder = find_folder("owner/name", COMMIT)
    weights = folder / "model.safetensors"
    if index is None:
        weights.unlink()
    else:
        weights.rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with suppress(ModelError):  # of a hub that is not reached: its client has gone on with the folder since 2.0
        pin_revision(Model(weights="owner/name", revision=COMMIT))
    assert cache


def test_a_download_that_breaks_off_names_its_key(monkeypatch):
    def break_off(*_, **__):
        raise httpx.ReadError("connection reset by peer")

    monkeypatch.setattr(hub, "snapshot_download", break_off)
    with pytest.raises(ModelError, match=r"model\.weights=owner/name .* the hub cannot be reached"):
        pin_revision(Model(weights="owner/name"))


def test_weights_that_this_node_does_not_have_are_explained(cache):
    other = COMMIT[::-1]
    with pytest.raises(ModelError, match=f"owner/name at {other} is not in the hub cache.*HF_HOME.*--revision {other}"):
        find_folder("owner/name", other)
    assert cache == []


def test_a_revision_needs_weights_of_the_hub(tmp_path):
    problems = compose(["model.revision=main"]).problems
    assert [problem.key for problem in problems] == ["model.revision"]
    with pytest.raises(ModelError, match=r"set model\.revision=null"):
        pin_revision(Model(weights=str(tmp_path), revision="main"))
