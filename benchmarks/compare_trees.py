"""Whether a change made anything slower: two source trees side by side on one machine.

python benchmarks/compare_trees.py shapes --old OLD/src --new src [--batches 1,16,64] [--serving 64] [--json FILE]

  shapes    random weights of a true shape: batches at full depth and by a plan, then a closed loop of requests
  serving   the closed loop alone
  lossless  prompts one by one, at full depth, lossless, and lossless with lookup: --model, --plan and --prompts
  cpu       the embedded model in 4 bits on the CPU: --prompts one by one, then the closed loop

Each tree runs in a process of its own. They are asked in turns (old new, new old, ...), so that one waits while the
other measures and both see the same machine. What is compiled or captured is so before the rounds, in turns too. Ratios
are times of neighbours, new over old: above 1 is slower. The JSON says whether answers are the same, not what they are.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import depthdecay
from depthdecay import Engine, Plan
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.bench.shapes import random_model
from depthdecay.engine.request import UNENDING, prepare_request
from depthdecay.model.devices import choose_device, choose_dtype
from depthdecay.result_files import require_writable, write_result

Row = dict[str, Any]
TREES = ("old", "new")
MODES = ("full", "decay")
KINDS = ("kind", "batch", "at_a_time", "way", "mode")  # what tells measurements apart
SLOWER = 1.02
ENOUGH = 6  # pairs; the interval of fewer is hardly more than their range
WARM_UPS = 6  # prompts, as `depthdecay bench --mode lossless` has it
CHUNK = 5  # prompts before it is the other tree's turn
PLAIN_GREEDY = {"do_sample": False, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "stop": []}
DRAFTS = ("drafted", "accepted", "verifications")
PATHS = re.compile(r"(/[^\s/]+)+/")
TELLING = ("eagerly", "compiled", "CUDA graphs", "calibrated")  # words of warnings that explain a slow tree


class Worker:
    """One tree's side: it holds the model and measures what it is asked for."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.batcher: Any = None
        self.tokenizer: Any = None

    def shape(self, shape: str, device: str | None, dtype: str) -> Row:
        torch.manual_seed(0)  # the same weights in both trees
        self.model = random_model(shape, choose_device(device), choose_dtype(dtype) or torch.bfloat16)
        config = self.model.generation_config
        config.eos_token_id, config.pad_token_id = None, 0  # random weights have no end of text
        return self._opened({})

    def load(self, model: str | None, device: str | None, dtype: str | None = None, quantize: str | None = None) -> Row:
        loaded = depthdecay.load(*([model] if model else []), device=device, dtype=dtype)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        return self._opened({"quantize": quantize, "origin": loaded.origin} if quantize else {})

    def _opened(self, engine_settings: Row) -> Row:
        self.engine_settings = engine_settings
        self.vocabulary = self.model.get_input_embeddings().weight.shape[0]
        self.on_cuda = self.model.device.type == "cuda"
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"device": self.model.device.type, "dtype": dtype, "threads": torch.get_num_threads()}

    def _engine(self, plan: Plan | None, compile: bool = True, **more: Any) -> Engine:
        return Engine(self.model, None, plan, compile=compile and self.on_cuda, **self.engine_settings, **more)

    def _plan(self, speedup: str, tokens: int) -> Plan:
        return Plan.for_speedup(self.model.config.num_hidden_layers, speedup, over_tokens=tokens)

    def close(self) -> None:
        """Give up graphs and caches; the weights stay."""
        self.engines, self.batcher = {}, None
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()

    def open_batch(self, batch: int, prompt_tokens: int, new_tokens: int, speedup: str) -> str:
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(3, self.vocabulary, (batch, prompt_tokens), generator=generator).tolist()
        plan = self._plan(speedup, new_tokens)
        self.engines = {"full": self._engine(None), "decay": self._engine(plan)}
        return plan.describe()

    def batch(self, mode: str, new_tokens: int) -> Row:
        """All rows in step, as `depthdecay bench` measures them."""
        results = self.engines[mode].generate(self.prompts, new_tokens, mode=mode, do_sample=False)
        shortest = min(len(result.token_ids) for result in results)
        assert shortest == new_tokens, f"decoding ended after {shortest} of {new_tokens} tokens"
        return {
            "ms_per_token": 1000 * results[0].decode_seconds / (new_tokens - 1),
            "prefill_ms": 1000 * results[0].prefill_seconds,
            "layers_executed": results[0].layers_executed,
            "token_ids": [result.token_ids for result in results],
        }

    def open_serving(self, concurrency: int, prompt: int, tokens: int, speedup: str, prefill_tokens: int) -> str:
        plan = self._plan(speedup, tokens)
        settings = BatchSettings(max_batch=concurrency, prefill_tokens=prefill_tokens, max_positions=prompt + tokens)
        self.batcher = Batcher(self._engine(plan, compile=False), settings)
        self.batcher.warm_up()
        return plan.describe()

    def serving(self, mode: str, concurrency: int, requests: int, prompt: int, tokens: int) -> Row:
        """A closed loop, as serving_shapes.py measures it: so many at a time until all are answered."""
        answers: dict[int, list[int]] = {}
        steps: list[float] = []
        ended, started, spent = 0, time.perf_counter(), time.process_time()
        while ended < requests:
            while len(answers) < min(requests, ended + concurrency):
                generator = random.Random(len(answers))
                ids = [generator.randrange(3, self.vocabulary) for _ in range(prompt)]
                request = prepare_request(self.batcher.engine, [ids], tokens, UNENDING)
                (number,) = self.batcher.submit(request, None, mode)
                answers[number] = []
            begun = time.perf_counter()
            updates = self.batcher.step()
            steps.append(time.perf_counter() - begun)
            for update in updates:
                if update.error is not None:
                    raise update.error
                answers[update.id].append(update.token)
                ended += update.finished
        seconds, spent = time.perf_counter() - started, time.process_time() - spent
        assert all(len(answer) == tokens for answer in answers.values()), "an answer ended early"
        return {
            "ms_per_token": 1000 * seconds / (requests * tokens),
            "cpu_seconds": spent,
            "step_ms_p50": 1000 * statistics.median(steps),
            "steps": len(steps),
            "token_ids": [answers[number] for number in sorted(answers)],
        }

    def open_prompts(self, texts: list[str], plan: str, embedded: bool) -> Row:
        if getattr(self.tokenizer, "chat_template", None):
            asked = ([{"role": "user", "content": text}] for text in texts)
            made = (self.tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False) for t in asked)
        else:
            made = (self.tokenizer.encode(text) for text in texts)
        self.prompts = [[int(token) for token in ids] for ids in made]
        stored = Plan.load(plan)
        if embedded:  # as the command line opens it: no plan of its own, and one to draft by
            full = drafting = self._engine(None, drafter=stored)
            self.engines["decay"] = self._engine(stored)
        else:
            full, drafting = self._engine(None), self._engine(stored)
        self.engines |= {"full": full, "lossless": drafting, "lookup": drafting}
        return {"plan": stored.describe(), "lengths": [len(prompt) for prompt in self.prompts]}

    def answers(self, ways: list[str], prompts: list[int], new_tokens: int, unending: bool) -> list[Row]:
        """Prompt by prompt, each by every way in turn."""
        return [self._answer(way, prompt, new_tokens, unending) for prompt in prompts for way in ways]

    def _answer(self, way: str, prompt: int, new_tokens: int, unending: bool) -> Row:
        drafts = way in ("lossless", "lookup")
        settings: Row = PLAIN_GREEDY | ({"eos_token_id": -1} if unending else {})
        settings |= {"lookup": way == "lookup"} if drafts else {}
        spent = time.process_time()
        mode = "lossless" if drafts else way
        (result,) = self.engines[way].generate([self.prompts[prompt]], new_tokens, mode=mode, **settings)
        steps = len(result.token_ids) - 1  # the first token comes with the prompt, which is not timed
        return {
            "way": way,
            "prompt": prompt,
            "ms_per_token": 1000 * result.decode_seconds / max(steps, 1),
            "cpu_seconds": time.process_time() - spent,  # of all threads, the prompt's pass included
            "steps": steps,
            "prefill_ms": 1000 * result.prefill_seconds,
            "token_ids": result.token_ids,
            **({name: getattr(result, name) for name in DRAFTS} if drafts else {}),
        }


