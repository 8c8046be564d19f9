"""Shared by the server's tests: an engine with a tiny chat model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from depthdecay import Engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    from serving import tiny_engine  # needs the serve extra

    return tiny_engine(tmp_path_factory.mktemp("model"))
