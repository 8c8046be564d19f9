"""How long a window of lossless mode takes when it samples, beside a greedy one: both passes of it, on a GPU.

python benchmarks/sampled_windows.py --model M --plan PLAN [--widths 2,4,8] [--rounds 20] [--json FILE]

A window is drafts and a verification, each a CUDA graph. For each way to sample, the graphs of a window of so many
drafts by the plan's drafter are captured after a short text, and take turns with the greedy ones. The figure is the
time of all drafts and the verification, over the greedy window of the same width.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from depthdecay import Engine, load
from depthdecay.model.kv_cache import bucket_for
from depthdecay.result_files import require_writable, write_result
from depthdecay.speculative.chain_lane import Chain
from depthdecay.speculative.expected_gain import LEARNED

WAYS: dict[str, dict[str, Any]] = {
    "temperature": {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0},
    "top-k 50": {"top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.0},
    "top-k 20, top-p 0.8, repetition penalty 1.1": {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
}
PROMPT = "Explain why the sky is blue, and why sunsets are red."


@torch.no_grad()
def captured(chain: Chain, widths: list[int], depth: int) -> dict[Any, Any]:
    """The graphs of a draft and of verifications, with the settings that the last text had."""
    passes = chain.passes
    bucket = bucket_for(passes.filled + max(widths) + 2)
    settings = chain.pick.settings
    draft = (lambda: chain._by_head(bucket)) if depth == LEARNED else (lambda: chain._draft(bucket))
    layers = passes.plan.num_layers
    found = {"draft": passes.graph(("d", bucket, settings), layers if depth == LEARNED else depth, bucket, draft)}
    reads = chain.head is not None and chain.head.reads_along
    for width in widths:
        body = lambda width=width: chain._verify(width, bucket, reads)  # noqa: E731
        found[width] = passes.graph(("v", width, bucket, settings), layers, bucket, body, tokens=width)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--device")
    parser.add_argument("--widths", default="2,4,8", help="tokens of a verification: one more than drafts")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    require_writable(arguments.json)
    widths = [int(width) for width in arguments.widths.split(",")]
    loaded = load(arguments.model, device=arguments.device)
    engine = Engine(loaded, plan=arguments.plan, mode="lossless")
    depth = LEARNED if engine.draft_head is not None else engine.drafting_plan.schedule.final_depth

    def chain_for(settings: dict[str, Any]) -> tuple[Chain, dict[Any, Any]]:
        given = {"do_sample": True, "temperature": 0.7, "seed": 1, **settings} if settings else {"do_sample": False}
        engine.generate(PROMPT, max_new_tokens=24, mode="lossless", lookup=False, **given)
        chain = engine.lanes.chain.last
        if chain is None:
            raise SystemExit("these settings do not run as CUDA graphs here; this needs a GPU")
        return chain, captured(chain, widths, depth)

    def milliseconds(chain: Chain, graphs: dict[Any, Any]) -> dict[Any, float]:
        return {name: 1000 * (chain._time(graph) or 0.0) for name, graph in graphs.items()}

    rows = []
    for name, settings in WAYS.items():
        _, greedy = chain_for({})
        chain, sampled = chain_for(settings)
        times: dict[str, list[dict[Any, float]]] = {"greedy": [], "sampled": []}
        for _ in range(arguments.rounds):
            times["greedy"].append(milliseconds(chain, greedy))
            times["sampled"].append(milliseconds(chain, sampled))
        middle = {
            way: {part: statistics.median(one[part] for one in found) for part in greedy}
            for way, found in times.items()
        }
        for width in widths:
            took = {way: (width - 1) * found["draft"] + found[width] for way, found in middle.items()}
            row = {"sampling": name, "drafts": width - 1, "greedy_ms": round(took["greedy"], 4)}
            row |= {"sampled_ms": round(took["sampled"], 4), "ratio": round(took["sampled"] / took["greedy"], 4)}
            row |= {
                f"{way}_{part}_ms": round(middle[way][key], 4)
                for way in middle
                for part, key in (("draft", "draft"), ("verification", width))
            }
            rows.append(row)
            print(row, flush=True)
        write_result(arguments.json, {"model": loaded.shown_name, "sampled_windows": rows})


if __name__ == "__main__":
    main()
