"""Statistics on two source trees: speed ratios of runs close in time, whether one is slower, differing answers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
TREES = ("old", "new")
KINDS = ("kind", "batch", "at_a_time", "way", "mode")  # identify a measurement
DRAFTS = ("drafted", "accepted", "verifications")
SLOWER = 1.02
ENOUGH = 6  # pairs; with fewer, the interval is hardly more than their range


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return groups


def group_named(group: tuple[Any, ...], *names: str) -> Row:
    return {name: value for name, value in zip(names, group, strict=True) if value is not None}


def columns(rows: list[Row]) -> list[Row]:
    """All figures of all rounds except the answers, as columns: repeating the names would be most of the file."""
    tables: list[Row] = []
    for group, members in grouped(rows, *KINDS, "tree").items():
        tables.append(group_named(group, *KINDS, "tree"))
        for name in sorted(members[0].keys() - {*KINDS, "tree", "token_ids"}):
            values = [row[name] for row in members]
            tables[-1][name] = [float(f"{one:.6g}") if isinstance(one, float) else one for one in values]
    return tables


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def interval(values: list[float], times: int = 2000) -> list[float]:
    """95% interval of the median, by bootstrap."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(times))
    return [medians[int(0.025 * times)], medians[int(0.975 * times) - 1]]


def verdict(ratio: Row) -> str:
    low, high = ratio["confidence_95"]
    if ratio["count"] < ENOUGH or low <= SLOWER < high:
        return "undecided"
    return "slower by more than 2%" if low > SLOWER else "not slower by 2%"


def compared(rows: list[Row], figure: str = "ms_per_token") -> list[Row]:
    """Per group: each tree's times, and new over old in pairs of runs close in time."""
    summary = []
    for group, members in grouped(rows, *KINDS).items():
        times: dict[str, dict[Any, float]] = {name: {} for name in TREES}
        for row in members:
            times[row["tree"]][row["round"], row.get("prompt")] = row[figure]
        shared = [place for place in times["old"] if place in times["new"]]
        if not shared:
            continue
        values = {name: [times[name][place] for place in shared] for name in TREES}
        ratios = [new / old for new, old in zip(values["new"], values["old"], strict=True)]
        ratio: Row = {**spread(ratios), "confidence_95": interval(ratios)}
        ratio["of_medians"] = statistics.median(values["new"]) / statistics.median(values["old"])
        ratio["of_best"] = min(values["new"]) / min(values["old"])
        line = group_named(group, *KINDS)
        line |= {figure: {name: spread(values[name]) for name in TREES}, "new_over_old": ratio}
        if "token_ids" in members[0]:
            alike = grouped(members, "prompt").values()
            line["same_tokens"] = all(row["token_ids"] == same[0]["token_ids"] for same in alike for row in same)
        summary.append(line | {"verdict": verdict(ratio)})
    return summary


def whole_rounds(rows: list[Row]) -> list[Row]:
    """Answers summed over all prompts of a round; a round that was cut off is left out."""
    groups = grouped(rows, "round", "tree", "way")
    most = max(map(len, groups.values()), default=0)
    whole = []
    for (number, tree, way), members in groups.items():
        if len(members) == most:
            sums = {name: sum(row.get(name, 0) for row in members) for name in ("steps", *DRAFTS)}
            sums["ms_per_token"] = sum(row["ms_per_token"] * row["steps"] for row in members) / max(sums["steps"], 1)
            whole.append({"round": number, "tree": tree, "way": way, **sums})
    return whole


def lossless_summary(rows: list[Row]) -> list[Row]:
    whole = whole_rounds(rows)
    by_answer = {line["way"]: line["new_over_old"] for line in compared(rows)}
    full = {(row["round"], row["tree"]): row["ms_per_token"] for row in whole if row["way"] == "full"}
    summary = compared(whole)
    for line in summary:
        way = line["way"]
        # The verdict is by single answers, which give many more pairs than rounds.
        line |= {"verdict": verdict(by_answer[way]), "by_answer": by_answer[way], "speedup_over_own_full_depth": {}}
        for name in TREES:
            mine = [row for row in whole if row["way"] == way and row["tree"] == name]
            gains = [full[row["round"], name] / row["ms_per_token"] for row in mine]
            line["speedup_over_own_full_depth"][name] = spread(gains)
            sums = {figure: sum(row[figure] for row in mine) for figure in ("steps", *DRAFTS)}
            if sums["drafted"]:
                told = {"accepted": sums["accepted"] / sums["drafted"]}
                told["tokens_per_verification"] = sums["steps"] / sums["verifications"]
                line.setdefault("drafts", {})[name] = told
        line["answers"] = answers_told(rows, way)
    return summary


def answers_told(rows: list[Row], way: str) -> dict[str, int]:
    """On how many prompts the answers agree. One tree may differ from itself too, since split-K may vary by run."""
    said = {key: [row["token_ids"] for row in of] for key, of in grouped(rows, "way", "tree", "prompt").items()}
    prompts = [row["prompt"] for row in rows if row["way"] == way and row["tree"] == "old" and row["round"] == 0]
    prompts = [prompt for prompt in prompts if (way, "new", prompt) in said]
    old, new = ([said[way, name, prompt] for prompt in prompts] for name in TREES)
    pairs = list(zip(old, new, strict=True))
    counts = {
        "prompts": len(prompts),
        "same_in_both_trees_in_the_first_round": sum(ours[0] == theirs[0] for ours, theirs in pairs),
        "same_in_both_trees_in_some_round": sum(any(one in theirs for one in ours) for ours, theirs in pairs),
    }
    for name, rounds in zip(TREES, (old, new), strict=True):
        full = [said["full", name, prompt] for prompt in prompts]
        counts[f"always_the_same_in_{name}"] = sum(all(one == of[0] for one in of) for of in rounds)
        counts[f"as_full_depth_in_{name}"] = sum(one[0] == of[0] for one, of in zip(rounds, full, strict=True))
    return counts


def cpu_summary(rows: list[Row]) -> list[Row]:
    """With ratios of CPU time, which other work on the same cores disturbs less."""
    summary = compared(rows)
    whole = compared(whole_rounds([row for row in rows if "way" in row]))
    by_round = {line["way"]: line["new_over_old"] for line in whole}
    for line, cpu in zip(summary, compared(rows, "cpu_seconds"), strict=True):
        line |= {"by_round": by_round[line["way"]]} if "way" in line else {}
        line["cpu"] = cpu["new_over_old"]
    return summary


def told(line: Row) -> str:
    name = " ".join(str(line[name]) for name in KINDS if name in line)
    text = f"{name:20}" + "".join(f" {tree} {line['ms_per_token'][tree]['median']:8.4f} ms " for tree in TREES)
    for ratio in (ratio for ratio in ("new_over_old", "by_answer", "by_round", "cpu") if ratio in line):
        text += " {} {:.4f} (95% {:.4f}-{:.4f})".format(ratio, line[ratio]["median"], *line[ratio]["confidence_95"])
    return text + {True: ", same tokens", False: ", different tokens", None: ""}[line.get("same_tokens")]
