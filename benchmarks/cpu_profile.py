"""Where a token's milliseconds go on a CPU: layers, LM head, and everything outside the compiled call.

python benchmarks/cpu_profile.py [--model M] [--rounds 5] [--json FILE]. Medians over rounds; within a round, settings
take turns, so that they see the same machine load.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from depthdecay.bench.contenders import never_ending
from depthdecay.bench.cpu import read_bandwidth
from depthdecay.engine.engine import Engine
from depthdecay.model.layers import LayerStack
from depthdecay.model.load import load
from depthdecay.model.repairs import Repairs
from depthdecay.plan.plan import Plan
from depthdecay.runners.block_runner import BlockRunner
from depthdecay.runners.contract import Part
from depthdecay.runners.kv_blocks import KVBlocks

NEW_TOKENS, PROMPT = 128, 32


def seconds_of_passes(stack: LayerStack, depth: int, ids: list[int]) -> float:
    """The median time of a compiled pass over one token at a depth, over all positions of an answer."""
    layers = stack.num_layers
    plan = Plan.constant(layers, depth, drop_order=list(range(1, layers)))
    blocks = KVBlocks.of_rows(stack.kept_shapes(), [[PROMPT + NEW_TOKENS] * layers])
    runner = BlockRunner(stack, blocks, Repairs())
    runner.run([Part(0, 0, ids, layers, plan)])
    times = []
    for place in range(PROMPT, PROMPT + NEW_TOKENS):
        started = time.perf_counter()
        runner.run([Part(0, place, ids[:1], depth, plan)])
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    loaded = load(arguments.model, device="cpu")
    engines = {
        setting: Engine(loaded.model, quantize=setting, origin=loaded.origin) for setting in ("none", "int8", "int4")
    }
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(3, vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    found: dict[str, dict[str, list[float]]] = {setting: {} for setting in engines}
    for _ in range(arguments.rounds):
        for setting, engine in engines.items():
            layers = engine.stack.num_layers
            whole, one = (seconds_of_passes(engine.stack, depth, ids[0].tolist()) for depth in (layers, 1))
            head = one - (whole - one) / (layers - 1)  # extrapolated: there is no pass without layers
            with never_ending(loaded.model):
                step = engine.generate(ids.tolist(), NEW_TOKENS, mode="full", do_sample=False)[0].ms_per_token
            parts = {"step": step, "layers": 1000 * (whole - head), "output matrix": 1000 * head}
            for name, value in (parts | {"outside the call": step - 1000 * whole}).items():
                found[setting].setdefault(name, []).append(value)
    bandwidth = read_bandwidth()
    figures: dict[str, Any] = {}
    for setting, engine in engines.items():
        size = sum(engine.stack.layer_bytes()) + engine.stack.head_bytes()
        medians = {name: round(statistics.median(values), 3) for name, values in found[setting].items()}
        figures[setting] = {**medians, "memory floor": round(size / bandwidth / 1e6, 3), "bytes": size}
        print(setting, figures[setting])
    print(f"memory bandwidth (large read): {bandwidth:.1f} GB/s")
    if arguments.json:
        from depthdecay.result_files import write_result

        sys.argv = ["cpu_profile", "--model", loaded.shown_name, "--rounds", str(arguments.rounds)]
        told = {"model": loaded.shown_name, "read_gb_per_second": bandwidth, "ms_per_token": figures}
        write_result(arguments.json, told)


if __name__ == "__main__":
    main()
