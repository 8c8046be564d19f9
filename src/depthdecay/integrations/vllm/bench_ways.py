"""Benchmark vLLM started in several ways: stock, with speculative decoding, with depth decay under CUDA graphs.

Each way has a process of its own. Every figure is handed to the caller as soon as it exists, so a run that is cut off
keeps what it has measured and can be resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from depthdecay.bench.model_shapes import SHAPES, check_shape
from depthdecay.errors import DepthDecayError
from depthdecay.integrations.vllm import ARCHITECTURES
from depthdecay.integrations.vllm.settings import KEY, server_settings
from depthdecay.plan.plan import Plan

_SUFFIXES = {"decay": "", "decay-v1": ", first model runner", "decay-eager": ", eager"}
DECAY_WAYS = tuple(_SUFFIXES)
WAYS = ("stock", "ngram", "ngram-gpu", "suffix", "head", *DECAY_WAYS, "engine")
SPEEDUPS = ("1.25", "1.5")
DRAFTS = 3
_NGRAM = {"num_speculative_tokens": DRAFTS, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_SPECULATION: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("n-gram drafts", {"method": "ngram", **_NGRAM}),
    "ngram-gpu": ("n-gram drafts on the GPU", {"method": "ngram_gpu", **_NGRAM}),
    "suffix": ("suffix drafts", {"method": "suffix"}),
}
_CHILD = "depthdecay.integrations.vllm.bench_engine"

Found = dict[str, Any]


def shape_folder(shape: str, parent: Path) -> str:
    """A folder with the config.json of this shape and no weights: vLLM generates random ones."""
    from transformers import CONFIG_MAPPING

    check_shape(shape)
    settings = dict(SHAPES[shape])
    kind = settings.pop("model_type")
    stock = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]
    config = CONFIG_MAPPING[kind](**settings, architectures=[stock], bos_token_id=1, eos_token_id=2)
    config.save_pretrained(parent / shape)
    return str(parent / shape)


def run_ways(
    folder: str,
    stock: str,
    num_layers: int,
    *,
    ways: Sequence[str] = ("stock", "decay"),
    dummy: bool = False,
    head: str | None = None,
    plan: str | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    batches: Sequence[int] = (1, 16, 64),
    rates: Sequence[float] = (),
    new_tokens: int = 256,
    prompt_tokens: int = 32,
    rate_seconds: float = 10,
    rounds: int = 3,
    dtype: str = "bfloat16",
    graph_depths: int | None = None,
    group_wait_ms: float | None = None,
    methods: Sequence[str] | None = None,
    way_timeout: float = 900,
    before: Found | None = None,
    log_folder: Path | None = None,
    on_progress: Callable[[Found], None] = lambda found: None,
    progress: Callable[[str], None] = lambda message: None,
) -> Found:
    """Figures of every way: `rows`, and in `engines` what starting each took, or why it failed.

    `before` is what an earlier, interrupted run returned: what it holds is not measured again. `on_progress` gets
    everything measured so far after each figure.
    """
    _check_ways(ways, head, plan)
    common = {
        **{"folder": folder, "dummy": dummy, "dtype": dtype, "batches": list(batches), "rates": list(rates)},
        **{"new_tokens": new_tokens, "prompt_tokens": prompt_tokens, "rounds": rounds, "rate_seconds": rate_seconds},
        "prompts": None if prompts is None else [list(prompt) for prompt in prompts],
    }
    depth = {"graph_depths": graph_depths, "group_wait_ms": group_wait_ms}
    found: Found = {"rows": list((before or {}).get("rows", ())), "engines": dict((before or {}).get("engines", {}))}
    for way in ways:
        settings = way_settings(way, stock, num_layers, new_tokens, head, plan, depth)
        chosen = [method for method in settings["methods"] if way not in DECAY_WAYS or _is_asked(method, methods)]
        missing = _missing(chosen, batches, rates, found["rows"])
        if not missing:
            progress(f"{way}: already measured")
            continue
        progress(f"{way}: starting")
        job = {**common, **settings, "way": way, "todo": missing}
        log = None if log_folder is None else log_folder / f"{way}.log"

        def note(entry: Found, way: str = way) -> None:
            if "engine" in entry:
                found["engines"][way] = entry["engine"]
            else:
                found["rows"].append(entry["row"])
                row = entry["row"]
                progress(f"{row['method']}, {row['workload']}: {row['ms_per_token']:.2f} ms per token")
            _compare(found["rows"])
            on_progress(found)

        failed = _in_a_process(job, note, way_timeout, log)
        if failed:
            found["engines"][way] = {**found["engines"].get(way, {}), "failed": failed}
            progress(f"{way} failed: {failed}")
            on_progress(found)
    _compare(found["rows"])
    return found


def _check_ways(ways: Sequence[str], head: str | None, plan: str | None) -> None:
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise DepthDecayError(f"unknown way '{unknown[0]}'; known are {', '.join(WAYS)}")
    if "head" in ways and head is None:
        raise DepthDecayError("the way 'head' needs --head, a folder written by depthdecay export --format eagle3")
    if "engine" in ways and plan is None:
        raise DepthDecayError("the way 'engine' runs our own engine in lossless mode; give --plan with its drafter")


def _is_asked(method: str, methods: Sequence[str] | None) -> bool:
    """Some of the methods of decay, by the name that they have in all ways to run it."""
    return methods is None or method in {f"{name}{suffix}" for name in methods for suffix in _SUFFIXES.values()}


def _missing(
    methods: Sequence[str], batches: Sequence[int], rates: Sequence[float], rows: Sequence[Found]
) -> list[list[Any]]:
    """(method, kind, size) of what is still to be measured; batches come first, being quicker and steadier."""
    done = {(row["method"], row["workload"]) for row in rows}
    every: list[tuple[str, str, float]] = [(method, "batch", batch) for batch in batches for method in methods]
    every += [(method, "poisson", rate) for rate in rates for method in methods]
    return [[method, kind, size] for method, kind, size in every if (method, workload_name(kind, size)) not in done]


def workload_name(kind: str, size: float) -> str:
    return f"{kind}-{size:g}"


def way_settings(
    way: str,
    stock: str,
    num_layers: int,
    new_tokens: int,
    head: str | None,
    plan: str | None,
    server: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What vLLM is started with, and by the method's name what requests ask of it."""
    if way == "stock":
        return {"engine": {}, "methods": {"stock": None}}
    if way == "engine":
        return {"engine": {}, "methods": {"our engine": None}, "plan": plan}
    if way == "head":
        drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": DRAFTS}
        return {"engine": {"speculative_config": drafts}, "methods": {"our head": None}}
    if way in _SPECULATION:
        method, drafts = _SPECULATION[way]
        return {"engine": {"speculative_config": drafts}, "methods": {method: None}}
    plans = {speedup: Plan.for_speedup(num_layers, speedup, over_tokens=new_tokens) for speedup in SPEEDUPS}
    # The server's plan decides which depths are captured: those of the fastest plan include those of the others.
    depth: dict[str, Any] = {"plan": plan} if plan is not None else server_settings(plans[SPEEDUPS[-1]])
    depth |= {name: value for name, value in (server or {}).items() if value is not None}
    asked: dict[str, Any] = {"full depth": {"alpha": 1}}
    if plan is None:
        asked |= {f"{speedup}x fewer": _request_settings(made) for speedup, made in plans.items()}
        # As many layers on average, but at one depth after the first token: fresh rows do not deepen the batch.
        asked[f"{SPEEDUPS[-1]}x fewer, one depth"] = {
            "alpha": "0.5",
            "min_layers": int(num_layers / float(SPEEDUPS[-1])),
        }
    else:
        asked["plan"] = None
    overrides = {"architectures": [ARCHITECTURES[stock]], KEY: depth}
    return {
        "engine": {"hf_overrides": overrides},
        "methods": {f"{method}{_SUFFIXES[way]}": depth for method, depth in asked.items()},
        "decay": way,
    }


