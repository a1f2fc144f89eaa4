"""One browser for all of these tests."""

import os
from collections.abc import Iterator

import pytest

from tests.browser.chromium import Chromium, find_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        reason = "no Chromium: scripts/install_browser.sh"
        if os.environ.get("REQUIRE_BROWSER", "0") in ("", "0"):
            pytest.skip(reason)
        pytest.fail(f"REQUIRE_BROWSER is set, but {reason}")
    chromium = Chromium(program, tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()
