"""Lossless mode on several kinds of text with one loaded model: speed-up over full depth, and answers that differ.

python benchmarks/lossless_texts.py --model M --plan PLAN [-n 128] [--limit 40] [--temperature 0.7] [--lookup both]
[--json FILE] NAME=[TASK:]FILE[,OPTION=VALUE …] …

as in  chat=questions.jsonl  sums=gsm8k:test.jsonl,limit=200,tokens=256  sampled=questions.jsonl,temperature=0.7

A set is a file of prompts, as for `depthdecay bench --mode lossless` (which measures one set, with transformers'
drafting methods for comparison), or TASK:FILE for the questions of a task, taken from its subtasks in turn. Its own
options override those of the command: limit, skip, tokens, temperature, top_p, top_k. The engines are shared, as in a
process that answers requests of all kinds. Results are written as they come. A repeated run resumes: it skips sets that
the result file holds for the same commit, plan and questions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from depthdecay import Plan, load
from depthdecay.bench.lossless import bench_engines, drafters, run_lossless_bench
from depthdecay.bench.lossless_report import LosslessReport, LosslessRow
from depthdecay.evaluation.task import TaskOptions, open_task
from depthdecay.model.prompts import token_ids
from depthdecay.plan.stored_plans import drafter_of
from depthdecay.prompt_files import read_prompts
from depthdecay.result_files import provenance, require_writable, write_result

LOOKUPS = {"both": (False, True), "on": (True,), "off": (False,)}


@dataclass(frozen=True)
class TextSet:
    """Prompts of one kind, and how they are answered."""

    name: str
    file: str
    task: str | None
    limit: int
    skip: int
    tokens: int
    temperature: float
    top_p: float | None = None  # None: as the model's own settings have it
    top_k: int | None = None

    @classmethod
    def of(cls, words: str, defaults: dict[str, Any]) -> TextSet:
        named, *options = words.split(",")
        name, _, place = named.partition("=")
        task, colon, file = place.partition(":")
        given = dict(option.split("=", 1) for option in options)
        values = {option: number(given.pop(option)) if option in given else value for option, value in defaults.items()}
        values |= {option: number(value) for option, value in given.items()}
        return cls(name, file if colon else place, task if colon else None, **values)

    def prompts(self, tokenizer: Any) -> list[Any]:
        return self._all(tokenizer)[self.skip : self.skip + self.limit]

    def _all(self, tokenizer: Any) -> list[Any]:
        if self.task is None:
            return read_prompts(self.file)
        task = open_task(self.task, TaskOptions(data=self.file))
        before: Counter[str] = Counter()
        turns = []
        for example in task.examples:
            turns.append(before[example.group])
            before[example.group] += 1
        prompts = task.prompts_for(tokenizer)
        return [prompts[place] for place in sorted(range(len(prompts)), key=turns.__getitem__)]

    @property
    def sampling(self) -> dict[str, Any]:
        """Beside the temperature."""
        bounds = {"top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in bounds.items() if value is not None}

    def told(self, **more: Any) -> dict[str, Any]:
        """What was asked, without the folders of this machine."""
        return {**asdict(self), "file": Path(self.file).name, **more}


def digest_of(plan: Plan) -> str:
    """A short name for a plan with its maps and its head: two that were learned may be described alike."""
    found = hashlib.sha256(repr(plan.to_dict()).encode())
    for name in (plan.repairs, plan.draft_head):
        if plan.folder is not None and name is not None:
            found.update((plan.folder / name).read_bytes())
    return found.hexdigest()[:16]


def number(text: str) -> float:
    return float(text) if "." in text else int(text)


def kept_reports(file: str | None, model: str) -> dict[str, Any]:
    """Sets that an interrupted run has measured to the end, with the same source."""
    if file is None or not Path(file).exists():
        return {}
    before = json.loads(Path(file).read_text(encoding="utf-8"))
    if (before.get("model"), before.get("commit")) != (model, provenance()["commit"]):
        return {}
    reports = before.get("lossless_texts", {})
    return {name: report for name, report in reports.items() if "cut_off" not in report["settings"]}


def line(name: str, row: LosslessRow) -> str:
    words = [f"{name:14} {row.method:36}"]
    if row.tokens_per_second is not None and row.speedup is not None:
        words += [f"{row.tokens_per_second:7.1f} tokens/s {row.speedup:6.3f}x"]
    if row.tokens_per_verification:
        windows = row.tokens / row.tokens_per_verification
        words += [f"{row.tokens_per_verification:.2f} tokens and {row.drafted / windows:.2f} drafts a window"]
        words += [f"of {1000 * row.seconds / windows:.3f} ms, {row.accepted / row.tokens:.1%} of tokens drafted"]
    return " ".join([*words, f"{row.answers_that_differ} of {row.prompts} differ {row.error or ''}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="NAME=[TASK:]FILE[,OPTION=VALUE …]")
    parser.add_argument("--model", required=True)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=10**6, help="prompts of each set")
    parser.add_argument("--skip", type=int, default=0, help="skip this many prompts at the beginning of each file")
    parser.add_argument("--lookup", choices=LOOKUPS, default="both")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--shared-device", action="store_true", help="other processes use it: do not show times")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    require_writable(arguments.json)
    defaults = {name: getattr(arguments, name) for name in ("limit", "skip", "temperature")}
    sets = [TextSet.of(words, {**defaults, "tokens": arguments.max_new_tokens}) for words in arguments.texts]
    loaded = load(arguments.model, device=arguments.device, dtype=arguments.dtype)
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    # All of them before the first is measured: a file that is not there should be noticed now.
    prompts = [
        [token_ids(loaded.tokenizer, prompt, {}, vocabulary) for prompt in texts.prompts(loaded.tokenizer)]
        for texts in sets
    ]
    found = Plan.load(arguments.plan)
    plan = drafter_of(found) or found
    best = dict([list(drafters(plan).items())[-1]])
    given = {"quantize": loaded.quantize_as_filed(), "origin": loaded.origin}
    engines, digest = bench_engines(loaded.model, best, **given), digest_of(plan)
    kept, reports = kept_reports(arguments.json, loaded.shown_name), dict[str, Any]()
    for texts, asked in zip(sets, prompts, strict=True):
        told = texts.told(lookup=arguments.lookup, plan=plan.describe(), plan_digest=digest)
        if kept.get(texts.name, {}).get("asked") == told:
            print(f"{texts.name}: measured before", flush=True)
            reports[texts.name] = kept[texts.name]
            continue

        def save(report: LosslessReport, name: str = texts.name, told: dict[str, Any] = told) -> None:
            reports[name] = {"asked": told, **report.to_dict()}
            shared = {"shared_device": True} if arguments.shared_device else {}
            write_result(arguments.json, {"model": loaded.shown_name, **shared, "lossless_texts": reports})

        report = run_lossless_bench(
            loaded.model,
            loaded.tokenizer,
            loaded.shown_name,
            asked,
            best,
            new_tokens=texts.tokens,
            peers=(),
            temperature=texts.temperature,
            sampling=texts.sampling,
            compared=0,
            **given,
            engines=engines,
            lookups=LOOKUPS[arguments.lookup],
            save=save,
        )
        save(report)
        for row in report.lossless_rows:
            print(line(texts.name, row), flush=True)


if __name__ == "__main__":
    main()
