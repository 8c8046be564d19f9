"""Time from starting a process to the first token of the embedded model, median of several runs.

python benchmarks/startup.py [--runs 5] [--json FILE]. The very first start, which converts the model, is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

# What `depthdecay generate` does, timed part by part.
CHILD = """
import time; t0 = time.perf_counter()
from depthdecay.cli.options import ModelOptions
import torch, transformers, depthdecay.engine.engine, depthdecay.model.load
t1 = time.perf_counter()
loaded = ModelOptions().load(quiet=True)
t2 = time.perf_counter()
engine = ModelOptions().engine(loaded, None)
stream = engine.stream("Why is the sky blue?", max_new_tokens=2)
next(stream)
t3 = time.perf_counter()
import json; print(json.dumps({"imports": t1 - t0, "loading": t2 - t1, "first_token": t3 - t2}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    runs = []
    for number in range(arguments.runs + 1):
        started = time.perf_counter()
        output = subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True).stdout
        total = time.perf_counter() - started
        if number > 0:  # the first start warms the file cache, and may convert the model
            parts = json.loads(output)
            runs.append({"to_first_token": sum(parts.values()), **parts, "whole_process": total})
    seconds = {part: round(statistics.median(run[part] for run in runs), 3) for part in runs[0]}
    print(json.dumps(seconds))
    if arguments.json:
        from depthdecay.result_files import write_result

        sys.argv = ["startup", "--runs", str(arguments.runs)]
        write_result(arguments.json, {"model": "smollm2-135m", "startup_seconds": seconds, "runs": runs})


if __name__ == "__main__":
    main()
