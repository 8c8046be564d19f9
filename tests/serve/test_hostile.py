"""Every attack of tests/hostile once, scaled down, against a tiny server: it responds correctly and keeps running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from attacks import ATTACKS, Target  # noqa: E402
from serving import Running, post, running, tiny_engine, until  # noqa: E402

from depthdecay.batching.batcher import BatchSettings  # noqa: E402
from depthdecay.serve.connections import ConnectionLimits  # noqa: E402
from depthdecay.serve.hosts import allowed_hosts  # noqa: E402


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = tiny_engine(tmp_path_factory.mktemp("model"))
    # Four rows, so that eight requests at once have to wait for each other.
    batch = BatchSettings(max_batch=4, cohort_seconds=0)
    limits = ConnectionLimits(max_connections=12, client_seconds=2.0)
    with running(engine, batch, limits=limits, allowed_hosts=allowed_hosts("127.0.0.1", ())) as server:
        yield server


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_in_a_small_dose(server: Running, name: str) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    target = Target(port, seconds=0.3, clients=2, connections=16, body_bytes=20_000)
    ATTACKS[name](target)
    assert not target.complaints
    until(server.is_clean, "an empty batch")
    assert post(server, {"prompt": "a", "max_tokens": 1}).status_code == 200
