"""Would it pay to redo uncertain tokens at full depth? Agreement at equal cost, by position and by uncertainty.

python benchmarks/position_and_doubt.py --model M --plan PLAN --prompts FILE [--speedups 1.05,1.1,1.2] [--json FILE]

By position alone, the plan's ladder and repair maps run at each speed-up. By position and doubt, a faster decay runs,
and where its top token has the lowest probability, a pass at full depth follows and decides. Such a pass costs all
layers once: like a verification, it also covers the tokens since the last one, so that every layer has its keys and
values. As many positions get one as make the cost equal. All on the full model's own answers, where full depth is
always right.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

import torch

from depthdecay import Engine, Plan, load
from depthdecay.calibration.continuations import continue_prompts
from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.recording import Recording
from depthdecay.model.costs import Costs
from depthdecay.model.layers import LayerStack
from depthdecay.model.prompts import token_ids
from depthdecay.model.repairs import Repairs
from depthdecay.model.speedup import plan_at_speedup
from depthdecay.prompt_files import read_prompts
from depthdecay.result_files import require_writable, write_result

_RESAMPLES = 2000


@dataclass(frozen=True)
class Measured:
    """A plan at all positions of all texts, concatenated."""

    speedup: float  # as requested
    agrees: torch.Tensor
    doubt: torch.Tensor  # 1 - probability of the top token
    layers: torch.Tensor  # executed, maps included
    text: torch.Tensor  # index of the text

    @property
    def mean_layers(self) -> float:
        return float(self.layers.mean())


@dataclass(frozen=True)
class Compared:
    """Two rules at the same cost."""

    speedup: float  # of both, in layers
    by_position: float  # agreement
    faster: float  # the speed-up of the decay that is corrected where it is uncertain
    share_doubted: float
    by_position_and_doubt: float
    gain: float
    gain_low: float  # 95% interval, resampling texts
    gain_high: float


def compared(slow: Measured, fast: Measured, num_layers: int) -> Compared:
    """Spend the extra layers of the slower plan on full passes for the faster one, where it is least certain."""
    share = (slow.mean_layers - fast.mean_layers) / num_layers
    count = round(share * len(fast.doubt))
    again = torch.zeros_like(fast.agrees)
    again[fast.doubt.topk(count).indices] = True
    corrected = fast.agrees | again
    differences = corrected.double() - slow.agrees.double()
    low, high = _interval(differences, slow.text)
    return Compared(
        num_layers / slow.mean_layers,
        float(slow.agrees.double().mean()),
        fast.speedup,
        share,
        float(corrected.double().mean()),
        float(differences.mean()),
        low,
        high,
    )


def _interval(values: torch.Tensor, text: torch.Tensor) -> tuple[float, float]:
    """95% interval of a mean over positions, resampling texts: positions of one text are not independent."""
    texts = int(text.max()) + 1
    sums = torch.zeros(texts, dtype=torch.float64).index_add_(0, text, values)
    counts = torch.bincount(text, minlength=texts).double()
    drawn = torch.randint(texts, (_RESAMPLES, texts), generator=torch.Generator().manual_seed(0))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


@torch.no_grad()
def measured(recording: Recording, plan: Plan, repairs: Repairs | None, speedup: float) -> Measured:
    costs = Costs(recording.stack, plan, repairs)
    layers = torch.tensor([float(costs.in_layers(plan.depth(column + 1))) for column in range(recording.columns)])
    parts: list[tuple[torch.Tensor, ...]] = []
    before = 0
    for batch in recording.batches:
        state = Simulator(recording).final_state(batch, plan, repairs)
        passes = zip(recording.logits(batch, batch.states[-1]), recording.logits(batch, state), strict=True)
        for (rows, full), (_, shallow) in passes:
            valid = batch.valid[rows].cpu()
            likeliest = shallow.float().softmax(-1).max(-1)
            agrees = (likeliest.indices == full.argmax(-1)).cpu()
            text = before + torch.arange(len(valid)).unsqueeze(1).expand_as(valid)
            here = layers[: valid.shape[1]].expand_as(valid)
            parts.append(tuple(part[valid] for part in (agrees, 1 - likeliest.values.cpu(), here, text)))
            before += len(valid)
    agrees, doubt, here, text = (torch.cat(part) for part in zip(*parts, strict=True))
    return Measured(speedup, agrees, doubt, here, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--speedups", default="1.05,1.1,1.15,1.2,1.25")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    require_writable(arguments.json)
    loaded = load(arguments.model, device=arguments.device, dtype=arguments.dtype)
    stack = LayerStack.of(loaded.model)
    plan = Plan.load(arguments.plan)
    repairs = Repairs.of_plan(plan)
    repairs = None if repairs is None else repairs.placed(stack.examples())
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    prompts = [token_ids(loaded.tokenizer, prompt, {}, vocabulary) for prompt in read_prompts(arguments.prompts)]
    engine = Engine(loaded.model, compile=False)
    texts = continue_prompts(engine, prompts[: arguments.limit], arguments.max_new_tokens, batch=16)
    recording = Recording.of(stack, texts, rows=8)
    found = []
    for speedup in sorted(float(value) for value in arguments.speedups.split(",")):
        at_speedup = plan_at_speedup(plan, stack, str(speedup), arguments.max_new_tokens, repairs)
        found.append(measured(recording, at_speedup, repairs, speedup))
        print(
            f"{speedup:g}x: {found[-1].mean_layers:.2f} layers, {found[-1].agrees.double().mean():.2%} agree",
            flush=True,
        )
    rows = [compared(slow, fast, stack.num_layers) for number, slow in enumerate(found) for fast in found[number + 1 :]]
    print(f"{'cost':>6} {'position':>9} {'decay':>6} {'doubted':>8} {'and doubt':>10} {'gain':>7}  95%")
    for row in rows:
        print(
            f"{row.speedup:5.3f}x {row.by_position:9.2%} {row.faster:5.2f}x {row.share_doubted:8.2%} "
            f"{row.by_position_and_doubt:10.2%} {row.gain:+7.2%}  {row.gain_low:+.2%} to {row.gain_high:+.2%}"
        )
    if arguments.json:
        figures = {"model": loaded.shown_name, "prompts": recording.prompts, "places": recording.tokens}
        write_result(arguments.json, {**figures, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
