"""What a batch of requests gains from a plan, on random weights in a real model's shape, without HTTP.

python benchmarks/serving_shapes.py [--shape llama-2-7b] [--concurrency 64] [--json FILE]. First a closed loop: as soon
as an answer ends, the next request comes. Full depth and decay take turns, and one round of each runs eagerly. Then
requests arrive at random times, at fractions of the closed loop's full-depth rate, at the same times for both modes.
Answers have a fixed length. Times are wall-clock on the host: to the first token from when a request was due, then per
token of each answer.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from depthdecay import Engine, Plan
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.bench.model_shapes import SHAPES, random_model
from depthdecay.engine.request import UNENDING, prepare_request
from depthdecay.model.costs import cost_speedup
from depthdecay.model.devices import choose_device, choose_dtype
from depthdecay.result_files import require_writable, write_result


@dataclass
class Run:
    """One mode under one load."""

    seconds: float = 0.0
    tokens: int = 0
    due: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    used_bytes: list[int] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)

    def figures(self, tokens: int) -> dict[str, Any]:
        first = [1000 * (self.first[number] - due) for number, due in self.due.items()]
        each = [1000 * (self.last[number] - self.first[number]) / max(tokens - 1, 1) for number in self.due]
        return {
            "requests": len(self.due),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            "first_token_ms": spread(first),
            "token_ms": spread(each),
            "step_ms": spread([1000 * step for step in self.steps]),
            "rows": round(statistics.mean(self.rows), 1),
            "cache_gb_peak": round(max(self.used_bytes) / 1e9, 3),
            "cache_gb_mean": round(statistics.mean(self.used_bytes) / 1e9, 3),
            "cache_gb_saved_most": round(max(self.saved_bytes) / 1e9, 3),
        }


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: round(ordered[int(share * (len(ordered) - 1))], 2) for name, share in SHARES.items()}


SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class Load:
    """Requests of one kind for one batcher."""

    def __init__(self, batcher: Batcher, prompt: int, tokens: int) -> None:
        self.batcher = batcher
        self.prompt, self.tokens = prompt, tokens
        self.vocabulary = batcher.stack.model.get_input_embeddings().weight.shape[0]

    def submit(self, run: Run, mode: str, due: float) -> None:
        generator = random.Random(len(run.due))
        prompt = [generator.randrange(3, self.vocabulary) for _ in range(self.prompt)]
        request = prepare_request(self.batcher.engine, [prompt], self.tokens, UNENDING)
        (number,) = self.batcher.submit(request, None, mode)
        run.due[number] = due

    def step(self, run: Run) -> int:
        """One step; returns how many answers ended."""
        started = time.perf_counter()
        updates = self.batcher.step()
        now = time.perf_counter()
        run.steps.append(now - started)
        run.rows.append(len({update.id for update in updates}))
        usage = self.batcher.usage()
        run.used_bytes.append(usage.used)
        run.saved_bytes.append(usage.saved)
        for update in updates:
            if update.error is not None:
                raise update.error
            run.tokens += 1
            run.first.setdefault(update.id, now)
            run.last[update.id] = now
        return sum(update.finished for update in updates)

    def closed(self, mode: str, concurrency: int, requests: int) -> Run:
        """`concurrency` requests at a time until all are answered."""
        run, started, ended = Run(), time.perf_counter(), 0
        while ended < requests:
            while len(run.due) < min(requests, ended + concurrency):
                self.submit(run, mode, time.perf_counter())
            ended += self.step(run)
        run.seconds = time.perf_counter() - started
        return run

    def poisson(self, mode: str, rate: float, requests: int) -> Run:
        """Requests at random times, which are the same for every mode."""
        generator = random.Random(0)
        waits = [generator.expovariate(rate) for _ in range(requests)]
        run, started, ended = Run(), time.perf_counter(), 0
        due = [started + sum(waits[: place + 1]) for place in range(requests)]
        while ended < requests:
            now = time.perf_counter()
            while len(run.due) < requests and due[len(run.due)] <= now:
                self.submit(run, mode, due[len(run.due)])
            if self.batcher.is_idle:
                time.sleep(max(0.0, due[len(run.due)] - time.perf_counter()))
                continue
            ended += self.step(run)
        run.seconds = time.perf_counter() - started
        return run


def joined(runs: list[Run]) -> Run:
    """Several rounds as one run; their request ids are distinct."""
    whole = Run()
    for run in runs:
        whole.seconds += run.seconds
        whole.tokens += run.tokens
        for name in ("due", "first", "last"):
            getattr(whole, name).update(getattr(run, name))
        for name in ("steps", "rows", "used_bytes", "saved_bytes"):
            getattr(whole, name).extend(getattr(run, name))
    return whole


def started(engine: Engine, arguments: argparse.Namespace) -> Load:
    positions = arguments.prompt + arguments.tokens
    settings = BatchSettings(max_batch=arguments.concurrency, prefill_tokens=1024, max_positions=positions)
    batcher = Batcher(engine, settings)
    batcher.warm_up()
    return Load(batcher, arguments.prompt, arguments.tokens)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--speedup", default="1.5")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the closed loop")
    parser.add_argument(
        "--rates", default="0.25,0.5,0.8", help="arrival rates, as fractions of the closed loop's at full depth"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of arrivals at each rate")
    parser.add_argument("--compile", action="store_true", help="compile the layers that graphs capture")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    if arguments.json:
        require_writable(arguments.json)
    begun = time.perf_counter()
    device, dtype = choose_device(arguments.device), choose_dtype(arguments.dtype)
    assert dtype is not None
    model = random_model(arguments.shape, device, dtype)
    layers = model.config.num_hidden_layers
    plan = Plan.for_speedup(layers, arguments.speedup, over_tokens=arguments.tokens)
    modes, concurrency, tokens = ("full", "decay"), arguments.concurrency, arguments.tokens
    on_cuda = device.type == "cuda"
    rows: list[dict[str, Any]] = []

    def tell(load: str, mode: str, run: Run, **more: Any) -> None:
        rows.append({"load": load, "mode": mode, **more, **run.figures(tokens)})
        print(f"{time.perf_counter() - begun:6.1f} s", json.dumps(rows[-1]), flush=True)

    eager = started(Engine(model, None, plan, graphs=False), arguments)
    eager.closed("full", 1, 1)  # warm-up
    for mode in modes:
        tell("closed, eager", mode, eager.closed(mode, concurrency, concurrency))
    del eager
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() if on_cuda else 0
    warming = time.perf_counter()
    load = started(Engine(model, None, plan, compile=arguments.compile and on_cuda), arguments)
    warming = time.perf_counter() - warming
    captured = torch.cuda.memory_reserved() - before - load.batcher.usage().total if on_cuda else 0
    for mode in modes:
        load.closed(mode, concurrency, concurrency)  # captures the remaining graphs
    closed: dict[str, list[Run]] = {mode: [] for mode in modes}
    for number in range(arguments.rounds):
        for mode in modes if number % 2 == 0 else modes[::-1]:
            closed[mode].append(load.closed(mode, concurrency, 2 * concurrency))
    speeds = {mode: [run.tokens / run.seconds for run in runs] for mode, runs in closed.items()}
    for mode, runs in closed.items():
        tell("closed", mode, joined(runs), rounds=[round(speed, 1) for speed in speeds[mode]])
    full_rate = statistics.median(speeds["full"]) / tokens
    for share in map(float, arguments.rates.split(",")):
        rate = share * full_rate
        for mode in modes:
            run = load.poisson(mode, rate, max(8, round(rate * arguments.seconds)))
            tell("poisson", mode, run, share=share, requests_per_second=round(rate, 2))
    ideal = cost_speedup(plan, load.batcher.stack, tokens)
    pairs = zip(speeds["decay"], speeds["full"], strict=True)
    ratio = statistics.median(decay / full for decay, full in pairs)
    graphs = load.batcher.runner.graphs
    figures: dict[str, Any] = {
        "decay_over_full": round(ratio, 3),
        "layer_speedup": round(plan.layer_speedup(tokens), 3),
        "cost_speedup": round(ideal, 3),
        "share_of_ideal": round(ratio / ideal, 3),
        "graphs": len(graphs.graphs.by_key) if graphs is not None else 0,
        "graphs_gb": round(captured / 1e9, 3),
        "warm_up_seconds": round(warming, 2),
        "whole_seconds": round(time.perf_counter() - begun, 1),
    }
    print(json.dumps(figures))
    if arguments.json:
        names = ("concurrency", "prompt", "tokens", "speedup", "rounds", "rates", "seconds", "dtype", "compile")
        settings = {name: getattr(arguments, name) for name in names} | {"device": device.type}
        command = f"python benchmarks/serving_shapes.py {shlex.join(sys.argv[1:])}"
        told = {"command": command, "model": arguments.shape, "serving_shapes": settings, "plan": plan.describe()}
        write_result(arguments.json, {**told, **figures, "rows": rows})


if __name__ == "__main__":
    main()
