"""Speed of vLLM started in several ways: as it comes, with drafts, with graphs by depth. One process for each way.

Engines that are compiled and captured do not share a process, so ways are measured one after the other.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from depthdecay.bench.model_shapes import SHAPES, check_shape
from depthdecay.errors import DepthDecayError
from depthdecay.integrations.vllm import ARCHITECTURES
from depthdecay.integrations.vllm.settings import KEY, server_settings
from depthdecay.plan.plan import Plan

WAYS = ("stock", "ngram", "head", "decay")
SPEEDUPS = ("1.25", "1.5")
# Few, since graphs by depth are captured for every one of them.
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def shape_folder(shape: str, parent: Path) -> str:
    """A model of this shape without weights, which vLLM makes up itself."""
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
    ways: Sequence[str] = WAYS[:1] + WAYS[3:],
    dummy: bool = False,
    head: str | None = None,
    plan: str | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    batches: Sequence[int] = (1, 16, 64),
    rates: Sequence[float] = (),
    new_tokens: int = 256,
    prompt_tokens: int = 32,
    requests: int = 96,
    rounds: int = 3,
    dtype: str = "bfloat16",
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Figures of every way: `rows`, and `engines` with what starting each took. A way that fails says why."""
    unknown = [way for way in ways if way not in WAYS]
    if unknown or ("head" in ways) != (head is not None):
        wrong = f"unknown way '{unknown[0]}'" if unknown else "the way head and a head's folder go together"
        raise DepthDecayError(f"{wrong}; ways are {', '.join(WAYS)}")
    common = {
        **{"folder": folder, "dummy": dummy, "dtype": dtype, "batches": list(batches), "rates": list(rates)},
        **{"new_tokens": new_tokens, "prompt_tokens": prompt_tokens, "requests": requests, "rounds": rounds},
        "prompts": None if prompts is None else [list(prompt) for prompt in prompts],
    }
    found: dict[str, Any] = {"rows": [], "engines": {}}
    for way in ways:
        progress(f"{way}: starting vLLM")
        settings = way_settings(way, stock, num_layers, new_tokens, head, plan)
        result = _in_a_process({**common, **settings, "way": way})
        found["engines"][way] = result["engine"]
        found["rows"] += result["rows"]
        for row in result["rows"]:
            progress(f"{row['method']}, {row['workload']}: {row['ms_per_token']:.2f} ms a token")
    _compare(found["rows"])
    return found


def way_settings(
    way: str, stock: str, num_layers: int, new_tokens: int, head: str | None, plan: str | None
) -> dict[str, Any]:
    """What vLLM is started with, and what requests ask of it, by the method's name."""
    if way == "ngram":
        return {"engine": {"speculative_config": _NGRAM}, "methods": {"n-gram drafts": None}}
    if way == "head":
        drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
        return {"engine": {"speculative_config": drafts}, "methods": {"our head": None}}
    if way == "stock":
        return {"engine": {}, "methods": {"stock": None}}
    plans = {speedup: Plan.for_speedup(num_layers, speedup, over_tokens=new_tokens) for speedup in SPEEDUPS}
    # The server's plan says which depths are captured: the fastest one's hold those of the others.
    depth = {"plan": plan} if plan is not None else server_settings(plans[SPEEDUPS[-1]])
    methods: dict[str, Any] = {"full depth": {"alpha": 1}}
    if plan is None:
        methods |= {f"{speedup}x fewer": _asked(made) for speedup, made in plans.items()}
    else:
        methods["plan"] = None
    overrides = {"architectures": [ARCHITECTURES[stock]], KEY: depth}
    return {"engine": {"hf_overrides": overrides}, "methods": methods, "graphs_by_depth": True}


def _asked(plan: Plan) -> dict[str, Any]:
    values = server_settings(plan)
    values.pop("drop_order")
    return values


