"""What the tests of the server share: an engine of a tiny chat model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from depthdecay import Engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    from serving import tiny_engine  # needs what the server needs

    return tiny_engine(tmp_path_factory.mktemp("model"))
