"""What a plan takes a device to compute and to send: the GPU that the recipe names, or one that is said to be assumed."""

import pytest

from framework.plan.machine import ATTENTION_SHARE, RATES, find_machine
from framework.recipe.schema import Launch


@pytest.mark.parametrize(
    ("gres", "name", "is_assumed"),
    [
        ("gpu:h100", "H100", False),
        ("gpu:nvidia_a100_80gb:8", "A100", False),
        ("gpu", "H100", True),
        ("gpu:l40s", "H100", True),  # no rates of it are listed
        (None, "H100", True),
    ],
)
def test_the_gpu_that_the_recipe_names_is_taken_and_another_said_to_be_assumed(gres, name, is_assumed):
    machine = find_machine(Launch(gres=gres))
    assert (machine.name, machine.is_assumed) == (name, is_assumed)
    assert (machine.in_node.rate, machine.between_nodes.rate, machine.memory_rate) == RATES[name]
    assert machine.in_node.latency_s < machine.between_nodes.latency_s


def test_attention_reaches_a_share_of_the_peak():
    assert find_machine(Launch(gres="gpu:h100")).attention_flops == pytest.approx(ATTENTION_SHARE * 989.4e12)


def test_a_message_takes_its_bytes_and_a_latency_and_no_message_takes_no_time():
    link = find_machine(Launch()).in_node
    assert link.seconds(45e9, messages=3) == pytest.approx(0.1 + 3 * link.latency_s)
    assert link.seconds(0) == 0
