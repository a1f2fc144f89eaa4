"""Key-value heads where layers have numbers of their own, as Gemma 4's: 8 in a window, 2 over the whole context."""

import pytest

from framework.errors import ModelError
from framework.model.load import load_config
from framework.parallel.tensor.partition import ranks_per_kv_head
from framework.recipe.compose import compose


@pytest.fixture(scope="module")
def config():
    return load_config(compose(["model=gemma4_26b_a4b"]).require().model)


def test_degrees_up_to_the_fewest_heads_share_none(config):
    assert [ranks_per_kv_head(config, tp) for tp in (1, 2)] == [1, 1]


def test_degrees_at_which_some_layers_alone_share_heads_are_refused(config):
    with pytest.raises(ModelError, match=r"parallel\.tp=4: layers have 2 and 8 .* use parallel\.tp=2"):
        ranks_per_kv_head(config, 4)
