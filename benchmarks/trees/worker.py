"""The worker process of compare_trees.py for one source tree: reads one command per line, and measures."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import statistics
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

import depthdecay
from depthdecay import Engine, Plan


def found(name: str, *modules: str) -> Any:
    """Finds a name wherever this tree has it: before 0.2.0, all modules were in one folder."""
    for module in modules:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(f"depthdecay.{module}"), name)
    raise ImportError(f"this tree has no {name} in {' or '.join(modules)}")


Batcher, BatchSettings = (found(name, "batching.batcher", "batching") for name in ("Batcher", "BatchSettings"))
random_model = found("random_model", "bench.model_shapes", "bench")
UNENDING, prepare_request = (found(name, "engine.request", "request") for name in ("UNENDING", "prepare_request"))
choose_device, choose_dtype = (found(name, "model.devices", "devices") for name in ("choose_device", "choose_dtype"))

Row = dict[str, Any]
PLAIN_GREEDY = {"do_sample": False, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "stop": []}
DRAFTS = ("drafted", "accepted", "verifications")
TELLING = ("eagerly", "compiled", "CUDA graphs", "calibrated")  # words in warnings that explain why a tree is slow


class Worker:
    """Holds one tree's model and runs the measurements."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.batcher: Any = None
        self.tokenizer: Any = None

    def shape(self, shape: str, device: str | None, dtype: str) -> Row:
        torch.manual_seed(0)  # the same weights in both trees
        self.model = random_model(shape, choose_device(device), choose_dtype(dtype) or torch.bfloat16)
        config = self.model.generation_config
        config.eos_token_id, config.pad_token_id = None, 0  # random weights may emit it at any time
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
        """Free graphs and caches; keep the weights."""
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
        """All rows in one batch, as in `depthdecay bench`."""
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
        """A closed loop, as in serving_shapes.py: `concurrency` requests at a time until all are answered."""
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
        if embedded:  # like the command line: no plan for decoding, and one to draft with
            full = drafting = self._engine(None, drafter=stored)
            self.engines["decay"] = self._engine(stored)
        else:
            full, drafting = self._engine(None), self._engine(stored)
        self.engines |= {"full": full, "lossless": drafting, "lookup": drafting}
        return {"plan": stored.describe(), "lengths": [len(prompt) for prompt in self.prompts]}

    def answers(self, ways: list[str], prompts: list[int], new_tokens: int, unending: bool) -> list[Row]:
        """Prompt by prompt, each with every method in turn."""
        return [self._answer(way, prompt, new_tokens, unending) for prompt in prompts for way in ways]

    def _answer(self, way: str, prompt: int, new_tokens: int, unending: bool) -> Row:
        drafts = way in ("lossless", "lookup")
        settings: Row = PLAIN_GREEDY | ({"eos_token_id": -1} if unending else {})
        settings |= {"lookup": way == "lookup"} if drafts else {}
        spent = time.process_time()
        mode = "lossless" if drafts else way
        (result,) = self.engines[way].generate([self.prompts[prompt]], new_tokens, mode=mode, **settings)
        steps = len(result.token_ids) - 1  # the first token comes from the prefill, which is not timed
        return {
            "way": way,
            "prompt": prompt,
            "ms_per_token": 1000 * result.decode_seconds / max(steps, 1),
            "cpu_seconds": time.process_time() - spent,  # of all threads, prefill included
            "steps": steps,
            "prefill_ms": 1000 * result.prefill_seconds,
            "token_ids": result.token_ids,
            **({name: getattr(result, name) for name in DRAFTS} if drafts else {}),
        }


def work(source: str) -> None:
    """The worker's loop: one command per line in, one reply per line out. Library output goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker, found = Worker(), Path(depthdecay.__file__).resolve()
    for line in sys.stdin:
        asked = json.loads(line)
        said: Row = {}
        gc.collect()  # here, so that it does not run while something is timed
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                # If an installed package shadowed the trees, it would be compared with itself.
                assert found.is_relative_to(source), f"depthdecay was imported from {found}, not from {source}"
                said["said"] = getattr(worker, asked.pop("do"))(**asked)
            except Exception:
                said["error"] = traceback.format_exc()
        messages = {str(one.message)[:300] for one in seen}
        said["warnings"] = sorted(text for text in messages if any(word in text for word in TELLING))
        out.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    work(sys.argv[1])
