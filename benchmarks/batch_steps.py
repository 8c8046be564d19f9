"""What a plan saves in a batch on a busy machine: full depth and decay, step by step in turns.

python benchmarks/batch_steps.py [--rows 32] [--tokens 128] [--json FILE]. Two batches of one model, started together,
take turns at every step, so that both see the same machine load. Times are CPU times of the thread, since the cores are
shared. Decoding only: no HTTP, no prefill.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from typing import Any

import torch

from depthdecay import Engine, Plan, load
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.engine.request import UNENDING, prepare_request
from depthdecay.model.costs import cost_speedup
from depthdecay.model.layers import LayerStack
from depthdecay.result_files import write_result


def started(engine: Engine, mode: str, arguments: argparse.Namespace) -> Batcher:
    """A batch whose prompts are prefilled."""
    settings = BatchSettings(max_batch=arguments.rows, prefill_tokens=1024, max_positions=512, cohort_seconds=0)
    batcher = Batcher(engine, settings)
    batcher.warm_up()
    for row in range(arguments.rows):
        batcher.submit(prepare_request(engine, [[row + 5] * 8], arguments.tokens, UNENDING), None, mode)
    while any(entry.in_prompt for entry in [*batcher.waiting, *batcher.rows]):
        batcher.step()
    return batcher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--speedup", default="1.5")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so that the thread's CPU time is all of it
    loaded = load(device="cpu")
    stack = LayerStack.of(loaded.model)
    plan = Plan.for_speedup(stack.num_layers, arguments.speedup, over_tokens=arguments.tokens)
    engine = Engine(loaded.model, loaded.tokenizer, plan)
    batches = {mode: started(engine, mode, arguments) for mode in ("full", "decay")}
    seconds: dict[str, list[float]] = {mode: [] for mode in batches}
    number = 0
    while any(not batcher.is_idle for batcher in batches.values()):
        order = list(batches) if number % 2 else list(batches)[::-1]  # neither is always first
        for mode in order:
            begun = time.thread_time()
            batches[mode].step()
            seconds[mode].append(time.thread_time() - begun)
        number += 1
    ideal = cost_speedup(plan, stack, arguments.tokens)
    # Ratios of neighbouring steps: a disturbance usually hits both, while sums would be dominated by the worst ones.
    by_step = [full / decay for full, decay in zip(seconds["full"], seconds["decay"], strict=True)]
    parts = [by_step[place : place + 8] for place in range(0, len(by_step), 8)]
    smoothed = [statistics.median(part) for part in parts]
    figures: dict[str, Any] = {
        "step_ms": {mode: round(1000 * statistics.median(times), 1) for mode, times in seconds.items()},
        "decay_over_full_total": round(sum(seconds["full"]) / sum(seconds["decay"]), 3),
        "decay_over_full": round(len(smoothed) / sum(1 / ratio for ratio in smoothed), 3),
        "layer_speedup": plan.layer_speedup(arguments.tokens),
        "cost_speedup": round(ideal, 3),
    }
    figures["share_of_ideal"] = round(figures["decay_over_full"] / ideal, 3)
    print(json.dumps(figures))
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("rows", "tokens", "speedup")}
        command = f"python benchmarks/batch_steps.py {shlex.join(sys.argv[1:])}"
        told = {"command": command, "model": "smollm2-135m", "batch_steps": settings, **figures}
        write_result(arguments.json, {**told, "ratios_of_8_steps": [round(ratio, 3) for ratio in smoothed]})


if __name__ == "__main__":
    main()
