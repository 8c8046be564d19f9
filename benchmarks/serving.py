"""Throughput of our server at full depth and with a plan, and of `transformers serve`, in turns.

python benchmarks/serving.py [--rounds 3] [--requests 64] [--json FILE]. Both serve the same weights in float32 on CPUs
and stream over HTTP to the same number of clients. All answers have the same length, since end of text is disabled.
Each round runs all of them, so that other load on the machine affects all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from depthdecay import Plan, load
from depthdecay.bench.loadtest import Load, ask_for, run_load
from depthdecay.model.costs import cost_speedup
from depthdecay.model.layers import LayerStack
from depthdecay.result_files import write_result


@contextlib.contextmanager
def serving(command: list[str], threads: int) -> Iterator[str]:
    """A server process, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([*command, "--port", str(port)], env=environment, **quiet)
    try:
        while True:
            assert process.poll() is None, f"{command} exited"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://localhost:{port}/health").status_code == 200:
                    break
            time.sleep(0.2)
        yield f"http://localhost:{port}"
    finally:
        process.terminate()
        process.wait()


def run_ours(url: str, mode: str, arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    depth = ({"mode": mode},)
    asked = Load(url, arguments.requests, arguments.concurrency, max_tokens=arguments.tokens, depth=depth, seed=number)
    report = run_load(asked)
    assert report.whole == arguments.requests, report.errors
    return report.figures()


def run_peer(url: str, folder: str, arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    """The same prompts in the same order, with the same concurrency."""
    generator = random.Random(number)
    asked = Load(requests=arguments.requests, max_tokens=arguments.tokens)
    prompts = [ask_for(asked, generator, place)[0]["prompt"] for place in range(arguments.requests)]
    forced = json.dumps({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": arguments.tokens})

    async def answer(client: httpx.AsyncClient, free: asyncio.Semaphore, prompt: str) -> int:
        body = {"model": folder, "prompt": prompt, "max_tokens": arguments.tokens, "stream": True}
        ended = None
        async with free, client.stream("POST", "/v1/completions", json={**body, "generation_config": forced}) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    ended = json.loads(line[6:])["choices"][0].get("finish_reason") or ended
        assert ended == "length", ended
        return int(arguments.tokens)

    async def run() -> int:
        free = asyncio.Semaphore(arguments.concurrency)
        limits = httpx.Limits(max_connections=arguments.concurrency)
        async with httpx.AsyncClient(base_url=url, timeout=1200, limits=limits) as client:
            return sum(await asyncio.gather(*(answer(client, free, prompt) for prompt in prompts)))

    started = time.perf_counter()
    tokens = asyncio.run(run())
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--speedup", default="1.5")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    loaded = load(device="cpu")
    loaded.model.generation_config.eos_token_id = None
    stack = LayerStack.of(loaded.model)
    plan = Plan.for_speedup(stack.num_layers, arguments.speedup, over_tokens=arguments.tokens)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        ours = [sys.executable, "-m", "depthdecay", "serve", "--model", folder, "--device", "cpu"]
        ours += ["--speedup", arguments.speedup, "--over", str(arguments.tokens), "--max-positions", "512"]
        peer = [str(Path(sys.executable).parent / "transformers"), "serve", folder, "--continuous-batching"]
        peer += ["--device", "cpu", "--dtype", "float32", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "512"]
        url = servers.enter_context(serving(ours, arguments.threads))
        peer_url = servers.enter_context(serving(peer, arguments.threads))
        for number in range(arguments.rounds + 1):
            short = argparse.Namespace(**{**vars(arguments), "requests": 4, "tokens": 4})
            asked = short if number == 0 else arguments  # the first round only warms up
            one = {
                "full": run_ours(url, "full", asked, number),
                "decay": run_ours(url, "decay", asked, number),
                "transformers serve": run_peer(peer_url, folder, asked, number),
            }
            if number > 0:
                runs.append(one)
                print({name: round(figures["tokens_per_second"], 1) for name, figures in one.items()}, flush=True)

    def median(name: str, over: str | None = None) -> float:
        rates = [run[name]["tokens_per_second"] / (run[over]["tokens_per_second"] if over else 1) for run in runs]
        return round(statistics.median(rates), 3)

    ideal = cost_speedup(plan, stack, arguments.tokens)
    figures = {
        "tokens_per_second": {name: median(name) for name in runs[0]},
        "decay_over_full": median("decay", "full"),
        "decay_over_transformers_serve": median("decay", "transformers serve"),
        "full_over_transformers_serve": median("full", "transformers serve"),
        "layer_speedup": plan.layer_speedup(arguments.tokens),
        "cost_speedup": round(ideal, 3),
        "share_of_ideal": round(median("decay", "full") / ideal, 3),
    }
    print(json.dumps(figures))
    if arguments.json:
        settings = {"concurrency": arguments.concurrency, "tokens": arguments.tokens, "speedup": arguments.speedup}
        settings |= {"dtype": str(loaded.model.dtype), "threads": arguments.threads, "arrival": "closed"}
        command = f"python benchmarks/serving.py {shlex.join(sys.argv[1:])}"
        told = {"command": command, "model": "smollm2-135m", "serving": settings, **figures, "runs": runs}
        write_result(arguments.json, told)


if __name__ == "__main__":
    main()
