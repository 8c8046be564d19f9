"""Attention of a few new tokens over long texts: our kernels beside others, as a share of what memory moves.

python benchmarks/long_attention.py [--shapes llama-2-7b,qwen2.5-1.5b] [--positions 8192,32768] [--tokens 1,8]
[--json FILE] [SETTINGS …]

SETTINGS vary our kernels (`kernel_settings`), such as split_attention.SUMMED=64,split_attention.LEVEL=16; each is one
more of the ways that are timed.

Others are torch's own attention and, where vLLM is on the path, FlashAttention's kernels as vLLM calls them, over pages
of 16 positions. All read the same keys and values. As many caches as a GPU's own cache cannot hold are read in turn,
from one CUDA graph, as the layers of a model are. A share is of the speed of a large copy in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from kernel_settings import OURS, KernelSettings
from torch.nn import functional

from depthdecay.bench.decoding import copy_bandwidth
from depthdecay.bench.model_shapes import SHAPES
from depthdecay.cuda.decode_attention import spans_of
from depthdecay.cuda.kernels.split_attention import attend
from depthdecay.errors import failure
from depthdecay.model.devices import choose_device, choose_dtype, overlaps_kernels, synchronize
from depthdecay.result_files import require_writable, write_result

PAGE = 16
IN_ALL = 2**30  # bytes of all caches that are read in turn, on a GPU
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    return attend(query, key, value, spans, query.shape[-1] ** -0.5, None, None, overlaps_kernels())


def torchs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
    found = functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    return found.transpose(1, 2)


def flash_attention(version: int, tokens: int, positions: int, device: torch.device) -> Attention:
    """FlashAttention as vLLM has it; where it is not there, or not for this GPU, an error says so."""
    from vllm.vllm_flash_attn import fa_version_unsupported_reason, flash_attn_varlen_func

    if reason := fa_version_unsupported_reason(version):
        raise RuntimeError(reason)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    used = torch.tensor([positions], dtype=torch.int32, device=device)
    pages = torch.arange(positions // PAGE, dtype=torch.int32, device=device).unsqueeze(0)

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = query[0].transpose(0, 1).contiguous()
        key, value = (held[0].transpose(0, 1).unflatten(0, (-1, PAGE)) for held in (key, value))
        found = flash_attn_varlen_func(
            rows,
            key,
            value,
            max_seqlen_q=tokens,
            cu_seqlens_q=ends,
            max_seqlen_k=positions,
            seqused_k=used,
            block_table=pages,
            causal=True,
            fa_version=version,
        )
        return found.unsqueeze(0)  # type: ignore[no-any-return]

    return run


def varied(settings: KernelSettings, spans: torch.Tensor) -> Attention:
    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with settings.applied():
            return ours(query, key, value, spans)

    return run


def ways(
    tokens: int, positions: int, device: torch.device, settings: Sequence[str]
) -> dict[str, Callable[[], Attention]]:
    """By name, what makes each; the first is what the others are held against."""
    columns = torch.arange(positions - tokens, positions, device=device)
    spans = spans_of(torch.zeros(1, dtype=torch.long, device=device), columns)
    seen = None if tokens == 1 else torch.arange(positions, device=device) <= columns[:, None]
    made: dict[str, Callable[[], Attention]] = {OURS: lambda: partial(ours, spans=spans)}
    made |= {words: partial(varied, KernelSettings.of(words), spans) for words in settings}
    made["torch"] = lambda: partial(torchs, mask=seen)
    for version in (2, 3):
        made[f"FlashAttention {version}"] = partial(flash_attention, version, tokens, positions, device)
    return made


def seconds_each(runs: Sequence[Callable[[], Any]], device: torch.device, rounds: int) -> float:
    """Of one run, the least over rounds in which all have their turn."""

    def once() -> None:
        for run in runs:
            run()

    once()  # compiles
    replay = once
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        replay = graph.replay
    best = float("inf")
    for _ in range(rounds):
        synchronize(device)
        started = time.perf_counter()
        replay()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best / len(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE[,NAME=VALUE …]")
    parser.add_argument("--shapes", default="llama-2-7b,llama-2-70b,qwen2.5-1.5b")
    parser.add_argument("--positions", default="8192,32768")
    parser.add_argument("--tokens", default="1,8")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    require_writable(arguments.json)
    device, dtype = choose_device(arguments.device), choose_dtype(arguments.dtype)
    bandwidth = copy_bandwidth(device)
    print(f"a large copy moves {bandwidth:.0f} GB/s", flush=True)
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes.split(","):
        heads, groups = SHAPES[shape]["num_attention_heads"], SHAPES[shape]["num_key_value_heads"]
        size = SHAPES[shape]["hidden_size"] // heads
        for positions in map(int, arguments.positions.split(",")):
            like: dict[str, Any] = {"dtype": dtype, "device": device}
            kept = (positions, 1, groups, size)  # as the engine's cache has them
            nbytes = 2 * positions * groups * size * torch.empty((), dtype=dtype).element_size()
            caches = max(2, IN_ALL // nbytes) if device.type == "cuda" else 2
            states = [[torch.randn(kept, **like).permute(1, 2, 0, 3) for _ in "kv"] for _ in range(caches)]
            for tokens in map(int, arguments.tokens.split(",")):
                query, expected = torch.randn((1, heads, tokens, size), **like), None
                for name, make in ways(tokens, positions, device, arguments.settings).items():
                    row = {"shape": shape, "positions": positions, "tokens": tokens, "way": name}
                    try:
                        attention = make()
                        found = attention(query, *states[0])
                        expected = found if expected is None else expected
                        runs = [partial(attention, query, *held) for held in states]
                        each = seconds_each(runs, device, arguments.rounds)
                        share = nbytes / each / 1e9 / bandwidth
                        row |= {"microseconds": round(1e6 * each, 2), "share_of_copy_bandwidth": round(share, 4)}
                        row["differs_by"] = float((found - expected).float().norm() / expected.float().norm())
                    except Exception as error:  # what is not there, or does not take this shape
                        row["error"] = failure(error)
                    rows.append(row)
                    print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
                settings = {"dtype": str(dtype)[6:], "device": device.type, "rounds": arguments.rounds}
                told = {"long_attention": settings, "copy_gb_per_second": round(bandwidth, 1), "rows": rows}
                write_result(arguments.json, told)


if __name__ == "__main__":
    main()
