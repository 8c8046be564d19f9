"""Attack a server of the embedded model, and measure the effect on its other clients.

python tests/hostile/run.py [--only NAME …] [--json FILE]. The server runs on a free port of 127.0.0.1. During each
attack a stream runs, and a small request is sent repeatedly; waits beyond their unloaded times are the attack's effect.
The exit code is 1 if a response was wrong or a wait exceeded its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attacks import ATTACKS, COMPLETIONS, HOST

MOST_STALL_SECONDS = 0.5  # for a running stream
MOST_WAIT_SECONDS = 2.0  # for a new, small request
MOST_CONNECTIONS = 128
# Short texts and times, so that everything takes minutes, and a KV cache for two full texts, so that a third must wait.
SERVE_OPTIONS = ("--max-positions", "2048", "--cache-gb", "0.2", "--client-timeout", "4", "--timeout", "120")
HEADERS = {"content-type": "application/json"}


@dataclass
class Served:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def metric(self, name: str) -> float:
        status, text = ask(self.port, "GET", "/metrics")
        assert status == 200
        lines = text.decode().splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"depthdecay_{name} "))


@contextlib.contextmanager
def served(model: str | None) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "depthdecay", "serve", "--host", HOST, "--port", str(port), *SERVE_OPTIONS]
    command += ["--max-connections", str(MOST_CONNECTIONS), *(["--model", model] if model else [])]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as told:
            process = subprocess.Popen(command, stdout=told, stderr=told)
        server = Served(process, port, log)
        try:
            while True:
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
                with contextlib.suppress(OSError):
                    if ask(port, "GET", "/health")[0] == 200:
                        break
                time.sleep(0.2)
            yield server
        finally:
            process.terminate()
            process.wait(120)


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=300)
    with contextlib.closing(connection):
        connection.request(method, path, None if body is None else json.dumps(body), HEADERS)
        response = connection.getresponse()
        return response.status, response.read()


class Bystanders:
    """Two honest clients: one with an endless stream, and one that sends small requests one after the other."""

    def __init__(self, port: int, stream_tokens: int = 1000) -> None:
        self.port = port
        self.stream_tokens = stream_tokens
        self.gaps: list[float] = []
        self.waits: list[float] = []
        self.failures: list[str] = []
        self._last_event: float | None = None
        self._asked: float | None = None
        self._end = threading.Event()
        self._threads = [threading.Thread(target=go) for go in (self._stream, self._ask_small)]

    def __enter__(self) -> Bystanders:
        for thread in self._threads:
            thread.start()
        while self._last_event is None:
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def since_now(self) -> None:
        """Forget earlier measurements; waits in progress keep counting."""
        self.gaps, self.waits, self.failures = [], [], []

    def longest(self) -> tuple[float, float]:
        """The longest gap and wait, including those still in progress."""
        now = time.monotonic()
        gap = 0.0 if self._last_event is None else now - self._last_event
        wait = 0.0 if self._asked is None else now - self._asked
        return max([*self.gaps, gap]), max([*self.waits, wait])

    def _stream(self) -> None:
        seed = 0
        while not self._end.is_set():
            seed += 1
            body = {"prompt": "Once upon a time", "max_tokens": self.stream_tokens, "temperature": 1, "seed": seed}
            try:
                self._one_stream({**body, "stream": True})
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"the stream: {type(error).__name__}")
                time.sleep(0.1)

    def _one_stream(self, body: dict[str, Any]) -> None:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=300)
        with contextlib.closing(connection):
            connection.request("POST", COMPLETIONS, json.dumps(body), HEADERS)
            response = connection.getresponse()
            if response.status != 200:
                self.failures.append(f"the stream: {response.status}")
                time.sleep(0.1)
                return
            said = b""
            self._last_event = None  # before its first token it is a new request, not a running stream
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                now = time.monotonic()
                if self._last_event is not None:
                    self.gaps.append(now - self._last_event)
                self._last_event, said = now, line
                if self._end.is_set():
                    return
            if said.strip() != b"data: [DONE]":
                self.failures.append(f"the stream ended with {said[:200]!r}")

    def _ask_small(self) -> None:
        while not self._end.is_set():
            self._asked = time.monotonic()
            try:
                status, said = ask(self.port, "POST", COMPLETIONS, {"prompt": "Hi", "max_tokens": 1, "temperature": 0})
                if status != 200:
                    self.failures.append(f"a small request: {status} {said[:200]!r}")
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"a small request: {type(error).__name__}")
            self.waits.append(time.monotonic() - self._asked)
            self._asked = None
            self._end.wait(0.1)


@dataclass
class Noticed:
    """The effect of one attack on the bystanders."""

    attack: str
    seconds: float
    stall_seconds: float  # longest gap of the stream, minus the unloaded one
    wait_seconds: float  # longest time of a small request, minus the unloaded one
    rss_before_mb: float
    rss_after_mb: float
    log_kb: float
    complaints: list[str] = field(default_factory=list)

    @property
    def is_fine(self) -> bool:
        is_quick = self.stall_seconds <= MOST_STALL_SECONDS and self.wait_seconds <= MOST_WAIT_SECONDS
        return is_quick and not self.complaints


def attack(server: Served, name: str, seconds: float, by: Bystanders, usual: tuple[float, float]) -> Noticed:
    rss, logged, started = server.rss_mb(), server.log.stat().st_size, time.monotonic()
    by.since_now()
    script = str(Path(__file__).parent / "attacks.py")
    command = [sys.executable, script, name, str(server.port), "--seconds", str(seconds)]
    command += ["--connections", str(2 * MOST_CONNECTIONS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    complaints = ran.stdout.splitlines() or ([ran.stderr[-500:]] if ran.returncode else [])
    _settle(server, by)
    gap, wait = by.longest()
    return Noticed(
        attack=name,
        seconds=time.monotonic() - started,
        stall_seconds=max(0.0, gap - usual[0]),
        wait_seconds=max(0.0, wait - usual[1]),
        rss_before_mb=rss,
        rss_after_mb=server.rss_mb(),
        log_kb=(server.log.stat().st_size - logged) / 1024,
        complaints=[*complaints, *dict.fromkeys(by.failures)],
    )


def _settle(server: Served, by: Bystanders) -> None:
    """Wait until only the bystanders are in the batch and make progress, so that an attack does not affect the next."""
    end = time.monotonic() + 120
    while server.metric("rows_running") + server.metric("requests_waiting") > 2 and time.monotonic() < end:
        time.sleep(0.2)
    asked = len(by.waits) + 2  # one may have been in progress
    while len(by.waits) < asked and time.monotonic() < end:
        time.sleep(0.05)


def show(noticed: list[Noticed], usual: tuple[float, float]) -> None:
    gap, wait = (1000 * seconds for seconds in usual)
    print(f"\nunloaded: {gap:.0f} ms between events of the stream, {wait:.0f} ms per small request")
    print(f"{'attack':26}{'stall, s':>10}{'wait, s':>10}{'RSS before, MB':>16}{'after':>8}{'log, KB':>9}{'took, s':>9}")
    for one in noticed:
        mark = "" if one.is_fine else "  !"
        figures = f"{one.stall_seconds:10.2f}{one.wait_seconds:10.2f}{one.rss_before_mb:16.0f}{one.rss_after_mb:8.0f}"
        print(f"{one.attack:26}{figures}{one.log_kb:9.0f}{one.seconds:9.0f}{mark}")
        for complaint in one.complaints:
            print(f"    {complaint}")
    print(f"stall: longest gap of the stream, limit {MOST_STALL_SECONDS} s; wait: of a new small request, limit")
    print(f"{MOST_WAIT_SECONDS} s; both minus their unloaded times. !: a limit was exceeded, or a response was wrong.")


def soak(server: Served, requests: int) -> dict[str, Any]:
    """Mixed requests with disconnects, using depthdecay's own load test."""
    from depthdecay.bench.loadtest import Load, run_load

    depth = ({"mode": "full"}, {"mode": "lossless"}, {"alpha": 0.95}, {"alpha": 0.99})
    load = Load(f"http://{HOST}:{server.port}", requests, 24, max_tokens=32, depth=depth, hang_up=0.2, temperature=0.7)
    before = server.rss_mb()
    figures = run_load(load).figures()
    return {**figures, "rss_before_mb": before, "rss_after_mb": server.rss_mb()}


