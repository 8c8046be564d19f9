"""How much code a token runs through: the lines that `Engine.generate` loads per execution path, and the whole package.

python benchmarks/code_size.py [--source src] [--json FILE]. Each path runs in its own process, on a tiny random model.
Counted are the files and lines of the package that it has imported by the end of the answer, and the files whose
functions ran for one token (in lossless mode, one window). `eager` is the model's own forward, `cpu` one compiled call
per pass, `cuda` CUDA graphs, if there is a GPU; each without and with lossless mode. `server` is a batch of requests
without HTTP. --source may be another source tree, to compare two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WAYS = ("eager", "eager lossless", "cpu", "cpu lossless", "cuda", "cuda lossless", "server")

RUN = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
way = sys.argv[1]
settings = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4, vocab_size=97)
config = AutoConfig.for_model("llama", num_key_value_heads=2, max_position_embeddings=256, **settings)
model = AutoModelForCausalLM.from_config(config).eval()
if way.startswith("cuda"):
    if not torch.cuda.is_available():
        sys.exit(3)
    model = model.cuda()
from depthdecay import Engine
try:
    from depthdecay.engine.request import prepare_request
except ImportError:  # before 0.2.0 all modules were in one folder
    from depthdecay.request import prepare_request
engine = Engine(model, fast=False if way.startswith("eager") else None)
request = prepare_request(engine, [[5, 6, 7]] if way != "server" else [[5, 6, 7], [8, 9]], 12, {"eos_token_id": -1})
if way == "server":
    try:
        from depthdecay.batching.batcher import Batcher, BatchSettings
    except ImportError:
        from depthdecay.batching import Batcher, BatchSettings
    batcher = Batcher(engine, BatchSettings(max_batch=2))
    batcher.submit(request)
    steps = iter(batcher.step, [])
else:
    mode = "lossless" if "lossless" in way else "full"
    steps = engine._decoded(request, engine._new_results(request, mode))
for _ in range(4):  # past everything that is loaded, captured or tested at first use
    next(steps)
passed = set()
sys.setprofile(lambda frame, event, argument: passed.add(frame.f_code.co_filename))
next(steps)
sys.setprofile(None)
for _ in steps:
    pass
files = sorted(module.__file__ for name, module in sys.modules.items() if name.startswith("depthdecay"))
print(json.dumps([files, sorted(passed & set(files))]))
"""


def lines(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def loaded(source: Path, way: str) -> tuple[list[Path], list[Path]] | None:
    """The files that a path loads, and those that its fifth token runs through; None if it needs a missing GPU."""
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    done = subprocess.run(
        [sys.executable, "-c", RUN, way], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode == 3:
        return None
    if done.returncode != 0:
        sys.exit(f"{way}: {done.stderr.strip().splitlines()[-1]}")
    files, passed = json.loads(done.stdout.splitlines()[-1])
    return [Path(file) for file in files], [Path(file) for file in passed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=Path("src"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    package = sorted(options.source.rglob("*.py"))
    report: dict[str, Any] = {"package": {"files": len(package), "lines": lines(package)}}
    for way in WAYS:
        found = loaded(options.source, way)
        if found is not None:
            files, passed = found
            report[way] = {"files": len(files), "lines": lines(files), "files_a_token_passes": len(passed)}
    for name, size in report.items():
        passes = f", {size['files_a_token_passes']} files per token" if "files_a_token_passes" in size else ""
        print(f"{name:16} {size['files']:4} files {size['lines']:7,} lines{passes}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
