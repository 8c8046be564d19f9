"""The process of one way of `bench_ways`: one engine, measured with lock-step batches and with Poisson arrivals."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from depthdecay.integrations.vllm.bench_ways import DRAFTS, workload_name
from depthdecay.integrations.vllm.settings import CAPTURE_SIZES, KEY

Row = dict[str, Any]
# Nobody reads answers in a result file, but whether two of them are equal is of interest.
_HASH_DIGITS = 10
_PR_SET_PDEATHSIG = 1


class AnswersBatches(Protocol):
    """What a way has to do: answer a batch in lock-step."""

    def answer(self, prompts: list[list[int]], tokens: int, depth: Any) -> list[list[int]]: ...

    def draft_counts(self) -> tuple[int, int]: ...


class Measurement:
    """The workloads of a job, on one engine."""

    def __init__(self, job: dict[str, Any], runner: AnswersBatches, vocabulary: int) -> None:
        self.job = job
        self.runner = runner
        self.vocabulary = vocabulary

    def prompts(self, count: int, first: int = 0) -> list[list[int]]:
        given = self.job["prompts"]
        if given:
            return [given[(first + number) % len(given)] for number in range(count)]
        draw = random.Random(1)
        return [[draw.randrange(3, self.vocabulary) for _ in range(self.job["prompt_tokens"])] for _ in range(count)]

    def batch_row(self, method: str, batch: int, depth: Any) -> Row:
        """Milliseconds between two tokens of a row: whole answers less their prompts and first tokens.

        Given prompts are taken in turn, a batch of them in each round; answers to them may end before the limit.
        """
        tokens, rounds = self.job["new_tokens"], self.job["rounds"]
        self.runner.answer(self.prompts(batch), tokens, depth)
        drafted, accepted = self.runner.draft_counts()
        times, answers = [], []
        total_ms = total_gaps = 0.0
        for number in range(rounds):
            prompts = self.prompts(batch, number * batch)
            started = time.perf_counter()
            self.runner.answer(prompts, 1, depth)
            between = time.perf_counter()
            answered = self.runner.answer(prompts, tokens, depth)
            ms = (time.perf_counter() - between - (between - started)) * 1e3
            gaps = sum(len(answer) - 1 for answer in answered) / batch
            total_ms, total_gaps = total_ms + ms, total_gaps + gaps
            times.append(ms / max(gaps, 1))
            answers += [_digest(answer) for answer in answered]
        # Random prompts are the same in every round, so the median is of equal runs; given ones are averaged.
        per_token = total_ms / max(total_gaps, 1) if self.job["prompts"] else statistics.median(times)
        row = {
            **{"method": method, "workload": workload_name("batch", batch), "ms_per_token": round(per_token, 4)},
            **{"tokens_per_second": round(batch * 1e3 / per_token, 1), "rounds": [round(value, 4) for value in times]},
            "answers": answers,
        }
        return row | self._acceptance(drafted, accepted)

    def _acceptance(self, drafted: int, accepted: int) -> Row:
        """Since those counts, where this way drafts."""
        drafted_now, accepted_now = self.runner.draft_counts()
        drafted, accepted = drafted_now - drafted, accepted_now - accepted
        if not drafted:
            return {}
        return {"drafted": drafted, "accepted": accepted, "acceptance": round(accepted / drafted, 4)}


class VllmRunner:
    """vLLM, as its offline class runs it."""

    def __init__(self, job: dict[str, Any]) -> None:
        register_plugin()
        from vllm import LLM

        self.job = job
        self.graph_bytes = _note_graph_bytes()
        started = time.perf_counter()
        self.llm = LLM(job["folder"], **engine_settings(job))
        self.start_seconds = time.perf_counter() - started
        self.drafts = self._count_drafts()

    @property
    def vocabulary(self) -> int:
        return int(self.llm.llm_engine.model_config.get_vocab_size())

    def params(self, tokens: int, depth: Any) -> Any:
        from vllm import SamplingParams

        extra = None if depth is None else {KEY: depth}
        random_prompts = not self.job["prompts"]
        return SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=random_prompts, detokenize=False, extra_args=extra
        )

    def answer(self, prompts: list[list[int]], tokens: int, depth: Any) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(asked, self.params(tokens, depth), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def draft_counts(self) -> tuple[int, int]:
        return self.drafts["drafted"], self.drafts["accepted"]

    def _count_drafts(self) -> dict[str, int]:
        """Counted in the scheduler: vLLM's own metrics would take time from every step."""
        counts = {"drafted": 0, "accepted": 0}
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        if core is None or "speculative_config" not in self.job["engine"]:
            return counts
        make = core.scheduler.make_spec_decoding_stats

        def counted(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *more: Any, **named: Any) -> Any:
            counts["drafted"] += num_draft_tokens
            counts["accepted"] += num_accepted_tokens
            return make(stats, num_draft_tokens, num_accepted_tokens, *more, **named)

        core.scheduler.make_spec_decoding_stats = counted
        return counts

    def poisson_row(self, measurement: Measurement, method: str, rate: float, depth: Any) -> Row:
        """Requests at random times, `rate` a second on average: the same times and lengths for every way."""
        due, lengths = arrivals(rate, self.job["rate_seconds"], self.job["new_tokens"])
        prompts, engine = measurement.prompts(len(due)), self.llm.llm_engine
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        said: dict[str, int] = {}
        most, added, started = 0, 0, time.perf_counter()
        while added < len(due) or engine.has_unfinished_requests():
            now = time.perf_counter() - started
            while added < len(due) and due[added] <= now:
                engine.add_request(str(added), {"prompt_token_ids": prompts[added]}, self.params(lengths[added], depth))
                added += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, due[added] - (time.perf_counter() - started)))
                continue
            most = max(most, engine.get_num_unfinished_requests())
            for output in engine.step():
                if output.outputs[0].token_ids:
                    last[output.request_id] = time.perf_counter() - started
                    first.setdefault(output.request_id, last[output.request_id])
                    said[output.request_id] = len(output.outputs[0].token_ids)
        gaps = [(last[name] - first[name]) * 1e3 / (count - 1) for name, count in said.items() if count > 1]
        waited = sorted((first[str(number)] - due[number]) * 1e3 for number in range(len(due)))
        return {
            **{"method": method, "workload": workload_name("poisson", rate), "requests": len(due)},
            **{"ms_per_token": round(statistics.mean(gaps), 4), "most_at_once": most},
            **{"first_token_p50_ms": round(statistics.median(waited), 2)},
            **{"first_token_p95_ms": round(waited[int(0.95 * (len(waited) - 1))], 2)},
            **{"tokens_per_second": round(sum(said.values()) / max(last.values()), 1)},
        }

    def about(self) -> dict[str, Any]:
        """How vLLM was started, as it understood it itself, and what that took."""
        import torch

        config = self.llm.llm_engine.vllm_config
        compilation = config.compilation_config
        about = {
            **{"start_seconds": round(self.start_seconds, 1), "runner": "v2" if config.use_v2_model_runner else "v1"},
            **{"compilation": compilation.mode.name, "graphs": compilation.cudagraph_mode.name},
            **{"graph_sizes": len(compilation.cudagraph_capture_sizes or ())},
            **{"async_scheduling": bool(config.scheduler_config.async_scheduling)},
            **{"in_one_process": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"},
        }
        if self.graph_bytes:
            about["graph_gib"] = round(sum(self.graph_bytes) / (1 << 30), 3)
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            about["gpu_gib_in_use"] = round((total - free) / (1 << 30), 2)
        if self.job.get("decay"):
            about["steps"] = dict(self.llm.collective_rpc("depth_steps")[0])
        return about


class EngineRunner:
    """Our own engine in lossless mode, whose accepted drafts vLLM's are compared with."""

    def __init__(self, job: dict[str, Any]) -> None:
        from depthdecay.engine.engine import Engine
        from depthdecay.model.load import load
        from depthdecay.plan.plan import Plan

        started = time.perf_counter()
        loaded = load(job["folder"], dtype=job["dtype"])
        self.engine = Engine(loaded, plan=Plan.load(job["plan"]), mode="lossless")
        self.start_seconds = time.perf_counter() - started
        self.vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])
        self.counts = (0, 0)

    def answer(self, prompts: list[list[int]], tokens: int, depth: Any) -> list[list[int]]:
        results = self.engine.generate(prompts, tokens, do_sample=False, window=DRAFTS, lookup=False)
        drafted, accepted = self.counts
        self.counts = (
            drafted + sum(result.drafted for result in results),
            accepted + sum(result.accepted for result in results),
        )
        return [list(result.token_ids) for result in results]

    def draft_counts(self) -> tuple[int, int]:
        return self.counts

    def about(self) -> dict[str, Any]:
        return {"start_seconds": round(self.start_seconds, 1)}


