"""The log: one JSON object per line, rate-limited so that clients cannot flood it."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback as tracebacks
from collections.abc import Callable
from typing import Any

# Loggers that any client can trigger at will: with bytes that are not HTTP, or connections that end abruptly.
_RATE_LIMITED = ("asyncio", "uvicorn.error", "depthdecay.serve.connections")


class JsonLines(logging.Formatter):
    """Logs request ids and figures, but never prompts, answers or keys."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname.lower()}
        line["event"] = record.getMessage()
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            # The type and location, not the message: libraries put their inputs into messages.
            line["error"] = record.exc_info[0].__name__ if record.exc_info[0] else ""
            line["at"] = _places(record.exc_info[2])
        return json.dumps(line)


def _places(traceback: Any) -> list[str]:
    return [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in tracebacks.extract_tb(traceback)[-8:]]


class RateLimit(logging.Filter):
    """Passes `most` records per period; the first record of the next period reports how many were left out."""

    def __init__(self, most: int = 10, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.most = most
        self.seconds = seconds
        self.clock = clock
        self._begun = clock()
        self._seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = self.clock()
        if now - self._begun >= self.seconds:
            left_out = self._seen - self.most
            self._begun, self._seen = now, 0
            if left_out > 0:
                record.fields = {**getattr(record, "fields", {}), "left_out": left_out}
        self._seen += 1
        return self._seen <= self.most


def log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("depthdecay.serve", "depthdecay.batching", "uvicorn", "asyncio"):
        named = logging.getLogger(name)
        named.handlers = [handler]
        named.propagate = False
        named.setLevel(logging.INFO)
    for name in _RATE_LIMITED:
        logging.getLogger(name).filters = [RateLimit()]
