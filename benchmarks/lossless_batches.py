"""Lossless mode compared with full depth in batches on a CPU: the ratio of decoding times on a task's questions.

python benchmarks/lossless_batches.py --data FOLDER [--batches 1,8,16] [--tokens 96] [--rounds 3] [--json FILE]. FOLDER
contains gsm8k/test.jsonl, bbh and bbh-cot-prompts. Both modes answer the same questions, each in its own batch, and
take turns at every step, so that both see the same machine load. Times are CPU times of one thread, since the cores are
shared, without prefill. Every round has new questions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from depthdecay import Engine, load
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.cpu.threads import physical_cores, set_threads
from depthdecay.engine.request import PLAIN_GREEDY, prepare_request
from depthdecay.evaluation.evaluate import EvaluationSettings, ask_all
from depthdecay.evaluation.task import TaskOptions, open_task
from depthdecay.result_files import write_result

MODES = ("full", "lossless")
Told = list[list[int]]  # the tokens of each answer


def questions(loaded: Any, folder: Path, count: int) -> dict[str, list[list[int]]]:
    """`count` prompts per task, formatted as in `depthdecay eval`."""
    half = -(-count // 2)
    tasks = {
        "gsm8k": open_task("gsm8k", TaskOptions(str(folder / "gsm8k" / "test.jsonl"), count)),
        "bbh": open_task("bbh", TaskOptions(str(folder / "bbh"), half, subtasks=("navigate", "object_counting"))),
    }
    asked = {name: ask_all(loaded, task, EvaluationSettings(), True).prompts for name, task in tasks.items()}
    first, second = asked["bbh"][:half], asked["bbh"][half:]
    asked["bbh"] = [prompt for pair in zip(first, second, strict=True) for prompt in pair]  # so that a batch has both
    return asked


def answering(engine: Engine, mode: str, prompts: list[list[int]], tokens: int, told: Told) -> Iterator[None]:
    """Yields after each decode step, first after the prefill of all prompts. A single text uses `Engine.stream`."""
    if len(prompts) == 1:
        stream = engine.stream(prompts[0], tokens, mode=mode, eos_token_id=-1, **PLAIN_GREEDY)
        for _ in stream:
            yield
        told.append(stream.result.token_ids)
        return
    longest = max(map(len, prompts)) + tokens
    settings = BatchSettings(len(prompts), 2048, cohort_seconds=0, max_positions=longest, prompts_first=True)
    batcher = Batcher(engine, settings)
    request = prepare_request(engine, prompts, tokens, {"eos_token_id": -1, **PLAIN_GREEDY})
    found = {number: list[int]() for number in batcher.submit(request, None, mode)}
    while not batcher.is_idle:
        is_reading = any(row.in_prompt for row in [*batcher.waiting, *batcher.rows])
        for update in batcher.step():
            if update.error is not None:
                raise update.error
            assert update.token is not None
            found[update.id].append(update.token)
        if not is_reading:
            yield
    told += found.values()


def measure(engine: Engine, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """The ratio of both modes' decoding times, and whether the answers are the same."""
    told: dict[str, Told] = {mode: [] for mode in MODES}
    turns = {mode: answering(engine, mode, prompts, tokens, told[mode]) for mode in MODES}
    set_threads(physical_cores())
    for turn in turns.values():
        next(turn)
    set_threads(1)  # so that the thread's CPU time is all of it
    seconds, going, number = dict.fromkeys(MODES, 0.0), set(MODES), 0
    while going:
        for mode in MODES if number % 2 else MODES[::-1]:  # neither is always first
            if mode in going:
                begun = time.thread_time()
                if next(turns[mode], turns) is turns:
                    going.remove(mode)
                seconds[mode] += time.thread_time() - begun
        number += 1
    return {"ratio": seconds["full"] / seconds["lossless"], "same": told["full"] == told["lossless"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batches", default="1,8,16")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    loaded = load(device="cpu")
    engine = Engine(loaded)
    sizes = [int(size) for size in arguments.batches.split(",")]
    asked = questions(loaded, arguments.data, max(sizes) * arguments.rounds)
    rows = []
    for task, prompts in asked.items():
        for size in sizes:
            found = [
                measure(engine, prompts[first : first + size], arguments.tokens)
                for first in range(0, size * arguments.rounds, size)
            ]
            ratios = sorted(round(one["ratio"], 3) for one in found)
            rows.append(
                {
                    "task": task,
                    "batch": size,
                    "lossless_over_full": statistics.median(ratios),
                    "rounds": ratios,
                    "same_answers": all(one["same"] for one in found),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    settings = {"batches": sizes, "tokens": arguments.tokens, "rounds": arguments.rounds, "threads": 1}
    told = {"model": "smollm2-135m", "lossless_batches": settings, "machine_is_shared": True, "rows": rows}
    write_result(arguments.json, told)


if __name__ == "__main__":
    main()
