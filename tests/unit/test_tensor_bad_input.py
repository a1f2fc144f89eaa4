"""What a recipe with parallel.tp may get wrong is said before ranks connect: the key, the value, the way out."""

import pytest
from transformers import CONFIG_MAPPING

from framework.comm.communicator import Communicator
from framework.commands.plan import print_plan
from framework.errors import ModelError, TopologyError
from framework.mesh.topology import Axis
from framework.model.load import build_meta
from framework.model.shrink import shrink
from framework.recipe.compose import compose
from tests.families import RECURRENT, STATE_SPACES, build_config, family
from tests.ranks.tensor_parity import recipe_of, split

ALONE = Communicator(Axis("kv", 1, 0))


@pytest.mark.parametrize(
    ("overrides", "key", "message", "fix"),
    [
        (["parallel.tp=4", "launch.ranks=2"], "launch.ranks", "does not divide the 2 ranks", "launch.ranks=4"),
        (["parallel.tp=3", "launch.ranks=4"], "launch.ranks", "does not divide the 4 ranks", "launch.ranks=3"),
        (
            ["launch=slurm", "launch.nodes=2", "launch.ranks_per_node=4", "parallel.tp=8"],
            "parallel.tp",
            "a tensor-parallel group of 8 would lie on two nodes, which have 4 ranks each",
            "parallel.tp=1 or 2 or 4; or launch.tp_across_nodes=true",
        ),
        (
            ["parallel.tp=2", "launch.ranks=2", "parallel.sequence=false", "parallel.overlap=always"],
            "parallel.overlap",
            "parallel.sequence=false gathers no inputs",
            "parallel.sequence=true",
        ),
        (
            ["parallel.tp=2", "launch.ranks=2", "parallel.sequence=false", "memory.gathered_inputs=regather"],
            "memory.gathered_inputs",
            "parallel.sequence=false gathers no inputs",
            "parallel.sequence=true",
        ),
    ],
)
def test_a_mistake_names_its_key_and_the_fix(overrides: list[str], key: str, message: str, fix: str) -> None:
    (problem,) = compose(overrides).problems
    assert problem.key == key
    assert message in problem.message
    assert fix in problem.fix


def test_a_group_over_nodes_is_told_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "launch=slurm",
        "launch.nodes=2",
        "launch.ranks_per_node=2",
        "parallel.tp=4",
        "launch.tp_across_nodes=true",
    ]
    print_plan(compose([*overrides, "batch.sequences_per_step=16"]).require(), ["ranks"])
    printed = capsys.readouterr().out
    assert "tp over 2 nodes" in printed
    assert "between 2 nodes" in printed
    assert "a step over their network" in printed


def test_degrees_over_the_heads_are_refused_with_those_that_divide() -> None:
    with pytest.raises(TopologyError, match=r"parallel.tp=8 does not divide.*use parallel.tp in \[1, 2, 4\]"):
        split(build_meta(build_config(family("llama"))), Communicator(Axis("tp", 8, 0)), ALONE, sequence=True)


@pytest.mark.parametrize(
    ("name", "tp", "told"),
    [
        ("mamba2", 3, r"linear value heads \[8\], .* of mamba2 .*use parallel.tp in \[1, 2, 4, 8\]"),
        ("mamba", 5, r"linear value heads \[64\]"),
        ("qwen3_5_text", 4, r"linear key heads \[2\], linear value heads \[4\], .*use parallel.tp in \[1, 2\]"),
    ],
)
def test_degrees_over_the_heads_of_a_mixer_are_refused_with_those_that_divide(name: str, tp: int, told: str) -> None:
    found = next(each for each in (*STATE_SPACES, *RECURRENT) if each.name == name)
    with pytest.raises(TopologyError, match=f"parallel.tp={tp} does not divide the {told}"):
        split(build_meta(build_config(found)), Communicator(Axis("tp", tp, 0)), ALONE, sequence=True)


@pytest.mark.parametrize(
    ("model_type", "names"), [("recurrent_gemma", r"temporal_block.*linear_x"), ("rwkv", r"attention.*receptance")]
)
def test_an_unknown_architecture_is_refused_by_its_modules(model_type: str, names: str) -> None:
    config = shrink(CONFIG_MAPPING[model_type]())
    with pytest.raises(ModelError, match=rf"(?s)no rule knows.*{names}.*model.tp_plan"):
        split(build_meta(config), Communicator(Axis("tp", 2, 0)), ALONE, sequence=True)


def test_a_plan_that_names_a_missing_module_is_refused() -> None:
    model = build_meta(build_config(family("llama")))
    with pytest.raises(ModelError, match=r"model.tp_plan.\*.upward names no module of LlamaForCausalLM"):
        split(model, Communicator(Axis("tp", 2, 0)), ALONE, True, recipe=recipe_of(tp_plan={"*.upward": "column"}))