def short_requests(server: Served, count: int) -> list[dict[str, float]]:
    """The server's memory over many short requests."""
    told = [{"requests": 0.0, "rss_mb": server.rss_mb()}]
    left = iter(range(count))
    lock = threading.Lock()

    def go() -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            ask(server.port, "POST", COMPLETIONS, {"prompt": f"Number {number}", "max_tokens": 1})
            if (number + 1) % 1000 == 0:
                told.append({"requests": number + 1.0, "rss_mb": server.rss_mb()})

    threads = [threading.Thread(target=go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, help="run only these attacks")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each attack")
    parser.add_argument("--model", help="a model other than the embedded one")
    parser.add_argument("--requests", type=int, default=0, help="then send this many mixed requests with disconnects")
    parser.add_argument("--short-requests", type=int, default=0, help="then measure memory over this many requests")
    parser.add_argument("--json", help="write the figures to this file")
    given = parser.parse_args()
    from depthdecay.result_files import require_writable, write_result

    require_writable(given.json)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    figures: dict[str, Any] = {}
    is_fine = True
    with served(given.model) as server:
        with Bystanders(server.port) as by:
            time.sleep(2)
            by.since_now()
            time.sleep(given.seconds)
            usual = statistics.median(by.gaps), statistics.median(by.waits)
            noticed = []
            for name in given.only or ATTACKS:
                noticed.append(attack(server, name, given.seconds, by, usual))
                print(f"{name}: {'fine' if noticed[-1].is_fine else '!'}", flush=True)
        show(noticed, usual)
        figures["unloaded_ms"] = {"between_events": 1000 * usual[0], "small_request": 1000 * usual[1]}
        figures["wanted"] = {"stall_seconds": MOST_STALL_SECONDS, "wait_seconds": MOST_WAIT_SECONDS}
        figures["attacks"] = [asdict(one) for one in noticed]
        is_fine = all(one.is_fine for one in noticed)
        if given.requests:
            figures["soak"] = soak(server, given.requests)
            print(json.dumps(figures["soak"], indent=2))
            is_fine &= not figures["soak"]["errors"] and not any(figures["soak"]["left_behind"].values())
        if given.short_requests:
            figures["short_requests"] = short_requests(server, given.short_requests)
            print(json.dumps(figures["short_requests"], indent=2))
    said = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    command = f"python tests/hostile/run.py {shlex.join(said)}"
    write_result(given.json, {"command": command, "model": given.model or "smollm2-135m", **figures})
    sys.exit(not is_fine)


if __name__ == "__main__":
    main()