def work(source: str) -> None:
    """A worker's loop: a question a line, an answer a line. What libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker, found = Worker(), Path(depthdecay.__file__).resolve()
    for line in sys.stdin:
        asked = json.loads(line)
        said: Row = {}
        gc.collect()  # not while something is timed
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                # An installed package that comes first would be measured against itself.
                assert found.is_relative_to(source), f"depthdecay was imported from {found}, not from {source}"
                said["said"] = getattr(worker, asked.pop("do"))(**asked)
            except Exception:
                said["error"] = traceback.format_exc()
        messages = {str(one.message)[:300] for one in seen}
        said["warnings"] = sorted(text for text in messages if any(word in text for word in TELLING))
        out.write(json.dumps(said) + "\n")


class Tree:
    """A worker's process, from the driver's side."""

    def __init__(self, name: str, source: str, environment: dict[str, str]) -> None:
        self.name, self.warnings = name, set[str]()
        folder = str(Path(source).resolve())
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", **environment}
        command, pipe = [sys.executable, __file__, "worker", folder], subprocess.PIPE
        self.process: Any = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def send(self, do: str, **asked: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of the {self.name} tree ended with {self.process.wait()}")
        said = json.loads(line)
        if "error" in said:
            raise SystemExit(f"the {self.name} tree failed:\n{said['error']}")
        for warning in set(said["warnings"]) - self.warnings:
            print(f"the {self.name} tree warns: {warning}", flush=True)
        self.warnings |= set(said["warnings"])
        return said["said"]

    def told_warnings(self) -> list[str]:
        return [PATHS.sub("", warning) for warning in sorted(self.warnings)]

    def ask(self, do: str, **asked: Any) -> Any:
        self.send(do, **asked)
        return self.receive()


class Comparison:
    """Both trees, what they measured, and the file that it goes to."""

    def __init__(self, arguments: argparse.Namespace, trees: dict[str, Tree], summarise: Callable[..., Any]) -> None:
        self.arguments, self.trees, self.summarise = arguments, trees, summarise
        self.rows: list[Row] = []
        hidden = ("command", "old", "new", "old_commit", "new_commit", "json")
        self.settings = {name: named(value) for name, value in vars(arguments).items() if name not in hidden}
        given = {name: getattr(arguments, f"{name}_commit") for name in TREES}
        self.commits = {name: given[name] or commit_of(getattr(arguments, name)) for name in TREES}
        self.started = time.perf_counter()

    def turns(self, number: int) -> list[Tree]:
        """Both trees; neither is always first."""
        return [self.trees[name] for name in (TREES if number % 2 == 0 else TREES[::-1])]

    def both(self, do: str, **asked: Any) -> Any:
        """At the same time, for what is not measured; what the new tree said."""
        for tree in self.trees.values():
            tree.send(do, **asked)
        return [self.trees[name].receive() for name in TREES][-1]

    def measure(self, turn: int, number: int, do: str, row: Row, **asked: Any) -> None:
        """One measurement, or a list of them, of each tree."""
        for tree in self.turns(turn):
            said = tree.ask(do, **asked)
            for one in said if isinstance(said, list) else [said]:
                self.rows.append({**row, "tree": tree.name, "round": number, **one})

    def save(self) -> None:
        """After every round, since the next one may be cut short."""
        trees = {name: {"commit": self.commits[name], "warnings": self.trees[name].told_warnings()} for name in TREES}
        command = f"python benchmarks/compare_trees.py {shlex.join(map(named, sys.argv[1:]))}"
        told = {"command": command, "commit": self.commits["new"], "settings": self.settings, "trees": trees}
        seconds = round(time.perf_counter() - self.started, 1)
        print(f"{seconds:6.1f} s, {len(self.rows)} measurements", flush=True)
        figures = {"seconds": seconds, "summary": self.summarise(self.rows), "rounds": columns(self.rows)}
        if self.arguments.json:
            write_result(self.arguments.json, told | figures)


def named(value: Any) -> Any:
    """A path by its last name: where things lie on this machine says nothing about the figures."""
    if not isinstance(value, str) or "/" not in value:
        return value
    option, equals, path = value.rpartition("=")
    there = Path(path).is_absolute() or Path(path).parent.is_dir()  # and no name of a model on the Hub
    return option + equals + Path(path).name if there else value


def commit_of(source: str) -> str | None:
    """The commit of a folder that git tracks; a copy inside of another checkout is not of that one's commit."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=source, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", "depthdecay"):
            return None
        return git("rev-parse", "--short=12", "HEAD") + ("-changed" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return groups


def group_named(group: tuple[Any, ...], *names: str) -> Row:
    return {name: value for name, value in zip(names, group, strict=True) if value is not None}


def columns(rows: list[Row]) -> list[Row]:
    """Every figure of every round but the answers, as lists: a name with each figure would be most of the file."""
    tables: list[Row] = []
    for group, members in grouped(rows, *KINDS, "tree").items():
        tables.append(group_named(group, *KINDS, "tree"))
        for name in sorted(members[0].keys() - {*KINDS, "tree", "token_ids"}):
            values = [row[name] for row in members]
            tables[-1][name] = [float(f"{one:.6g}") if isinstance(one, float) else one for one in values]
    return tables


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def interval(values: list[float], times: int = 2000) -> list[float]:
    """95% of the median, by bootstrap."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(times))
    return [medians[int(0.025 * times)], medians[int(0.975 * times) - 1]]


def verdict(ratio: Row) -> str:
    low, high = ratio["confidence_95"]
    if ratio["count"] < ENOUGH or low <= SLOWER < high:
        return "undecided"
    return "slower by more than 2%" if low > SLOWER else "not slower by 2%"


def compared(rows: list[Row], figure: str = "ms_per_token") -> list[Row]:
    """By groups: each tree's times, and new over old in pairs that were neighbours in time."""
    summary = []
    for group, members in grouped(rows, *KINDS).items():
        times: dict[str, dict[Any, float]] = {name: {} for name in TREES}
        for row in members:
            times[row["tree"]][row["round"], row.get("prompt")] = row[figure]
        shared = [place for place in times["old"] if place in times["new"]]
        if not shared:
            continue
        values = {name: [times[name][place] for place in shared] for name in TREES}
        ratios = [new / old for new, old in zip(values["new"], values["old"], strict=True)]
        ratio: Row = {**spread(ratios), "confidence_95": interval(ratios)}
        ratio["of_medians"] = statistics.median(values["new"]) / statistics.median(values["old"])
        ratio["of_best"] = min(values["new"]) / min(values["old"])
        line = group_named(group, *KINDS)
        line |= {figure: {name: spread(values[name]) for name in TREES}, "new_over_old": ratio}
        if "token_ids" in members[0]:
            alike = grouped(members, "prompt").values()
            line["same_tokens"] = all(row["token_ids"] == same[0]["token_ids"] for same in alike for row in same)
        summary.append(line | {"verdict": verdict(ratio)})
    return summary


def whole_rounds(rows: list[Row]) -> list[Row]:
    """Answers one by one as sums over all prompts; a round that was cut off is left out."""
    groups = grouped(rows, "round", "tree", "way")
    most = max(map(len, groups.values()), default=0)
    whole = []
    for (number, tree, way), members in groups.items():
        if len(members) == most:
            sums = {name: sum(row.get(name, 0) for row in members) for name in ("steps", *DRAFTS)}
            sums["ms_per_token"] = sum(row["ms_per_token"] * row["steps"] for row in members) / max(sums["steps"], 1)
            whole.append({"round": number, "tree": tree, "way": way, **sums})
    return whole


def lossless_summary(rows: list[Row]) -> list[Row]:
    whole = whole_rounds(rows)
    by_answer = {line["way"]: line["new_over_old"] for line in compared(rows)}
    full = {(row["round"], row["tree"]): row["ms_per_token"] for row in whole if row["way"] == "full"}
    summary = compared(whole)
    for line in summary:
        way = line["way"]
        # A round has all prompts; answers one by one are many more pairs, and decide.
        line |= {"verdict": verdict(by_answer[way]), "by_answer": by_answer[way], "speedup_over_own_full_depth": {}}
        for name in TREES:
            mine = [row for row in whole if row["way"] == way and row["tree"] == name]
            gains = [full[row["round"], name] / row["ms_per_token"] for row in mine]
            line["speedup_over_own_full_depth"][name] = spread(gains)
            sums = {figure: sum(row[figure] for row in mine) for figure in ("steps", *DRAFTS)}
            if sums["drafted"]:
                told = {"accepted": sums["accepted"] / sums["drafted"]}
                told["tokens_per_verification"] = sums["steps"] / sums["verifications"]
                line.setdefault("drafts", {})[name] = told
        line["answers"] = answers_told(rows, way)
    return summary


def answers_told(rows: list[Row], way: str) -> dict[str, int]:
    """Of how many prompts the answers agree. Those of one tree may differ too: kernels split sums as they please."""
    said = {key: [row["token_ids"] for row in of] for key, of in grouped(rows, "way", "tree", "prompt").items()}
    prompts = [row["prompt"] for row in rows if row["way"] == way and row["tree"] == "old" and row["round"] == 0]
    prompts = [prompt for prompt in prompts if (way, "new", prompt) in said]
    old, new = ([said[way, name, prompt] for prompt in prompts] for name in TREES)
    pairs = list(zip(old, new, strict=True))
    counts = {
        "prompts": len(prompts),
        "same_in_both_trees_in_the_first_round": sum(ours[0] == theirs[0] for ours, theirs in pairs),
        "same_in_both_trees_in_some_round": sum(any(one in theirs for one in ours) for ours, theirs in pairs),
    }
    for name, rounds in zip(TREES, (old, new), strict=True):
        full = [said["full", name, prompt] for prompt in prompts]
        counts[f"always_the_same_in_{name}"] = sum(all(one == of[0] for one in of) for of in rounds)
        counts[f"as_full_depth_in_{name}"] = sum(one[0] == of[0] for one, of in zip(rounds, full, strict=True))
    return counts


def cpu_summary(rows: list[Row]) -> list[Row]:
    """With ratios of processor time, which others' work on the same cores disturbs less."""
    summary = compared(rows)
    whole = compared(whole_rounds([row for row in rows if "way" in row]))
    by_round = {line["way"]: line["new_over_old"] for line in whole}
    for line, cpu in zip(summary, compared(rows, "cpu_seconds"), strict=True):
        line |= {"by_round": by_round[line["way"]]} if "way" in line else {}
        line["cpu"] = cpu["new_over_old"]
    return summary


def told(line: Row) -> str:
    name = " ".join(str(line[name]) for name in KINDS if name in line)
    text = f"{name:20}" + "".join(f" {tree} {line['ms_per_token'][tree]['median']:8.4f} ms " for tree in TREES)
    for ratio in (ratio for ratio in ("new_over_old", "by_answer", "by_round", "cpu") if ratio in line):
        text += " {} {:.4f} (95% {:.4f}-{:.4f})".format(ratio, line[ratio]["median"], *line[ratio]["confidence_95"])
    return text + {True: ", same tokens", False: ", other tokens", None: ""}[line.get("same_tokens")]


def run_batches(comparison: Comparison) -> None:
    arguments = comparison.arguments
    size = {name: getattr(arguments, name) for name in ("prompt_tokens", "new_tokens", "speedup")}
    for batch in map(int, arguments.batches.split(",")):
        for tree in comparison.turns(0):
            comparison.settings["plan"] = tree.ask("open_batch", batch=batch, **size)
            for mode in MODES:
                tree.ask("batch", mode=mode, new_tokens=arguments.new_tokens)  # compiles and captures
        for number in range(arguments.rounds):
            for mode in MODES:
                row = {"kind": "batch", "batch": batch, "mode": mode}
                comparison.measure(number, number, "batch", row, mode=mode, new_tokens=arguments.new_tokens)
            comparison.save()
        comparison.both("close")


def open_serving(comparison: Comparison, prefill_tokens: int) -> Callable[[int, int], None]:
    """The batchers of both trees, warm; a round in a given turn is one call."""
    arguments = comparison.arguments
    at_a_time, tokens = arguments.serving, arguments.serving_tokens
    size = {"concurrency": at_a_time, "prompt": arguments.serving_prompt, "tokens": tokens}
    asked = {"speedup": arguments.serving_speedup, "prefill_tokens": prefill_tokens}
    for tree in comparison.turns(0):
        comparison.settings["serving_plan"] = tree.ask("open_serving", **size, **asked)
        for mode in MODES:
            tree.ask("serving", mode=mode, requests=at_a_time, **size)  # whatever is captured on the way

    def run(turn: int, number: int) -> None:
        for place, mode in enumerate(MODES):
            row = {"kind": "serving", "at_a_time": at_a_time, "mode": mode}
            requests = arguments.serving_requests or 2 * at_a_time
            comparison.measure(turn + place, number, "serving", row, mode=mode, requests=requests, **size)

    return run


def shapes(comparison: Comparison) -> None:
    arguments = comparison.arguments
    names = ("shape", "device", "dtype")
    comparison.settings |= comparison.both("shape", **{name: getattr(arguments, name) for name in names})
    if arguments.command == "shapes":
        run_batches(comparison)
    if arguments.serving:
        run = open_serving(comparison, prefill_tokens=1024)
        for number in range(arguments.serving_rounds):
            run(number, number)
            comparison.save()


def single_prompts(comparison: Comparison) -> None:
    arguments, embedded = comparison.arguments, comparison.arguments.command == "cpu"
    if embedded:
        ways, model = ["full", "decay", "lossless", "lookup"], {"model": None, "device": "cpu", "quantize": "int4"}
        # One plan for both trees: what another one saves would be no matter of the code.
        plan = str(Path(arguments.old).resolve() / "depthdecay" / "data" / "smollm2-135m")
    else:
        ways, plan = ["full", "lossless", "lookup"], arguments.plan
        model = {name: getattr(arguments, name) for name in ("model", "device", "dtype")}
    comparison.settings |= {name: named(value) for name, value in model.items()} | comparison.both("load", **model)
    lines = Path(arguments.prompts).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[: arguments.limit]]
    size = {"new_tokens": arguments.new_tokens, "unending": embedded}
    for tree in comparison.turns(0):
        said = tree.ask("open_prompts", texts=texts, plan=plan, embedded=embedded)
        comparison.settings["plan"] = said["plan"]
        # Short to long, so that what is captured once for a length of text is there before anything is timed.
        order = sorted(range(len(texts)), key=said["lengths"].__getitem__)
        warm_ups = 2 if embedded else WARM_UPS
        warm = [order[place * (len(order) - 1) // (warm_ups - 1)] for place in range(warm_ups)]
        for way in ways:
            tree.ask("answers", ways=[way], prompts=warm, **size)
    run = open_serving(comparison, prefill_tokens=128) if embedded and arguments.serving else None
    each = range(len(texts))
    if embedded:  # others' work disturbs CPUs more, so that the trees change with every answer
        turns = [([way], [prompt]) for prompt in each for way in ways]
    else:
        turns = [(ways, list(each[first : first + CHUNK])) for first in each[::CHUNK]]
    for number in range(arguments.rounds):
        for turn, (some, prompts) in enumerate(turns):
            comparison.measure(number + turn, number, "answers", {}, ways=some, prompts=prompts, **size)
        if run:
            run(number + len(turns), number)
        comparison.save()


COMMANDS = {"shapes": shapes, "serving": shapes, "lossless": single_prompts, "cpu": single_prompts}
SUMMARIES = {"shapes": compared, "serving": compared, "lossless": lossless_summary, "cpu": cpu_summary}
RANDOM = {"shape": "llama-2-7b", "device": "auto", "dtype": "bf16"}
BATCHES = {"batches": "1,16,64", "prompt_tokens": 32, "new_tokens": 256, "speedup": "1.669", "rounds": 6}
LOOP = {"serving": 64, "serving_requests": 0, "serving_prompt": 32, "serving_tokens": 128, "serving_speedup": "1.5"}
MODEL = {"model": "", "plan": "", "device": "auto", "dtype": "bf16"}
DEFAULTS: dict[str, Row] = {  # "" has to be given
    "shapes": RANDOM | BATCHES | LOOP | {"serving": 0, "serving_rounds": 8},
    "serving": RANDOM | LOOP | {"serving_rounds": 8},
    "lossless": MODEL | {"prompts": "", "limit": 40, "new_tokens": 128, "rounds": 3},
    "cpu": {"prompts": "", "limit": 5, "new_tokens": 96, "rounds": 8}
    | LOOP
    | {"serving": 32, "serving_requests": 48, "serving_tokens": 32},
}
HELP = {
    "prompts": 'a file of lines {"prompt": "..."}',
    "limit": "how many of the prompts",
    "plan": "to draft by",
    "serving": "requests at a time; 0: no closed loop",
    "serving_requests": "of a round; 0: twice as many as at a time",
}


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("worker").add_argument("source")
    for name, defaults in DEFAULTS.items():
        add = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter).add_argument
        for tree in TREES:
            add(f"--{tree}", required=True, metavar="DIR", help="the folder that holds its depthdecay/")
            add(f"--{tree}-commit", help="where git cannot tell")
        add("--json", metavar="FILE")
        for option, value in defaults.items():
            flag, about = f"--{option.replace('_', '-')}", HELP.get(option, " ")
            add(flag, type=type(value), default=value, required=value == "", help=about)
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    if arguments.command == "worker":
        work(arguments.source)
        return
    if arguments.json:
        require_writable(arguments.json)
    summarise = SUMMARIES[arguments.command]
    with ExitStack() as stack:
        # A cache each for weights in 4 bits: what one tree keeps must not be read by the other.
        cache = stack.enter_context(tempfile.TemporaryDirectory()) if arguments.command == "cpu" else None
        caches = {name: {"DEPTHDECAY_CACHE": f"{cache}/{name}"} if cache else {} for name in TREES}
        trees = {name: Tree(name, getattr(arguments, name), caches[name]) for name in TREES}
        for tree in trees.values():
            stack.enter_context(tree.process)
        comparison = Comparison(arguments, trees, summarise)
        COMMANDS[arguments.command](comparison)
    for line in summarise(comparison.rows):
        print(f"{told(line)}: {line['verdict']}")


if __name__ == "__main__":
    main()
