"""From a model to a folder with a learned drafter: a head is trained on text that the model writes itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from depthdecay.calibration.learned_drafter import DrafterLesson, DrafterSettings, LearnedDrafter
from depthdecay.calibration.own_questions import Say
from depthdecay.calibration.own_text import OwnText, write_own_text
from depthdecay.calibration.text_kinds import kind_of
from depthdecay.calibration.time_budget import TimeBudget
from depthdecay.calibration.work_folder import WORK_FOLDER
from depthdecay.engine.engine import Engine
from depthdecay.model.layers import LayerStack
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.model.prompts import token_ids
from depthdecay.plan.file import PLAN_FILE
from depthdecay.plan.identity import identity
from depthdecay.plan.plan import Plan
from depthdecay.speculative.draft_head import HEAD_FILE, DraftHead

# Default minutes, and the share of them spent on writing text.
MINUTES = {"cuda": 15.0}
MINUTES_ELSEWHERE = 60.0
# Of eight minutes on an H200, half went into writing 3.9 million tokens and a quarter into reading them. What was left
# was enough for 1.35 epochs, with the loss still falling fast.
WRITING = 0.25
# On two cores, writing a token takes 3.6 ms, reading its states 0.5, and a step of training on it 0.15.
WRITING_ELSEWHERE = 0.65
LATEST_WRITING = 0.7  # if the minimum of text takes that long
SHARE_GIVEN, SHARE_GIVEN_FURTHER = 0.3, 0.6  # of the text: answers to the user's prompts, if there are any


def learn_plan(
    loaded: LoadedModel,
    prompts: Sequence[Any] | None,
    folder: Path,
    *,
    settings: DrafterSettings | None = None,
    time_budget: TimeBudget | None = None,
    quantize: str | None = None,
    in_4_bits: bool = False,
    start: DraftHead | None = None,
    seed: int = 0,
    say: Say = lambda message: None,
) -> tuple[Plan, LearnedDrafter]:
    """A full-depth plan with a learned drafter, saved in `folder` with its heads.

    `prompts`: the user's, if any, are answered too. `quantize`: how the weights are quantized while the model writes.
    `in_4_bits`: the head will draft with int4 weights. `start`: a trained head to train further; then more of the text
    answers the user's prompts.
    Ctrl-C while the head trains saves the best so far. Called again after an interruption, it resumes where it stopped.
    If the time is too short, `TooLittleTime` is raised as soon as that is known.
    """
    started = time.monotonic()
    stack = LayerStack.of(loaded.model)
    device = stack.model.device.type
    budget = time_budget or usual_time(device)
    settings = replace(settings or DrafterSettings.for_device(stack.model.device), seed=seed)
    given = _ids(loaded, prompts or ())
    share = WRITING if device == "cuda" else WRITING_ELSEWHERE
    texts = write_own_text(
        Engine(loaded.model, quantize=quantize, origin=loaded.origin),
        loaded.tokenizer,
        settings.most_text,
        seed=seed,
        prompts=given,
        share_given=SHARE_GIVEN if start is None else SHARE_GIVEN_FURTHER,
        folder=folder,
        say=say,
        until=started + budget.left_of(share),
        latest=started + budget.left_of(max(share, LATEST_WRITING)),
    )
    pairs = [((text.prompt, text.answer), _kind(text, loaded.tokenizer)) for text in texts]
    work = folder / WORK_FOLDER
    lesson = DrafterLesson(
        stack, pairs, settings, seconds=budget.left_of(), folder=work, in_4_bits=in_4_bits, start=start, say=say
    )
    tokens = sum(len(text.answer) for text in texts)

    def saved(drafter: LearnedDrafter) -> Plan:
        drafter.figures["tokens_written"] = tokens
        drafter.figures["seconds_in_all"] = round(time.monotonic() - started, 1)
        return _saved(stack, drafter, folder)

    try:
        drafter = lesson.learn()
    except KeyboardInterrupt:
        best = lesson.best_so_far()
        if best is not None:
            saved(best)
            say(f"the best drafter so far is in {folder}")
        raise
    return saved(drafter), drafter


def _kind(text: OwnText, tokenizer: Any) -> str:
    return text.kind if text.kind == "given" else kind_of(tokenizer.decode(text.answer, skip_special_tokens=True))


def usual_time(device: str) -> TimeBudget:
    """The default time for a drafter, starting now."""
    return TimeBudget(MINUTES.get(device, MINUTES_ELSEWHERE))


def _ids(loaded: LoadedModel, prompts: Sequence[Any]) -> list[list[int]]:
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    return [token_ids(loaded.tokenizer, prompt, {}, vocabulary) for prompt in prompts]


def _saved(stack: LayerStack, drafter: LearnedDrafter, folder: Path) -> Plan:
    """Saves heads first, after removing an older plan, so that a plan in the folder always matches its heads."""
    held_out = drafter.figures["head"]["held_out"]["all"]
    notes = {
        "drafter": {
            "right": [round(share, 4) for share in held_out["right"]],
            "tokens_a_window": round(held_out["tokens_a_window"], 3),
            "cost_of_a_draft": round(drafter.figures["head"]["cost_of_a_draft"], 4),
            "expected_speedup": round(drafter.figures["head"]["expected_speedup"], 3),
            "tokens_written": drafter.figures["tokens_written"],
            "seconds": drafter.figures["seconds_in_all"],
        }
    }
    plan = replace(Plan.full(stack.num_layers), draft_head=HEAD_FILE, notes=notes).with_model(identity(stack.model))
    (folder / PLAN_FILE).unlink(missing_ok=True)
    drafter.save(folder)
    plan.save(folder)
    return plan
