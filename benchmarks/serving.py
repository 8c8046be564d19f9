"""Throughput of the server at full depth and with a plan, and of transformers' continuous batching, in turns.

python benchmarks/serving.py [--rounds 3] [--requests 64] [--json FILE]. Clients stream over HTTP; transformers' API is
called directly, which spares it that. Every answer has the same length: the model is told no end of text. Each round
runs all three, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shlex
import statistics
import sys
import threading
import time
from typing import Any

import torch
import uvicorn
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from depthdecay import Engine, Plan, load
from depthdecay.batching import Batcher, BatchSettings
from depthdecay.budget import cost_speedup
from depthdecay.loadtest import Load, ask_for, run_load
from depthdecay.results import write_result
from depthdecay.serve.app import ServeSettings, make_app
from depthdecay.serve.worker import Worker
from depthdecay.stack import Stack


def start_server(engine: Engine, concurrency: int) -> tuple[uvicorn.Server, threading.Thread, str]:
    worker = Worker(Batcher(engine, BatchSettings(max_batch=concurrency, max_positions=512)))
    app = make_app(worker, ServeSettings(model_name="bench"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    while worker.state == "starting" or not server.started:
        time.sleep(0.05)
    return server, thread, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def run_ours(url: str, mode: str, arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    asked = Load(
        url,
        arguments.requests,
        arguments.concurrency,
        max_tokens=arguments.tokens,
        depth=({"mode": mode},),
        seed=number,
    )
    report = run_load(asked)
    assert report.whole == arguments.requests, report.errors
    return report.figures()


def run_transformers(model: Any, tokenizer: Any, arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    """The same prompts, as many at a time."""
    generator = random.Random(number)
    asked = Load(requests=arguments.requests, max_tokens=arguments.tokens)
    prompts = [tokenizer.encode(ask_for(asked, generator, place)[0]["prompt"]) for place in range(arguments.requests)]
    settings = GenerationConfig(max_new_tokens=arguments.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=arguments.concurrency, num_blocks=2 * arguments.concurrency, max_batch_tokens=512
    )
    started = time.perf_counter()
    found = model.generate_batch(
        prompts, generation_config=settings, continuous_batching_config=batching, persistent_manager=True
    )
    seconds = time.perf_counter() - started
    tokens = sum(len(output.generated_tokens) for output in found.values())
    assert tokens == arguments.requests * arguments.tokens, tokens
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--speedup", default="1.5")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    loaded, other = load(device="cpu"), load(device="cpu")
    loaded.model.generation_config.eos_token_id = None
    stack = Stack.of(loaded.model)
    plan = Plan.for_speedup(stack.num_layers, arguments.speedup, over_tokens=arguments.tokens)
    server, thread, url = start_server(Engine(loaded.model, loaded.tokenizer, plan), arguments.concurrency)
    runs: list[dict[str, Any]] = []
    try:
        for number in range(arguments.rounds + 1):
            short = argparse.Namespace(**{**vars(arguments), "requests": 4, "tokens": 4})
            asked = short if number == 0 else arguments  # the first round only warms up
            one = {"full": run_ours(url, "full", asked, number), "decay": run_ours(url, "decay", asked, number)}
            if not arguments.no_peer:
                one["transformers"] = run_transformers(other.model, loaded.tokenizer, asked, number)
            if number > 0:
                runs.append(one)
                print({name: round(figures["tokens_per_second"], 1) for name, figures in one.items()}, flush=True)
    finally:
        server.should_exit = True
        thread.join()

    def median(name: str, over: str | None = None) -> float:
        rates = [run[name]["tokens_per_second"] / (run[over]["tokens_per_second"] if over else 1) for run in runs]
        return round(statistics.median(rates), 3)

    ideal = cost_speedup(plan, stack, arguments.tokens)
    figures: dict[str, Any] = {
        "tokens_per_second": {name: median(name) for name in runs[0]},
        "decay_over_full": median("decay", "full"),
        "layer_speedup": plan.layer_speedup(arguments.tokens),
        "cost_speedup": round(ideal, 3),
        "share_of_ideal": round(median("decay", "full") / ideal, 3),
    }
    if not arguments.no_peer:
        figures["decay_over_transformers"] = median("decay", "transformers")
        figures["full_over_transformers"] = median("full", "transformers")
    print(json.dumps(figures))
    if arguments.json:
        command = f"python benchmarks/serving.py {shlex.join(sys.argv[1:])}"
        settings = {"concurrency": arguments.concurrency, "tokens": arguments.tokens, "speedup": arguments.speedup}
        settings |= {"dtype": str(loaded.model.dtype), "threads": torch.get_num_threads(), "arrival": "closed"}
        told = {"command": command, "model": "smollm2-135m", "serving": settings, **figures, "runs": runs}
        write_result(arguments.json, told)


if __name__ == "__main__":
    main()