def _in_a_process(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        asked, answer = Path(place) / "job.json", Path(place) / "result.json"
        asked.write_text(json.dumps(job))
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if job.get("graphs_by_depth"):
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        ran = subprocess.run(
            [sys.executable, "-m", __name__, str(asked), str(answer)], env=environment, capture_output=True, text=True
        )
        if answer.exists():
            return dict(json.loads(answer.read_text()))
    lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    return {"engine": {"failed": lines[-1] if lines else f"exit code {ran.returncode}", "log": lines[-40:]}, "rows": []}


def _compare(rows: list[dict[str, Any]]) -> None:
    """Against vLLM as it comes, where that was measured."""
    stock = {row["workload"]: row["ms_per_token"] for row in rows if row["method"] == "stock"}
    for row in rows:
        base = stock.get(row["workload"])
        row["speedup"] = None if base is None else round(base / row["ms_per_token"], 3)


class _Way:
    """One engine in this process, and the workloads it is measured with."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.job = job
        started = time.perf_counter()
        self.llm = LLM(job["folder"], **self._engine_settings())
        self.start_seconds = time.perf_counter() - started
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()

    def _engine_settings(self) -> dict[str, Any]:
        import torch

        job = self.job
        settings: dict[str, Any] = {
            **{"dtype": job["dtype"], "enable_prefix_caching": False, "max_num_seqs": max([64, *job["batches"]])},
            **{"max_model_len": self._longest_prompt() + job["new_tokens"] + 8, "disable_log_stats": True},
            **job["engine"],
        }
        if job["dummy"]:
            settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
        if not torch.cuda.is_available():
            settings |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
        elif job.get("graphs_by_depth"):
            from depthdecay.integrations.vllm.refusals import GRAPHS

            settings["compilation_config"] = {**json.loads(GRAPHS), "cudagraph_capture_sizes": list(CAPTURE_SIZES)}
        return settings

    def _longest_prompt(self) -> int:
        return max([self.job["prompt_tokens"], *(len(prompt) for prompt in self.job["prompts"] or ())])

    def prompts(self, count: int) -> list[list[int]]:
        given = self.job["prompts"]
        if given:
            return [given[number % len(given)] for number in range(count)]
        draw = random.Random(1)
        return [[draw.randrange(3, self.vocabulary) for _ in range(self.job["prompt_tokens"])] for _ in range(count)]

    def params(self, tokens: int, depth: Any) -> Any:
        from vllm import SamplingParams

        extra = None if depth is None else {KEY: depth}
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)

    def lock_step(self, batch: int, tokens: int, depth: Any) -> float:
        prompts = [{"prompt_token_ids": prompt} for prompt in self.prompts(batch)]
        started = time.perf_counter()
        self.llm.generate(prompts, self.params(tokens, depth), use_tqdm=False)
        return time.perf_counter() - started

    def batch_row(self, batch: int, method: str, depth: Any) -> dict[str, Any]:
        """Milliseconds between two tokens of a text: a whole answer less its prompt and first token."""
        tokens = self.job["new_tokens"]
        self.lock_step(batch, tokens, depth)
        times = []
        for _ in range(self.job["rounds"]):
            first = self.lock_step(batch, 1, depth)
            times.append((self.lock_step(batch, tokens, depth) - first) * 1e3 / (tokens - 1))
        return {
            **{"workload": f"batch-{batch}", "method": method, "ms_per_token": round(statistics.median(times), 4)},
            **{"rounds": [round(value, 4) for value in times]},
        }

    def poisson_row(self, rate: float, method: str, depth: Any) -> dict[str, Any]:
        """Requests at random times, `rate` a second on average: the same times for every way."""
        draw = random.Random(2)
        count = self.job["requests"]
        waits = [draw.expovariate(rate) for _ in range(count)]
        due = [sum(waits[: number + 1]) for number in range(count)]
        lengths = [draw.randrange(self.job["new_tokens"] // 4, self.job["new_tokens"] + 1) for _ in range(count)]
        prompts, engine = self.prompts(count), self.llm.llm_engine
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        next_number, started = 0, time.perf_counter()
        while next_number < count or engine.has_unfinished_requests():
            now = time.perf_counter() - started
            while next_number < count and due[next_number] <= now:
                params = self.params(lengths[next_number], depth)
                engine.add_request(str(next_number), {"prompt_token_ids": prompts[next_number]}, params)
                next_number += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, due[next_number] - (time.perf_counter() - started)))
                continue
            for output in engine.step():
                if output.outputs[0].token_ids:
                    last[output.request_id] = time.perf_counter() - started
                    first.setdefault(output.request_id, last[output.request_id])
        gaps = [(last[str(n)] - first[str(n)]) * 1e3 / (lengths[n] - 1) for n in range(count)]
        waited = sorted((first[str(number)] - due[number]) * 1e3 for number in range(count))
        return {
            **{"workload": f"poisson-{rate:g}", "method": method, "ms_per_token": round(statistics.mean(gaps), 4)},
            **{"first_token_p95_ms": round(waited[int(0.95 * (count - 1))], 2)},
            **{"tokens_per_second": round(sum(lengths) / max(last.values()), 1)},
        }

    def steps(self) -> dict[str, int]:
        """Of steps so far, how many were replayed from graphs; only graphs by depth are counted."""
        return dict(self.llm.collective_rpc("depth_steps")[0]) if self.job.get("graphs_by_depth") else {}

    def measure(self) -> dict[str, Any]:
        rows = []
        for method, depth in self.job["methods"].items():
            for batch in self.job["batches"]:
                rows.append(self.batch_row(batch, method, depth))
            for rate in self.job["rates"]:
                rows.append(self.poisson_row(rate, method, depth))
        engine = {"start_seconds": round(self.start_seconds, 1), "steps": self.steps()}
        return {"engine": engine, "rows": rows}


def main(words: Sequence[str]) -> None:
    """In the process of one way: read what to do, write what came of it."""
    job, result = (Path(word) for word in words)
    measured = _Way(json.loads(job.read_text())).measure()
    result.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(sys.argv[1:])
