"""Which models take random numbers in training: by their config, by their modules, by whose code it is."""

import pytest
from torch import nn

from framework.model.load import build_meta
from framework.parallel.tensor.regions import uses_rng_in_training
from tests.families import build_config, family
from tests.ranks.spare_model import SPARE


def test_a_model_without_dropout_takes_none():
    assert not uses_rng_in_training(build_meta(build_config(family("llama"))))


@pytest.mark.parametrize("changes", [{"attention_dropout": 0.1}, {"nested": {"router_jitter_noise": 0.1}}])
def test_a_config_that_names_one_does(changes):
    assert uses_rng_in_training(build_meta(build_config(family("llama"), **changes)))


def test_a_module_that_drops_does_whatever_the_config_says():
    model = build_meta(build_config(family("llama")))
    model.model.layers[1].mlp.act_fn = nn.Dropout(0.1)
    assert uses_rng_in_training(model)


def test_code_that_is_not_hugging_faces_is_taken_to():
    assert uses_rng_in_training(build_meta(build_config(SPARE)))
