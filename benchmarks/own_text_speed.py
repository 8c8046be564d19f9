"""How fast a model writes text of its own to learn from, and what the time goes into.

python benchmarks/own_text_speed.py --model M [--tokens 2000000] [--seconds 180] [--answer-tokens 256] [--json FILE]

Tokens are those of answers that are kept. A batch of questions or answers goes in lock-step, so that its steps are
those of its longest row: filled is the share of them in which a row still wrote. What is not spent in batches goes into
reading questions, filters and files.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from depthdecay import Engine, load
from depthdecay.calibration.own_questions import BASE_TOKENS, QUESTION_TOKENS
from depthdecay.calibration.own_text import ANSWER_TOKENS, write_own_text
from depthdecay.calibration.text_batches import TextBatches
from depthdecay.result_files import require_writable, write_result


def summed(batches: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Of all batches of one kind."""
    if not batches:
        return {"batches": 0}
    steps, spent = sum(batch["steps"] for batch in batches), sum(batch["seconds"] for batch in batches)
    rows, tokens = max(batch["rows"] for batch in batches), sum(batch["tokens"] for batch in batches)
    return {
        "batches": len(batches),
        "rows": rows,
        "steps": steps,
        "ms_per_step": round(1000 * spent / steps, 3),  # prompts are in it
        "filled": round(tokens / sum(batch["rows"] * batch["steps"] for batch in batches), 3),
        "share_of_time": round(spent / seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--answer-tokens", type=int, default=ANSWER_TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    require_writable(arguments.json)
    loaded = load(arguments.model, device=arguments.device, dtype=arguments.dtype)
    engine = Engine(loaded.model)
    batches: list[dict[str, Any]] = []
    write, started = TextBatches.write, time.monotonic()

    def noted(self: TextBatches, prompts: Any, new_tokens: int, **settings: Any) -> list[list[int]]:
        begun = time.monotonic()
        texts = write(self, prompts, new_tokens, **settings)
        batch = {"new_tokens": new_tokens, "rows": len(texts), "seconds": time.monotonic() - begun}
        batches.append(batch | {"steps": max(map(len, texts)), "tokens": sum(map(len, texts))})
        return texts

    def told(tokens: int) -> dict[str, Any]:
        seconds, asked = time.monotonic() - started, (QUESTION_TOKENS, BASE_TOKENS)
        questions = [batch for batch in batches if batch["new_tokens"] in asked]
        answers = [batch for batch in batches if batch["new_tokens"] not in asked]
        return {
            "tokens": tokens,
            "seconds": round(seconds, 1),
            "tokens_per_second": round(tokens / seconds, 1),
            "kept": round(tokens / max(1, sum(batch["tokens"] for batch in answers)), 3),
            "questions": summed(questions, seconds),
            "answers": summed(answers, seconds),
            "elsewhere": round(1 - sum(batch["seconds"] for batch in batches) / seconds, 3),
        }

    TextBatches.write = noted  # type: ignore[method-assign]
    texts = write_own_text(
        engine,
        loaded.tokenizer,
        arguments.tokens,
        seed=arguments.seed,
        answer_tokens=arguments.answer_tokens,
        say=lambda message: print(message, flush=True),
        until=started + arguments.seconds,
    )
    figures = told(sum(len(text.answer) for text in texts))
    print("\n".join(f"{name} {value}" for name, value in figures.items()))
    model = {"model": loaded.shown_name, "dtype": str(loaded.model.dtype)[6:], "device": engine.device.type}
    settings = {name: getattr(arguments, name) for name in ("tokens", "seconds", "answer_tokens", "seed")}
    write_result(arguments.json, {**model, "own_text_speed": settings, **figures})


if __name__ == "__main__":
    main()
