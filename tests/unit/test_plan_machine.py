"""What a plan takes a device to compute and to send: the GPU that the recipe names, or one that is said to be assumed."""

import pytest

from framework.plan.machine import ATTENTION_SHARE, LINKS, find_machine
from framework.recipe.schema import Launch


@pytest.mark.parametrize(
    ("gres", "name", "is_assumed"),
    [
        ("gpu:h100", "H100", False),
        ("gpu:nvidia_a100_80gb:8", "A100", False),
        ("gpu", "H100", True),
        ("gpu:l40s", "H100", True),  # no links of it are listed
        (None, "H100", True),
    ],
)
def test_the_gpu_that_the_recipe_names_is_taken_and_another_said_to_be_assumed(gres, name, is_assumed):
    machine = find_machine(Launch(gres=gres))
    assert (machine.name, machine.is_assumed) == (name, is_assumed)
    assert (machine.in_node, machine.between_nodes) == LINKS[name]


def test_attention_reaches_a_share_of_the_peak():
    assert find_machine(Launch(gres="gpu:h100")).attention_flops == pytest.approx(ATTENTION_SHARE * 989.4e12)
