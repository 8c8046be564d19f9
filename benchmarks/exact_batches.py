"""What exact (batch-invariant) batches cost, and that their answers do not depend on the rest of the batch.

python benchmarks/exact_batches.py cost [--shape llama-2-7b] [--rows 1,8,16,64] [--json FILE]: full-depth steps of a
plain and of an exact batch, in turns, on random weights in a real shape; and the time to prefill as many prompts.

python benchmarks/exact_batches.py count --model M --prompts FILE [--at 8,64] [--json FILE]: a model answers prompts
alone, then several at a time with random arrivals. Counts the answers that differ from those alone, in an exact and in
a plain batch. Answering alone takes most of the time: split the prompts over several runs with --count and --skip. The
plain batch answers only the first --plain of them.

Results are written after every part, since the next one may be cut short. Without a GPU no batch is exact; --ways plain
tries the rest.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from depthdecay import Engine
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.bench.model_shapes import SHAPES, random_model
from depthdecay.engine.request import PLAIN_GREEDY, UNENDING, prepare_request
from depthdecay.model.devices import choose_device, choose_dtype
from depthdecay.prompt_files import read_prompts
from depthdecay.result_files import require_writable, write_result

WAYS = ("plain", "exact")
Save = Callable[[dict[str, Any]], None]


def batcher_of(engine: Engine, way: str, rows: int, positions: int) -> Batcher:
    settings = BatchSettings(
        max_batch=rows, prefill_tokens=1024, cohort_seconds=0, max_positions=positions, exact=way == "exact"
    )
    begun = time.perf_counter()
    batcher = Batcher(engine, settings)
    batcher.warm_up()
    print(f"{way}: ready in {time.perf_counter() - begun:.1f} s", flush=True)
    return batcher


# What it costs.


def timed_steps(batcher: Batcher, rows: int, prompt: int, steps: int) -> tuple[float, float]:
    """Milliseconds to prefill all prompts, and of a step in which all rows decode."""
    chosen = random.Random(rows)
    vocabulary = batcher.stack.model.get_input_embeddings().weight.shape[0]
    prompts = [[chosen.randrange(3, vocabulary) for _ in range(prompt)] for _ in range(rows)]
    numbers = []
    for ids in prompts:
        numbers += batcher.submit(prepare_request(batcher.engine, [ids], batcher.max_positions - prompt, UNENDING))
    begun = time.perf_counter()
    while not batcher.rows or any(row.in_prompt for row in batcher.rows):
        require_no_error(batcher.step())
    read = time.perf_counter() - begun
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        updates = batcher.step()
        times.append(time.perf_counter() - begun)
        require_no_error(updates)
        assert len(updates) == rows
    for number in numbers:
        batcher.cancel(number)
    return 1000 * read, 1000 * statistics.median(times)


def require_no_error(updates: Sequence[Any]) -> None:
    for update in updates:
        if update.error is not None:
            raise update.error


def cost_lines(seen: dict[tuple[str, int], list[tuple[float, float]]], rows_tried: Sequence[int]) -> list[Any]:
    """By number of rows, the fastest of all rounds so far."""
    lines = []
    for rows in rows_tried:
        line: dict[str, Any] = {"rows": rows}
        for way in WAYS:
            if (way, rows) in seen:
                read, step = (min(times) for times in zip(*seen[way, rows], strict=True))
                line |= {f"{way}_step_ms": round(step, 3), f"{way}_read_ms": round(read, 1)}
        if all((way, rows) in seen for way in WAYS):
            line["exact_over_plain"] = round(line["exact_step_ms"] / line["plain_step_ms"], 3)
        lines.append(line)
    return lines


def cost(arguments: argparse.Namespace, save: Save) -> None:
    device, dtype = choose_device(arguments.device), choose_dtype(arguments.dtype)
    assert dtype is not None
    numbers = [int(rows) for rows in arguments.rows.split(",")]
    # The first rows decode while others are prefilled, with at least 64 prompt tokens per step.
    positions = arguments.prompt + arguments.prompt * max(numbers) // 64 + arguments.steps + 64
    engine = Engine(random_model(arguments.shape, device, dtype), None, compile=True)
    ways = arguments.ways.split(",")
    batchers = {way: batcher_of(engine, way, max(numbers), positions) for way in ways}
    seen: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for turn in range(arguments.rounds):
        for rows in numbers:
            for way in ways if turn % 2 == 0 else ways[::-1]:
                times = timed_steps(batchers[way], rows, arguments.prompt, arguments.steps)
                seen.setdefault((way, rows), []).append(times)
        lines = cost_lines(seen, numbers)
        save({"model": arguments.shape, "prompt": arguments.prompt, "rounds_done": turn + 1, "lines": lines})
    for line in lines:
        print(" ".join(f"{name} {value}" for name, value in line.items()), flush=True)


# What it gives.


def answered(batcher: Batcher, requests: Sequence[Any], mode: str, at_a_time: int) -> list[list[int]]:
    """The tokens of each request, `at_a_time` in the batch, arriving in random order at random steps."""
    chosen = random.Random(at_a_time)
    order = chosen.sample(range(len(requests)), len(requests))
    places: dict[int, int] = {}
    found: list[list[int]] = [[] for _ in requests]
    ended = 0
    while ended < len(requests):
        while order and len(places) - ended < at_a_time and (batcher.is_idle or chosen.random() < 0.7):
            place = order.pop()
            (number,) = batcher.submit(requests[place], None, mode)
            places[number] = place
        for update in batcher.step():
            require_no_error([update])
            found[places[update.id]].append(update.token)
            ended += update.finished
    return found


def differing(found: Sequence[Sequence[int]], alone: Sequence[Sequence[int]]) -> tuple[int, float | None]:
    """How many answers differ, and the median position of the first difference."""
    firsts = []
    for got, expected in zip(found, alone, strict=True):
        if got != expected:
            both = zip(got, expected, strict=False)
            same = [place for place, (ours, theirs) in enumerate(both) if ours != theirs]
            firsts.append(same[0] if same else min(len(got), len(expected)))
    return len(firsts), statistics.median(firsts) if firsts else None


def count(arguments: argparse.Namespace, save: Save) -> None:
    from depthdecay.model.load import load

    companies = [int(number) for number in arguments.at.split(",")]
    loaded = load(arguments.model, device=arguments.device, dtype=arguments.dtype)
    engine = Engine(loaded, compile=True)
    prompts = read_prompts(arguments.prompts)[arguments.skip : arguments.skip + arguments.count]
    sampling = dict(PLAIN_GREEDY)
    if arguments.temperature is not None:
        sampling |= {"do_sample": True, "temperature": arguments.temperature, "top_p": 0.9, "seed": 1}
    requests = [prepare_request(engine, [prompt], arguments.tokens, dict(sampling)) for prompt in prompts]
    positions = max(len(request.prompts[0]) for request in requests) + arguments.tokens
    lines: list[dict[str, Any]] = []

    def note(line: dict[str, Any]) -> None:
        lines.append(line)
        print(" ".join(f"{name} {value}" for name, value in line.items()), flush=True)
        save({"model": loaded.shown_name, "lines": lines})

    for way in sorted(arguments.ways.split(",")):  # exact first: it is what the others are there for
        asked = requests if way == "exact" else requests[: arguments.plain]
        if not asked:
            continue
        batcher = batcher_of(engine, way, max(companies), positions)
        begun = time.perf_counter()
        alone = answered(batcher, asked, arguments.mode, 1)
        seconds = time.perf_counter() - begun
        print(f"{way}: {len(asked)} alone in {seconds:.1f} s, {sum(map(len, alone))} tokens", flush=True)
        for company in companies:
            begun = time.perf_counter()
            found = answered(batcher, asked, arguments.mode, company)
            seconds = time.perf_counter() - begun
            number, first = differing(found, alone)
            line = {"way": way, "at_a_time": company, "answers": len(asked), "differing": number, "from_token": first}
            note(line | {"tokens_per_second": round(sum(map(len, found)) / seconds, 1)})
        if way == "exact" and arguments.engine:
            single = [
                engine.generate(request.prompts, arguments.tokens, mode="full", **sampling)[0].token_ids
                for request in asked[: arguments.engine]
            ]
            number, first = differing(single, alone[: arguments.engine])
            line = {"way": "Engine.generate", "at_a_time": 1, "answers": len(single), "differing": number}
            note(line | {"from_token": first})
        del batcher
        torch.cuda.empty_cache()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    costs = commands.add_parser("cost")
    costs.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    costs.add_argument("--rows", default="1,8,16,64")
    costs.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    costs.add_argument("--steps", type=int, default=20, help="timed steps per round")
    costs.add_argument("--rounds", type=int, default=3)
    counts = commands.add_parser("count")
    counts.add_argument("--model", required=True)
    counts.add_argument("--prompts", required=True, help="a .jsonl or .txt file")
    counts.add_argument("--skip", type=int, default=0)
    counts.add_argument("--count", type=int, default=200)
    counts.add_argument("--plain", type=int, default=40, help="how many of them to run in a plain batch too")
    counts.add_argument("--engine", type=int, default=0, help="how many of them to run with Engine.generate too")
    counts.add_argument("--tokens", type=int, default=256)
    counts.add_argument("--at", default="8,64", help="batch sizes")
    counts.add_argument("--mode", choices=("full", "lossless"), default="full")
    counts.add_argument("--temperature", type=float, help="sample with a seed and top-p 0.9 (default: greedy)")
    for command in (costs, counts):
        command.add_argument("--ways", default=",".join(WAYS))
        command.add_argument("--device")
        command.add_argument("--dtype", default="bf16")
        command.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    require_writable(arguments.json)
    begun = time.perf_counter()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "model", "prompts")}

    def save(figures: dict[str, Any]) -> None:
        told = {**figures, "whole_seconds": round(time.perf_counter() - begun, 1)}
        write_result(arguments.json, {"exact_batches": settings, **told})

    (cost if arguments.command == "cost" else count)(arguments, save)
    print(f"{time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
