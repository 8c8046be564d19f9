"""Lossless mode on several kinds of text with one loaded model: speed-up over full depth, and answers that differ.

python benchmarks/lossless_texts.py --model M --plan PLAN [-n 128] [--skip 0] [--limit 40] [--temperature 0.7]
[--lookup both] [--json FILE] chat=questions.jsonl sums=gsm8k.jsonl …

Prompt files are as for `depthdecay bench --mode lossless`, which measures one of them, with transformers' drafting
methods for comparison. Here the engines are shared, as in a process that answers requests of all kinds.
"""

from __future__ import annotations

import argparse
from typing import Any

from depthdecay import Plan, load
from depthdecay.bench.lossless import bench_engines, drafters, run_lossless_bench
from depthdecay.model.prompts import token_ids
from depthdecay.plan.stored_plans import drafter_of
from depthdecay.prompt_files import read_prompts
from depthdecay.result_files import require_writable, write_result

LOOKUPS = {"both": (False, True), "on": (True,), "off": (False,)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--model", required=True)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=10**6)
    parser.add_argument("--skip", type=int, default=0, help="skip this many prompts at the beginning of each file")
    parser.add_argument("--lookup", choices=LOOKUPS, default="both")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    require_writable(arguments.json)
    loaded = load(arguments.model, device=arguments.device, dtype=arguments.dtype)
    found = Plan.load(arguments.plan)
    by_label = drafters(drafter_of(found) or found)
    best = dict([list(by_label.items())[-1]])
    engines = bench_engines(loaded.model, best)
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    reports: dict[str, Any] = {}
    for text in arguments.texts:
        name, _, file = text.partition("=")
        prompts = [token_ids(loaded.tokenizer, prompt, {}, vocabulary) for prompt in read_prompts(file)]
        report = run_lossless_bench(
            loaded.model,
            loaded.tokenizer,
            loaded.shown_name,
            prompts[arguments.skip : arguments.skip + arguments.limit],
            best,
            new_tokens=arguments.max_new_tokens,
            peers=(),
            temperature=arguments.temperature,
            compared=0,
            engines=engines,
            lookups=LOOKUPS[arguments.lookup],
        )
        reports[name] = report.to_dict()
        for row in report.lossless_rows:
            speed = "" if row.speedup is None else f"{row.speedup:.3f}x"
            window = "" if row.tokens_per_verification is None else f"{row.tokens_per_verification:.2f} tokens/window"
            right = "" if row.acceptance is None else f"{row.acceptance:.1%} of drafts accepted"
            rate = 0.0 if row.tokens_per_second is None else row.tokens_per_second
            print(
                f"{name:12} {row.method:36} {rate:7.1f} tokens/s {speed:8} {window} {right} "
                f"{row.answers_that_differ} of {row.prompts} differ {row.error or ''}",
                flush=True,
            )
        write_result(arguments.json, {"model": loaded.shown_name, "lossless_texts": reports})


if __name__ == "__main__":
    main()
