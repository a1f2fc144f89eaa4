"""Every shipped recipe composes, checks, says what it is for, and builds the model that it names."""

from pathlib import Path

import pytest

from framework.recipe.compose import compose
from framework.recipe.derive import derive
from framework.recipe.files import list_options
from framework.recipe.keys import list_groups
from framework.recipe.problem import shipped_recipes
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

FOLDERS = [shipped_recipes()]
OPTIONS = [
    (group, option)
    for group in [*(g for g in list_groups() if (shipped_recipes() / g).is_dir()), "experiment"]
    for option in list_options(group, FOLDERS)
]
PAIRS = [
    *("data=files", "data.sources.files.path=x.jsonl", "data.sources.files.pairs=chosen"),
    *("data.bpe_vocab=512", "data.chat_template=chatml"),
]
# What recipes leave to the user on purpose.
GIVEN = {
    "files": ["data.sources.files.path=x.jsonl"],
    "finetune_qwen3_0_6b": ["data.sources.files.path=x.jsonl"],
    "sft_qwen3_0_6b": ["data.sources.files.path=x.jsonl"],
    "sft_llama3_1_8b": ["data.sources.files.path=x.jsonl"],
    "dpo_qwen3_8b": ["data.sources.files.path=x.jsonl"],
    **{name: [*PAIRS, "loss.reference=x"] for name in ("dpo", "ipo", "kto")},
    **dict.fromkeys(("orpo", "simpo"), PAIRS),
    "lora_llama3_1_8b": ["data.sources.files.path=x.jsonl"],
    "lora_qwen3_30b_a3b": ["data.sources.files.path=x.jsonl"],
    "qlora_llama3_3_70b": ["data.sources.files.path=x.jsonl"],
    "llama3_1_8b_128k": ["data.sources.files.path=x.jsonl"],
    "llama3_1_8b_1m": ["data.sources.files.path=x.jsonl"],
    "slurm": ["launch.nodes=1", "batch.sequences_per_step=64"],
    "example_site": ["launch.nodes=1", "launch.account=lab"],
}

# As published with the weights (DeepSeek-V3: without its second-token module); test_model_load.py counts them.
PARAMETERS = {
    "nemotron3_nano": 31_577_937_344,
    "llama3_2_1b": 1_235_814_400,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "mistral_7b": 7_248_023_552,
    "mixtral_8x7b": 46_702_792_704,
    "gemma2_9b": 9_241_705_984,
    "gemma4_e2b": 4_628_569_344,
    "gemma4_e4b": 7_463_013_376,
    "gemma4_26b_a4b": 25_233_141_760,
    "gemma4_31b": 30_697_345_280,
    "deepseek_v3": 671_026_404_352,
    "deepseek_v3_2": 671_877_929_216,
    "glm_5": 743_911_199_232,
    "smollm3_3b": 3_075_098_624,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "qwen3_5_0_8b": 752_393_024,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "qwen3_5_397b_a17b": 396_346_350_336,
    "kimi_linear_48b_a3b": 49_122_675_072,
    "lfm2_1_2b": 1_170_340_608,
    "gpt2": 124_439_808,
    "tiny_llama": 5_475_584,
    "nanochat_d12": 162_201_600,
    "nanochat_d20": 519_045_120,
}


def test_every_file_is_the_default_or_an_option_of_a_group():
    files = {
        file.relative_to(shipped_recipes()).with_suffix("").as_posix() for file in shipped_recipes().rglob("*.yaml")
    }
    assert files == {"config", *(f"{group}/{option}" for group, option in OPTIONS)}


# What is typed first: the experiments; and of each group an option.
SHOWN = {*(each for each in OPTIONS if each[0] == "experiment"), *dict(OPTIONS).items()}


@pytest.mark.parametrize(
    ("group", "option"),
    few_of(OPTIONS, lambda *option: option in SHOWN),
    ids=[f"{group}={option}" for group, option in OPTIONS],
)
def test_every_option_composes_and_checks(group, option):
    recipe = compose([f"{group}={option}", *GIVEN.get(option, [])]).require()
    assert derive(recipe).accumulation >= 1
    assert group != "experiment" or recipe.run.name != "run"


def test_every_recipe_begins_with_its_purpose():
    for file in shipped_recipes().rglob("*.yaml"):
        comments = [line for line in file.read_text().splitlines()[:2] if not line.startswith("# @package")]
        assert comments[0].startswith("# "), file
        assert len(comments[0]) > 20, file


def test_the_quickstart_needs_no_network_and_two_ranks():
    recipe = compose(["experiment=quickstart"]).require()
    assert recipe.launch.ranks == 2
    assert recipe.model.weights is recipe.model.tokenizer is None
    assert [source.path for source in recipe.data.sources.values()] == ["python-stdlib"]
    assert recipe.train.validate_every_steps is not None


def test_every_model_recipe_is_counted():
    assert PARAMETERS.keys() == set(list_options("model", FOLDERS))


@pytest.mark.parametrize("model", PARAMETERS)
def test_every_config_value_is_one_of_the_family(model):
    """A misspelt architecture value would be taken by Hugging Face as an attribute that nothing reads."""
    from transformers import AutoConfig

    recipe = compose([f"model={model}"]).require().model
    family = AutoConfig.for_model(recipe.family)
    unread = {"qwen3_moe": {"head_dim"}}.get(
        recipe.family, set()
    )  # read by its attention with getattr, without a default
    assert set(recipe.config) - set(family.to_dict()) - set(family.attribute_map) <= unread


def test_the_docs_name_every_shipped_recipe():
    rows: dict[str, str] = {}
    for line in (Path(__file__).parents[2] / "docs" / "recipes.md").read_text().splitlines():
        if line.startswith("| `"):
            rows.setdefault(line.split("`")[1], line)
    assert not [(group, option) for group, option in OPTIONS if f"`{option}`" not in rows[group]]
