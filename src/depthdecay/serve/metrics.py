"""Prometheus metrics, in the app's own registry."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from depthdecay.batching.batcher import Batcher, Update
from depthdecay.serve.responses import Account
from depthdecay.serve.worker import Worker

_TO_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Metrics for operators. Layers are those of decode passes, counted where they run."""

    def __init__(self, worker: Worker) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"depthdecay_{name}", about, labels, registry=registry)

        def gauge(name: str, about: str, read: Any) -> None:
            Gauge(f"depthdecay_{name}", about, registry=registry).set_function(read)

        self.requests = counter("requests", "Requests by path and status.", "path", "status")
        self.broken_off = counter("answers_broken_off", "Answers that did not complete: disconnects, timeouts, errors.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens prefilled.")
        self.tokens = counter("tokens", "Tokens generated.")
        self.layers_executed = counter("layers_executed", "Layers times rows, run in decode passes.")
        self.layers_saved = counter("layers_saved", "Layers times rows, saved by decay.")
        self.drafted = counter("drafted_tokens", "Drafts of lossless requests that were verified.")
        self.accepted = counter("accepted_tokens", "Drafts of lossless requests that were accepted.")
        self.row_errors = counter("row_errors", "Rows whose pass failed.")
        self.failed_passes = counter("failed_passes", "Passes that failed, including those retried in halves.")
        self.to_first = Histogram(
            "depthdecay_time_to_first_token_seconds",
            "From the request to its first token.",
            buckets=[*(bound for bound in _TO_FIRST if bound < worker.timeout_seconds), worker.timeout_seconds],
            registry=registry,
        )
        self.per_token = Histogram(
            "depthdecay_time_per_output_token_seconds",
            "Time between tokens, averaged over an answer.",
            buckets=_PER_TOKEN,
            registry=registry,
        )
        batcher = worker.batcher
        gauge("requests_waiting", "Sequences that wait to join the batch.", lambda: worker.waiting)
        gauge("rows_running", "Sequences in the batch.", lambda: len(batcher.rows))
        gauge("exact", "1 when answers are batch-invariant.", lambda: float(batcher.inexact is None))
        gauge("ready", "1 when requests are accepted.", lambda: float(worker.state == "ready"))
        gauge("cache_used_bytes", "KV cache in use.", lambda: batcher.usage().used)
        gauge("cache_free_bytes", "KV cache free.", lambda: batcher.usage().free)
        gauge("cache_saved_bytes", "KV cache that full depth would use in addition.", lambda: batcher.usage().saved)
        self._seen: dict[Counter, int] = {}

    def step(self, batcher: Batcher, updates: list[Update]) -> None:
        """Called after every step, in the worker's thread."""
        now = batcher.counters
        values = {
            self.prompt_tokens: now.prompt_tokens,
            self.tokens: now.tokens,
            self.layers_executed: now.layers_executed,
            self.layers_saved: now.layers_full - now.layers_executed,
            self.drafted: now.drafted,
            self.accepted: now.accepted,
            self.row_errors: now.errors,
            self.failed_passes: now.failed_passes,
        }
        for counter, value in values.items():
            counter.inc(value - self._seen.get(counter, 0))
        self._seen = values

    def answered(self, account: Account) -> None:
        if account.first_token is None:
            return
        self.to_first.observe(account.first_token - account.started)
        for first, last, count in account.spans.values():
            if count > 1:
                self.per_token.observe((last - first) / (count - 1))

    def text(self) -> bytes:
        return generate_latest(self.registry)
