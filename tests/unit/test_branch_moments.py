"""Moments that begin at zero where a branch begins: every pipeline stage's are named, once."""

from types import SimpleNamespace
from typing import Any

import pytest

from framework.train import state


def test_moments_of_all_ranks_are_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [["a", "d"], [], ["b", "c", "d"]]
    monkeypatch.setattr(state, "all_gather_object", lambda own, world: found)
    world: Any = SimpleNamespace(rank=0)
    state.report_new_moments([], "base@3", world)
    assert "moments begin at zero, as base@3 lacks them or some: a, b, c and 1 more" in capsys.readouterr().err
    found[:] = [[], []]
    state.report_new_moments([], "base@3", world)
    assert capsys.readouterr().err == ""
