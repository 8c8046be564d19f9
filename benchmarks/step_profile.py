"""Where a decoding step's microseconds go on a GPU, kernel by kernel, and what settings of inductor would change.

python benchmarks/step_profile.py [--shape qwen2.5-1.5b | --model M] [--tokens 128] [--rounds 5] [--json FILE]
[SETTINGS …]

SETTINGS are names and values for torch.compile's options, such as realize_reads_threshold=16,combo_kernels=true, or of
our kernels (`kernel_settings`), such as gemv.AHEAD=4. Each has an engine of its own; the first is always ours as it is.
All take turns at one text at full depth, or --batch. A profile says how often each kernel runs in a step and how
long it takes, the prompt's own pass taken off; kernels that overlap count twice. So beside it stands what each adds:
the time from the end of the kernel before it to its own. Whether a setting changes the text, and whether it stays
exact, stands beside its time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from kernel_settings import OURS, KernelSettings
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from depthdecay import Engine
from depthdecay.bench.contenders import Contender, decoding, measure_in_rounds, never_ending
from depthdecay.bench.model_shapes import SHAPES, load_model_or_shape
from depthdecay.cuda import compiled_layers
from depthdecay.patches import patched
from depthdecay.result_files import require_writable, write_result

PAUSE = 1000.0  # microseconds: a longer one lies between two passes, not inside one
PROMPT = 32


class Setting:
    """An engine whose layers are compiled with further options."""

    def __init__(self, model: Any, words: str, prompt: torch.Tensor, tokens: int) -> None:
        self.words, self.prompt, self.tokens = words, prompt, tokens
        before, self.kernel_settings = compiled_layers.inductor_options, KernelSettings.of(words)
        more = dict(self.kernel_settings.others)
        if self.kernel_settings.tilings:  # inductor's cache does not know them, and parts decide shapes in the graph
            more["fx_graph_cache"] = False
        self.options = lambda rows="one": before(rows) | more
        self.engine = Engine(model, compile=model.device.type == "cuda")
        decode = decoding(self.engine, "full", prompt, tokens)
        self.contender = Contender(words, lambda: self.inside(decode))

    def inside(self, run: Callable[[], Any]) -> Any:
        """What is compiled or captured inside has these settings."""
        with patched(compiled_layers, "inductor_options", self.options), self.kernel_settings.applied():
            return run()

    def result(self, tokens: int) -> Any:
        with never_ending(self.engine.stack.model):
            run = lambda: self.engine.generate(self.prompt.tolist(), tokens, mode="full", do_sample=False)[0]  # noqa: E731
            return self.inside(run)

    def kernels(self) -> list[dict[str, Any]]:
        """Each by its name and the one before it, with microseconds a step and launches a step, largest first."""
        whole, first = self._profiled(self.tokens), self._profiled(1)
        steps, found = self.tokens - 1, []
        for name, spent in whole.items():
            count, *times = (now - before for now, before in zip(spent, first.get(name, (0, 0.0, 0.0)), strict=True))
            if count > 0:
                taken, added = (time / steps for time in times)
                told = {"microseconds": taken, "adds": added, "launches": count / steps}
                found.append({"kernel": name, **told, "microseconds_each": taken * steps / count})
        return sorted(found, key=lambda kernel: -kernel["adds"])

    def _profiled(self, tokens: int) -> dict[str, tuple[int, float, float]]:
        """How often each kernel ran, how long in all, and what it added."""
        on_cuda = self.engine.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as seen:
            self.result(tokens)
            if on_cuda:
                torch.cuda.synchronize()
        ran = DeviceType.CUDA if on_cuda else DeviceType.CPU  # calls on the host, such as launches, are in it too
        events = (event for event in seen.events() if event.device_type == ran)
        spans = ((event.time_range.end, event.time_range.start, event.name) for event in events)
        found: dict[str, tuple[int, float, float]] = {}
        last_end, last = 0.0, ""
        for end, start, name in sorted(spans):
            key = f"{name[:80]} after {last[:40]}"
            count, taken, added = found.get(key, (0, 0.0, 0.0))
            found[key] = count + 1, taken + end - start, added + end - max(last_end, end - PAUSE)
            last_end, last = end, name
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE[,NAME=VALUE …]")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shown", type=int, default=24, help="kernels of a step to print")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    require_writable(arguments.json)
    loaded = load_model_or_shape(arguments.model, arguments.shape, arguments.device, arguments.dtype, print)
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    prompt = torch.randint(3, vocabulary, (arguments.batch, PROMPT), generator=torch.Generator().manual_seed(0))
    settings: list[Setting] = []
    rows: dict[str, dict[str, Any]] = {}

    measured = {name: getattr(arguments, name) for name in ("batch", "tokens", "rounds")}

    def save() -> None:
        told = {"model": loaded.shown_name, "dtype": str(loaded.model.dtype)[6:], "settings": list(rows.values())}
        write_result(arguments.json, {**told, "step_profile": measured})

    text = None
    for words in (OURS, *arguments.settings):
        setting = Setting(loaded.model, words, prompt, arguments.tokens)
        setting.contender.set_up()
        rows[words] = {"setting": words, "ready_after_seconds": round(setting.contender.setup_seconds, 1)}
        if setting.contender.error is None:
            result = setting.result(arguments.tokens)
            text = result.token_ids if text is None else text
            rows[words] |= {"exact": result.exact, "because": result.inexact_because, "same": result.token_ids == text}
            settings.append(setting)
        else:
            rows[words]["error"] = setting.contender.error
        print(rows[words], flush=True)
    for _ in range(arguments.rounds):
        measure_in_rounds([setting.contender for setting in settings], 1, lambda message: None)
        for setting in settings:
            times = [round(1000 * seconds / (arguments.tokens - 1), 4) for seconds in setting.contender.seconds]
            rows[setting.words] |= {"ms_per_step": min(times), "rounds": times}
        save()
    for setting in settings:
        row, kernels = rows[setting.words], setting.kernels()
        row["kernels"] = kernels
        save()
        launches, spent = (sum(kernel[name] for kernel in kernels) for name in ("launches", "microseconds"))
        print(f"{setting.words}: {row['ms_per_step']} ms a step, {launches:.1f} kernels of {spent:.1f} µs in all")
        for kernel in kernels[: arguments.shown]:
            print(
                f"  adds {kernel['adds']:7.1f} of {kernel['microseconds']:7.1f} µs in {kernel['launches']:5.1f} of "
                f"{kernel['microseconds_each']:6.2f}  {kernel['kernel']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
