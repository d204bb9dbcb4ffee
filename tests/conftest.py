"""Options of the whole test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew instead of comparing with it"
    )
    parser.addoption(
        "--update-docs", action="store_true", help="write the outputs shown in README.md and docs anew"
    )


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are written anew."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def update_docs(request: pytest.FixtureRequest) -> bool:
    """Whether the outputs that pages show are written anew."""
    return bool(request.config.getoption("--update-docs"))