def engine_settings(job: dict[str, Any]) -> dict[str, Any]:
    """As vLLM comes, but for room, which all ways have alike."""
    import torch

    longest = max([job["prompt_tokens"], *(len(prompt) for prompt in job["prompts"] or ())])
    settings: dict[str, Any] = {
        **{"dtype": job["dtype"], "enable_prefix_caching": False, "max_num_seqs": max([64, *job["batches"]])},
        **{"max_model_len": longest + job["new_tokens"] + 8, "disable_log_stats": True},
        **job["engine"],
    }
    if job["dummy"]:
        settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if not torch.cuda.is_available():
        return settings | {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    way = job.get("decay")
    if way == "decay-eager":
        settings["enforce_eager"] = True
    elif way == "decay-v1":
        from depthdecay.integrations.vllm.refusals import GRAPHS

        settings["compilation_config"] = {**json.loads(GRAPHS), "cudagraph_capture_sizes": list(CAPTURE_SIZES)}
    return settings


def arrivals(rate: float, seconds: float, new_tokens: int) -> tuple[list[float], list[int]]:
    """When requests come within so many seconds, at least eight of them, and how long each answer is."""
    draw = random.Random(2)
    due: list[float] = []
    while len(due) < 8 or due[-1] < seconds:
        due.append((due[-1] if due else 0.0) + draw.expovariate(rate))
    return due, [draw.randrange(max(2, new_tokens // 4), new_tokens + 1) for _ in due]


def register_plugin() -> None:
    """vLLM finds plug-ins by their packages' metadata; source on PYTHONPATH may have none."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.plugins import load_general_plugins

    from depthdecay.integrations.vllm import ARCHITECTURES, register

    load_general_plugins()
    if not set(ARCHITECTURES.values()) <= set(ModelRegistry.get_supported_archs()):
        register()


def _note_graph_bytes() -> list[int]:
    """Have both model runners note how much memory their graphs took; filled once the engine has started."""
    import torch

    noted: list[int] = []
    if not torch.cuda.is_available():
        return noted
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First

    for kind in (First, Second):

        def capture(self: Any, *more: Any, own: Callable[..., int] = kind.capture_model, **named: Any) -> int:
            noted.append(own(self, *more, **named))
            return noted[-1]

        kind.capture_model = capture
    return noted


def _digest(answer: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, answer)).encode()).hexdigest()[:_HASH_DIGITS]


def entries(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What was measured, one after the other; the engine itself again at the end, with its counts."""
    runner = EngineRunner(job) if job["way"] == "engine" else VllmRunner(job)
    measurement = Measurement(job, runner, runner.vocabulary)
    yield {"engine": runner.about()}
    for method, kind, size in job["todo"]:
        depth = job["methods"][method]
        if kind == "batch":
            yield {"row": measurement.batch_row(method, size, depth)}
        elif isinstance(runner, VllmRunner):
            yield {"row": runner.poisson_row(measurement, method, size, depth)}
        yield {"engine": runner.about()}


def _end_with_parent() -> None:
    """A benchmark that is killed must not leave an engine on the GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(words: Sequence[str]) -> None:
    """Read a job, and write each entry as a line when it is known."""
    _end_with_parent()
    job, result = (Path(word) for word in words)
    with result.open("a") as lines:
        for entry in entries(json.loads(job.read_text())):
            lines.write(json.dumps(entry) + "\n")
            lines.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
