"""Load test of a running server: throughput, latency, errors, and whether every answer arrived complete."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from depthdecay.argument_checks import is_loopback, whole_number
from depthdecay.errors import ArgumentError, DepthDecayError, install, one_line

MOST_REQUESTS = 100_000
MOST_CONCURRENCY = 1024
_SUBJECTS = ("rain", "bread", "a violin", "the moon", "paper", "a bridge", "salt", "the heart", "glass", "a compass")
_STARTS = ("Tell me about", "The history of", "A short story about", "How one would draw", "Ten facts about")


@dataclass(frozen=True)
class Load:
    """Which requests are sent, to which server, and when."""

    url: str = "http://127.0.0.1:8000"
    requests: int = 100
    concurrency: int = 32
    arrival: str = "closed"  # the next request when one ends; "poisson": at random times, `rate` per second
    rate: float = 2.0
    max_tokens: int = 128
    depth: tuple[dict[str, Any], ...] = ({},)  # depth settings; each request picks one at random
    hang_up: float = 0.0  # share of clients that disconnect midway
    temperature: float = 0.0
    seed: int = 0
    api_key: str | None = None
    timeout_seconds: float = 600.0
    allow_remote: bool = False

    def __post_init__(self) -> None:
        whole_number("requests", self.requests, 1, MOST_REQUESTS)
        whole_number("concurrency", self.concurrency, 1, MOST_CONCURRENCY)
        whole_number("max_tokens", self.max_tokens, 1)
        if self.arrival not in ("closed", "poisson"):
            raise ArgumentError(f"arrival is '{self.arrival}'; expected closed or poisson", "arrival")
        if not 0 < self.rate <= 10_000:
            raise ArgumentError(f"rate is {self.rate}; expected requests per second, above 0 and at most 10000", "rate")
        if not 0 <= self.hang_up <= 1:
            raise ArgumentError(f"hang_up is {self.hang_up}; expected a share from 0 to 1", "hang_up")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ArgumentError(f"url is '{self.url}'; expected a URL such as http://127.0.0.1:8000", "url")
        if not self.allow_remote and not is_loopback(parts.hostname):
            raise ArgumentError(
                f"{parts.hostname} is another machine; if you are permitted to load-test it, set allow_remote",
                "allow_remote",
            )


@dataclass
class Outcome:
    """One request. `kind` is "whole", "hung up", or what went wrong."""

    kind: str = "broken off"
    tokens: int = 0
    first_token: float | None = None
    per_token: float | None = None
    layers_executed: int = 0
    layers_full: int = 0


@dataclass
class LoadReport:
    """All requests together."""

    model: str
    seconds: float
    outcomes: list[Outcome] = field(default_factory=list)
    left_behind: dict[str, float] = field(default_factory=dict)  # still held by the server after the last client

    @property
    def whole(self) -> int:
        return sum(outcome.kind == "whole" for outcome in self.outcomes)

    @property
    def errors(self) -> dict[str, int]:
        return dict(Counter(o.kind for o in self.outcomes if o.kind not in ("whole", "hung up")))

    def figures(self) -> dict[str, Any]:
        tokens = sum(outcome.tokens for outcome in self.outcomes)
        executed = sum(outcome.layers_executed for outcome in self.outcomes)
        full = sum(outcome.layers_full for outcome in self.outcomes)
        return {
            "model": self.model,
            "seconds": self.seconds,
            "requests": len(self.outcomes),
            "whole": self.whole,
            "hung_up": sum(outcome.kind == "hung up" for outcome in self.outcomes),
            "errors": self.errors,
            "left_behind": self.left_behind,
            "tokens": tokens,
            "tokens_per_second": tokens / self.seconds,
            "requests_per_second": len(self.outcomes) / self.seconds,
            "layer_speedup": full / executed if executed else None,
            "first_token_ms": percentiles([o.first_token for o in self.outcomes]),
            "per_token_ms": percentiles([o.per_token for o in self.outcomes]),
        }


def percentiles(seconds: list[float | None]) -> dict[str, float] | None:
    """Milliseconds at p50, p95 and p99, each an observed value."""
    known = sorted(value for value in seconds if value is not None)
    if not known:
        return None
    return {f"p{p}": 1000 * known[min(len(known) - 1, -(-len(known) * p // 100) - 1)] for p in (50, 95, 99)}


def run_load(load: Load, progress: Callable[[int], None] | None = None) -> LoadReport:
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise DepthDecayError(f"a load test needs httpx, which is not installed; {install('serve')}") from None
    return asyncio.run(_run(load, progress or (lambda done: None)))


async def _run(load: Load, progress: Callable[[int], None]) -> LoadReport:
    import httpx

    generator = random.Random(load.seed)
    asks = [ask_for(load, generator, number) for number in range(load.requests)]
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=load.concurrency)
    free = asyncio.Semaphore(load.concurrency)
    outcomes: list[Outcome] = []
    async with httpx.AsyncClient(
        base_url=load.url, headers=headers, limits=limits, timeout=load.timeout_seconds
    ) as client:
        model = await _served_model(client, load.url)
        started = time.perf_counter()

        async def go(body: dict[str, Any], hang_up_after: int | None, arrived: float) -> None:
            try:
                outcomes.append(await _answer(client, body, hang_up_after, arrived))
            finally:
                free.release()
                progress(len(outcomes))

        tasks = []
        due = started
        for body, hang_up_after in asks:
            if load.arrival == "poisson":
                due += generator.expovariate(load.rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await free.acquire()
            # A Poisson arrival that finds no free slot has been waiting since its arrival.
            arrived = due if load.arrival == "poisson" else time.perf_counter()
            tasks.append(asyncio.create_task(go(body, hang_up_after, arrived)))
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - started
        return LoadReport(model, seconds, outcomes, await _left_behind(client))


async def _left_behind(client: Any) -> dict[str, float]:
    """What the server still holds shortly after the last client: should be nothing, unless it serves others too."""
    names = ("rows_running", "requests_waiting", "cache_used_bytes")
    held: dict[str, float] = {}
    for _ in range(50):
        lines = (await client.get("/metrics")).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
        held = {name: float(values.get(f"depthdecay_{name}", "nan")) for name in names}
        if not any(held.values()):
            break
        await asyncio.sleep(0.1)
    return held


async def _served_model(client: Any, url: str) -> str:
    """The name of the model; an error if there is no server, or it is not ready."""
    import httpx

    try:
        health = await client.get("/health")
    except httpx.HTTPError as error:
        raise DepthDecayError(f"no server answers at {url}: {one_line(error)}; start depthdecay serve first") from None
    if health.status_code != 200:
        raise DepthDecayError(f"the server at {url} is not ready: {one_line(health.text)}")
    models = await client.get("/v1/models")
    if models.status_code != 200:
        raise DepthDecayError(f"the server at {url} does not list its models: {one_line(models.text)}")
    return str(models.json()["data"][0]["id"])


def ask_for(load: Load, generator: random.Random, number: int) -> tuple[dict[str, Any], int | None]:
    prompt = f"{generator.choice(_STARTS)} {generator.choice(_SUBJECTS)}, part {number}:"
    depth = generator.choice(load.depth)
    leaves = generator.random() < load.hang_up
    body = {
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        "depth_decay": {**depth, "depths": True},
    }
    return body, generator.randrange(1, max(2, load.max_tokens // 2)) if leaves else None


async def _answer(client: Any, body: dict[str, Any], hang_up_after: int | None, started: float) -> Outcome:
    import httpx

    outcome = Outcome()
    last = started
    reason, told, ended, pieces = None, None, False, 0
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                outcome.kind = f"status {response.status_code}"
                return outcome
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    outcome.kind = f"error {event['error'].get('code')}"
                    return outcome
                told = event.get("usage") or told
                depth = event.get("depth_decay", {})
                if depth.get("depths"):
                    last = time.perf_counter()
                    outcome.first_token = outcome.first_token or last - started
                    outcome.tokens += len(depth["depths"])
                outcome.layers_executed = depth.get("layers_executed", outcome.layers_executed)
                outcome.layers_full = depth.get("layers_full", outcome.layers_full)
                reason = (event["choices"] or [{}])[0].get("finish_reason") or reason
                pieces += 1
                if hang_up_after is not None and pieces >= hang_up_after:
                    outcome.kind = "hung up"
                    return outcome
    except (httpx.HTTPError, ValueError) as error:
        outcome.kind = type(error).__name__
        return outcome
    if outcome.first_token is not None and outcome.tokens > 1:
        outcome.per_token = (last - started - outcome.first_token) / (outcome.tokens - 1)
    counted = told is not None and told["completion_tokens"] == outcome.tokens
    if ended and counted and reason is not None:
        outcome.kind = "whole"
    return outcome
