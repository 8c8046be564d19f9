"""The README's Python example compared with `depthdecay generate`: the same tokens, and the ratio of their speeds.

python benchmarks/library_and_cli.py [--rounds 8] [--json FILE]. Each answer runs in its own process, as for users.
Library and command line take turns, in alternating order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from depthdecay.result_files import write_result

PROMPT, TOKENS = "Why is the sky blue?", 128
WAYS = {
    "lossless": ("", ()),
    "full depth": ("mode='full'", ("--mode", "full")),
    "decay": ("speedup=1.1", ("--speedup", "1.1")),
}
LIBRARY = """
import json, sys
import depthdecay as dd
engine = dd.Engine.from_pretrained(SETTINGS)
stream = engine.stream(sys.argv[1], max_new_tokens=int(sys.argv[2]))
for piece in stream:
    pass
print(json.dumps({"token_ids": stream.result.token_ids, "ms_per_token": stream.result.ms_per_token}))
"""


def by_library(settings: str) -> dict[str, Any]:
    code = LIBRARY.replace("SETTINGS", settings)
    return answered([sys.executable, "-c", code, PROMPT, str(TOKENS)])


def by_command(words: tuple[str, ...]) -> dict[str, Any]:
    return answered([sys.executable, "-m", "depthdecay", "generate", PROMPT, "-n", str(TOKENS), "--json", *words])


def answered(command: list[str]) -> dict[str, Any]:
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(ran.stdout))


def compare(settings: str, words: tuple[str, ...], rounds: int) -> dict[str, Any]:
    by_library(settings), by_command(words)  # fills the caches on disk
    ratios, same = [], True
    for number in range(rounds):
        if number % 2:
            command, library = by_command(words), by_library(settings)
        else:
            library, command = by_library(settings), by_command(words)
        same = same and library["token_ids"] == command["token_ids"]
        ratios.append(library["ms_per_token"] / command["ms_per_token"])
    return {"same_tokens": same, "library_over_command": statistics.median(ratios), "rounds": sorted(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    rows = {}
    for way, (settings, words) in WAYS.items():
        row = rows[way] = compare(settings, words, arguments.rounds)
        told = "the same tokens" if row["same_tokens"] else "DIFFERENT TOKENS"
        low, high = row["rounds"][0], row["rounds"][-1]
        print(f"{way:12} {told}, time per token library/CLI {row['library_over_command']:.3f} [{low:.2f}, {high:.2f}]")
    write_result(arguments.json, {"prompt": PROMPT, "new_tokens": TOKENS, "ways": rows})


if __name__ == "__main__":
    main()
