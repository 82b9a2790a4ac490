"""The site's tests are a session of their own, in which fewer skips are allowed, too."""

import pytest
from skips import Skips


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips())