def _request_settings(plan: Plan) -> dict[str, Any]:
    values = server_settings(plan)
    values.pop("drop_order")
    return values


def _in_a_process(job: Found, note: Callable[[Found], None], timeout: float, log: Path | None) -> str | None:
    """Run one way, and note each entry as the process writes it. Returns why it failed, if it did."""
    with tempfile.TemporaryDirectory() as place:
        asked, answer, output = (Path(place) / name for name in ("job.json", "entries.jsonl", "log"))
        asked.write_text(json.dumps(job))
        answer.touch()
        environment = {**os.environ}
        # In one process, for the memory of graphs and accepted drafts are read from it; set to 1 to compare.
        environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # All requests are greedy. FlashInfer's sampler may have to be compiled first, or fail to.
        environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        environment.setdefault("VLLM_NO_USAGE_STATS", "1")
        environment.setdefault("VLLM_LOGGING_LEVEL", "INFO")
        if job.get("decay") == "decay-v1":
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        with output.open("wb") as stream, answer.open() as entries:
            process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(asked), str(answer)],
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                timed_out = _follow(process, entries, note, timeout)
            finally:
                _end(process)
            _read_entries(entries, note)
        text = output.read_text(errors="replace")
    if log is not None:
        log.write_text(text)
    if timed_out:
        return f"stopped after {timeout:g} s"
    return None if process.returncode == 0 else _reason(text, process.returncode)


def _follow(process: Any, entries: Any, note: Callable[[Found], None], timeout: float) -> bool:
    """Note entries until the process has ended, True where it was too slow."""
    end = time.monotonic() + timeout
    while process.poll() is None:
        if time.monotonic() > end:
            return True
        _read_entries(entries, note)
        time.sleep(0.2)
    return False


def _read_entries(entries: Any, note: Callable[[Found], None]) -> None:
    while True:
        start = entries.tell()
        line = entries.readline()
        if not line.endswith("\n"):
            entries.seek(start)  # a line that is being written
            return
        note(json.loads(line))


def _end(process: Any) -> None:
    """vLLM starts processes of its own, so the whole group ends."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(text: str, code: int) -> str:
    """The last error in a log, without the folders of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"^(\S+\s+)?[\w.]*(Error|Exception)\b.*: ", line)]
    last = (errors or lines or [f"exit code {code}"])[-1]
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", last)[:500]


def _compare(rows: list[Found]) -> None:
    """With stock vLLM, where it was measured: speed, and how many answers are not stock's, token for token."""
    stock = {row["workload"]: row for row in rows if row["method"] == "stock"}
    for row in rows:
        base = stock.get(row["workload"])
        row["speedup"] = None if base is None else round(base["ms_per_token"] / row["ms_per_token"], 3)
        if base is not None and "answers" in row and "answers" in base:
            pairs = zip(base["answers"], row["answers"], strict=False)
            row["answers_that_differ"] = sum(theirs != ours for theirs, ours in pairs)
