"""muP: factors of initial values and of rates, by the widths of a base model."""

from pathlib import Path
from unittest.mock import patch

import pytest
from torch import nn

from framework import cli
from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER, ModelError
from framework.model.initial import SAME, WidthScale, find_scales
from framework.model.load import build_meta
from framework.recipe.compose import compose
from framework.verify import command, oracle
from framework.verify.prepare import VerifyOptions
from tests.families import build_config, family

BASE = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 12, "num_attention_heads": 2}
WIDE = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 24, "num_attention_heads": 4}
HEADS = {"num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2, "tie_word_embeddings": False}


SMALL = "{hidden_size: 64, intermediate_size: 176, num_attention_heads: 2, num_key_value_heads: 1}"


def test_factors_follow_inputs_and_outputs() -> None:
    found = find_scales(build_meta(build_config(family("qwen3_moe"), **HEADS, **WIDE)), BASE)
    layers = "model.layers.{}.".format
    expected = {
        "model.embed_tokens.weight": SAME,
        layers(0) + "self_attn.q_norm.weight": SAME,
        layers(0) + "self_attn.q_proj.weight": WidthScale(1 / 2, 1 / 4),
        layers(0) + "mlp.down_proj.weight": WidthScale(2**-0.5, 1 / 2),
        layers(1) + "mlp.experts.down_proj": WidthScale(2**-0.5, 1 / 2),
        # Their outputs are as many in every width.
        layers(1) + "mlp.gate.weight": WidthScale(1 / 4, 1 / 4),
        "lm_head.weight": WidthScale(1 / 4, 1 / 4),
    }
    assert {name: found[name] for name in expected} == expected


def test_the_base_model_is_as_without() -> None:
    found = find_scales(build_meta(build_config(family("qwen3_moe"), **HEADS, **BASE)), BASE)
    assert set(found.values()) == {SAME}


def test_what_has_two_scales_is_refused() -> None:
    tied = build_meta(build_config(family("llama"), **{**HEADS, "tie_word_embeddings": True}, hidden_size=64))
    with pytest.raises(ModelError, match="tie_word_embeddings=false"):
        find_scales(tied, {"hidden_size": 16})
    longer = build_meta(build_config(family("qwen3_moe"), **{**HEADS, **WIDE, "head_dim": 16}))
    with pytest.raises(ModelError, match="let their number grow"):
        find_scales(longer, {**BASE, "head_dim": 8})


def test_a_tied_model_is_refused_before_it_is_compared(tmp_path: Path) -> None:
    tied = compose(["experiment=quickstart", "launch.ranks=1", f"model.mup_base={SMALL}"]).require()
    for options in (VerifyOptions(), VerifyOptions(strict=True)):
        with pytest.raises(ModelError, match="tie_word_embeddings=false"):
            command.verify(tied, options)
    with pytest.raises(ModelError, match="tie_word_embeddings=false"):
        command.check_coordinates(tied, tmp_path / "none.png", steps=1, num_widths=2)


@pytest.mark.parametrize(("few", "least"), [("--widths=1", 2), ("--steps=0", 1)])
def test_widths_and_steps_that_show_no_growth_are_refused(
    few: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "experiment=quickstart", "--coordinates=none.png", few]) == EXIT_USER
    assert f"at least {least}" in capsys.readouterr().err


def check_coordinates(picture: Path, deviation: float) -> int:
    changes = ["model.config.tie_word_embeddings=false", f"model.config.initializer_range={deviation}"]
    recipe = compose(["experiment=quickstart", f"model.mup_base={SMALL}", *changes]).require()
    return command.check_coordinates(recipe, picture, steps=3, num_widths=3)


def test_outputs_are_flat_also_with_large_initial_values(tmp_path: Path) -> None:
    """Whose part in the logits shrinks with the width, as it is to."""
    assert check_coordinates(tmp_path / "flat.png", 0.1) == EXIT_DONE
    assert (tmp_path / "flat.png").stat().st_size > 0


@pytest.mark.grid
@pytest.mark.parametrize("wrong", [(1.0, None), (None, 1.0)], ids=("initial value", "rate"))
def test_a_head_that_does_not_follow_the_width_is_found(
    tmp_path: Path, wrong: tuple[float | None, float | None]
) -> None:
    original = oracle.widen

    def widen(wide: nn.Module, base: nn.Module) -> dict[str, tuple[float, float]]:
        found = original(wide, base)
        initial, rate = (own or right for own, right in zip(wrong, found["lm_head.weight"], strict=True))
        return found | {"lm_head.weight": (initial, rate)}

    with patch("framework.verify.oracle.widen", widen):
        assert check_coordinates(tmp_path / "grows.png", 0.1) == EXIT_FAILED
