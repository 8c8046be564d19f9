"""One file of prompts made of the questions of several tasks, as chat models are asked them.

python benchmarks/task_prompts.py OUT.jsonl [TASK:]FILE[,limit=N][,skip=N] …

as in  mixed.jsonl gsm8k:train.jsonl,limit=800 mbpp:mbpp.jsonl; for `depthdecay calibrate`, and whatever else takes
files of prompts. Needs no model.
"""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

from lossless_texts import TextSet

from depthdecay.files import write_whole
from depthdecay.result_files import require_writable

ALL = {"limit": 10**6, "skip": 0, "tokens": 0, "temperature": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("texts", nargs="+", metavar="[TASK:]FILE[,limit=N]")
    arguments = parser.parse_args()
    target = require_writable(arguments.out)
    chat = SimpleNamespace(chat_template="any")
    prompts = [prompt for words in arguments.texts for prompt in TextSet.of(f"={words}", ALL).prompts(chat)]
    lines = [{"prompt" if isinstance(prompt, str) else "messages": prompt} for prompt in prompts]
    write_whole(target, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    print(f"{len(lines)} prompts")


if __name__ == "__main__":
    main()
