"""The gradient noise scale: unbiased where noise is known, and the same in every layout."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from framework.errors import EXIT_DONE
from framework.optim.optimizers import average_squares, estimate_noise_scale
from framework.recipe.compose import compose
from framework.track.jsonl import read_records
from tests import tiny_run
from tests.grid import IN_TURN
from tests.ranks.pool import RankPool
from tests.ranks.spiking_run import compose_run, train_body

pytestmark = IN_TURN

BETA, UPDATES = 0.9, 40
KV_HEADS = "model.config.num_key_value_heads=2"


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_known_noise_is_found(noise: float) -> None:
    torch.manual_seed(0)
    signal, found = 0.05 * torch.randn(1000, dtype=torch.float64), []
    for _ in range(30):
        moment, squares = torch.zeros_like(signal), None
        for number in range(UPDATES):
            gradient = signal + noise * torch.randn_like(signal) / len(signal) ** 0.5
            moment.mul_(BETA).add_(gradient, alpha=1 - BETA)
            squares = average_squares(squares, float(gradient.norm()), BETA, number)
        found.append(estimate_noise_scale(squares or 0.0, float(moment.square().sum()), BETA, UPDATES))
    expected = noise**2 / float(signal.square().sum())
    assert torch.tensor(found, dtype=torch.float64).mean().item() == pytest.approx(expected, rel=0.02)


def test_nothing_is_said_before_two_gradients_and_of_noise_alone() -> None:
    assert estimate_noise_scale(0.1, 0.01, BETA, 1) is None
    assert estimate_noise_scale(1 - BETA**UPDATES, 0.0, BETA, UPDATES) is None


def test_layouts_and_moments_do_not_matter(pool: RankPool, tmp_path: Path) -> None:
    tiny_run.write_corpus(tmp_path / "corpus")
    words = ("precision=fp64", "track.noise_scale=true", "train.steps=6", "checkpoint.every_steps=null", KV_HEADS)
    layouts = {
        "one": ("launch.ranks=1",),
        "zero": ("launch.ranks=2", "zero.stage=3"),
        "tp": ("launch.ranks=2", "parallel.tp=2", "parallel.sequence=true"),
        "host": ("launch.ranks=1", "memory.offload.home=host"),
    }
    found = {}
    for name, layout in layouts.items():
        recipe, run_dir = compose_run(tmp_path, *words, *layout), tmp_path / name
        run_dir.mkdir()
        ended = pool.run(recipe.launch.ranks or 1, train_body, recipe, run_dir, (0, 0))
        assert {each.code for each in ended} == {EXIT_DONE}, ended[0].message
        found[name] = [each["noise_scale_tokens"] for each in read_records(run_dir / "metrics.jsonl")]
    assert found["one"][0] is None
    assert all(each is not None and each > 0 for each in found["one"][1:])
    for values in found.values():
        assert values[1:] == pytest.approx(found["one"][1:], rel=1e-9)


DISK = ("memory.offload.optimizer=1", "memory.offload.home=disk", "memory.offload.disk_path=/tmp")


@pytest.mark.parametrize(("words", "fix"), [(["optim.name=lion"], "adamw"), (DISK, "false")])
def test_bad_input(words: Sequence[str], fix: str) -> None:
    found = compose([*tiny_run.RECIPE, "track.noise_scale=true", *words]).problems
    assert [each.fix.rpartition("=")[2] for each in found if each.key == "track.noise_scale"] == [fix]
