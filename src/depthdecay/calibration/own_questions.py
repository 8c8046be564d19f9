"""Questions that the model writes itself: it continues the user's turn of its chat template, or short openings."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from depthdecay.calibration.question_starts import (
    ANSWERED_UNDER,
    ASKED_ABOUT,
    DOCUMENTS,
    OPENINGS,
    TOPICS,
    WRITES_IN,
)
from depthdecay.calibration.text_batches import TextBatches
from depthdecay.calibration.text_filters import NearDuplicates, letters, repeats_itself
from depthdecay.calibration.work_folder import WorkFolder
from depthdecay.engine.engine import Engine
from depthdecay.errors import DepthDecayError
from depthdecay.model.control_tokens import control_tokens
from depthdecay.model.prompts import chat_ids, chat_text, prompt_ids
from depthdecay.plan.identity import identity

Say = Callable[[str], None]

QUESTION_TOKENS = 96
ENGLISH = 0.7  # of all questions; other languages share the rest
BASE_TOKENS = 24  # sampled behind an opening, where there is no chat template: enough to part one text from another
LEAST_QUESTIONS = 12  # as many as a calibration needs
_FEWEST_LETTERS, _MOST_CHARACTERS = 8, 800
_SENTENCE_ENDS = ".?!。？！؟"
_MARK = "\U000f5a5a"  # a private-use character: no template trims it or changes its case


class QuestionWriter:
    """Batches of prompts, template and all, as token ids: new ones only, of many kinds, the same for the same seed."""

    def __init__(
        self,
        batches: TextBatches,
        tokenizer: Any,
        *,
        longest: int | None,
        seed: int,
        say: Say = lambda message: None,
    ) -> None:
        if tokenizer is None:
            raise DepthDecayError(
                "this model has no tokenizer, so it cannot write questions itself; give prompts as token ids"
            )
        self.batches = batches
        self.tokenizer = tokenizer
        self.seed = seed
        self.longest = longest  # tokens of a prompt, the template's included
        self.is_chat = bool(getattr(tokenizer, "chat_template", None))
        if not self.is_chat:
            say("this model has no chat template, so it continues short openings instead of asking questions")
        self.asked = NearDuplicates(n=6)
        self.written = self.dropped = 0
        self.new_tokens = QUESTION_TOKENS if self.is_chat else BASE_TOKENS
        self.has_system = self.is_chat and _takes_system_prompts(tokenizer)
        self.ends = end_tokens(batches.engine, tokenizer)
        self._header = cache(lambda system: _user_header(tokenizer, system))

    def write(self, number: int, rows: int) -> list[list[int]]:
        """The batch with this number."""
        random = Random(f"{self.seed}/{number}")
        starts = [start for start in (self._start(random) for _ in range(rows)) if self._fits(start[1])]
        if not starts:
            raise DepthDecayError("the model's context has no room for a question behind its chat template")
        ends = self.ends | self._header(None)[2] if self.is_chat else self.ends
        seed = random.randrange(2**31)
        ids = [ids for _, ids in starts]
        texts = self.batches.write(ids, self.new_tokens, ends=ends, rows=rows, temperature=1.0, seed=seed)
        prompts = [self._prompt(*start, text, ends, random) for start, text in zip(starts, texts, strict=True)]
        found = [prompt for prompt in prompts if prompt is not None]
        self.written += len(prompts)
        self.dropped += len(prompts) - len(found)
        return found

    def _start(self, random: Random) -> tuple[str, list[int]]:
        """The first words, which may be none, and what the model is given: them behind the user's header."""
        topic = random.choice(TOPICS)
        language = "English" if random.random() < ENGLISH else random.choice(list(OPENINGS)[1:])
        opening = random.choice(OPENINGS[language])
        if not self.is_chat:
            if random.random() < 0.6:
                opening = random.choice(DOCUMENTS).format(topic=topic)
            return opening, prompt_ids(self.tokenizer, opening, chat=False)
        system = None
        if self.has_system:
            system = random.choice(ASKED_ABOUT).format(topic=topic)
            system += "" if language == "English" else WRITES_IN.format(language=language)
            # A system prompt alone leaves the model free in how it begins; small ones then write English all the same.
            opening = opening if random.random() < (0.4 if language == "English" else 0.75) else ""
        ids = self.tokenizer.encode(self._header(system)[0] + opening, add_special_tokens=False)
        return opening, [int(token) for token in ids]

    def _fits(self, prompt: list[int]) -> bool:
        limit = self.batches.engine.stack.context_limit()
        return limit is None or len(prompt) + self.new_tokens <= limit

    def _prompt(
        self, opening: str, start: list[int], text: list[int], ends: frozenset[int], random: Random
    ) -> list[int] | None:
        """A prompt to answer, or None where what was written is no good."""
        under = random.choice(ANSWERED_UNDER) if random.random() < 0.25 else None
        end = next((place for place, token in enumerate(text) if token in ends), None)
        text = text[:end]
        if repeats_itself(text):
            return None
        words = self._continuation(start, text).rstrip("\ufffd")  # half a character
        if self.is_chat:
            words = _question_in(words, self._header(None)[1], has_ended=end is not None)
        if not _is_sensible(words) or not self.asked.is_new(letters(opening + words)):
            return None
        if self.is_chat:
            turns = [{"role": "system", "content": under}] if under is not None and self.has_system else []
            prompt = chat_ids(self.tokenizer, [*turns, {"role": "user", "content": (opening + words).strip()}])
        else:
            prompt = start + text
        return prompt if self.longest is None or len(prompt) <= self.longest else None

    def _continuation(self, start: list[int], text: list[int]) -> str:
        """Read together with what stands before it: some tokenizers drop the space that a text begins with."""
        as_is = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        before, whole = (str(self.tokenizer.decode(ids, **as_is)) for ids in (start, start + text))
        return whole[len(before) :] if whole.startswith(before) else ""


def own_prompts(
    engine: Engine, tokenizer: Any, count: int, *, longest: int | None, seed: int, folder: Path, say: Say
) -> list[list[int]]:
    """So many prompts that the model wrote itself, or fewer where most of what it writes is no good."""
    writer = QuestionWriter(TextBatches(engine), tokenizer, longest=longest, seed=seed, say=say)
    work = WorkFolder(folder, {**writing_inputs(engine, tokenizer, seed), "longest": longest})
    kept = work.read("own-questions") or {"prompts": [], "asked": [], "batches": 0}
    prompts, number = kept["prompts"], kept["batches"]
    writer.asked.restore(kept["asked"])
    rows = writer.batches.rows(256 + writer.new_tokens)
    most = 4 * -(-count // rows) + 4  # batches: a model whose questions mostly repeat each other is not waited for
    while len(prompts) < count and number < most:
        prompts += writer.write(number, rows)
        number += 1
        kept = {"prompts": prompts, "asked": sorted(writer.asked.seen), "batches": number}
        work.write("own-questions", kept)
        say(f"the model writes questions: {min(len(prompts), count)} of {count}")
    if len(prompts) < min(count, LEAST_QUESTIONS):
        raise DepthDecayError(
            f"the model wrote {len(prompts)} usable questions in {number * rows} tries, and calibration needs at least "
            f"{LEAST_QUESTIONS}; give prompts"
        )
    return prompts[:count]


def writing_inputs(engine: Engine, tokenizer: Any, seed: int) -> dict[str, Any]:
    """What decides what a model writes; of other texts nothing is taken over."""
    model = engine.stack.model
    return {
        "model": identity(model).to_dict(),
        "numbers": f"{model.dtype} {model.device.type}",
        "template": str(getattr(tokenizer, "chat_template", None)),
        "seed": seed,
    }


def end_tokens(engine: Engine, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text, by the model's settings or the tokenizer's."""
    own = engine.stack.model.generation_config.eos_token_id
    named = [*(own if isinstance(own, list | tuple) else [own]), getattr(tokenizer, "eos_token_id", None)]
    size = engine.stack.model.get_input_embeddings().weight.shape[0]
    return frozenset(int(token) for token in named if token is not None and 0 <= token < size)


def _takes_system_prompts(tokenizer: Any) -> bool:
    try:
        _user_header(tokenizer, "Answer briefly.")
    except DepthDecayError:  # some templates refuse the role
        return False
    return True


def _user_header(tokenizer: Any, system: str | None) -> tuple[str, str, frozenset[int]]:
    """What the template puts before a user's words, the mark behind them, and the token that this is, where it is one.

    Seen on a message that is a mark of our own, so it holds for any template.
    """
    turns = [] if system is None else [{"role": "system", "content": system}]
    text = chat_text(tokenizer, [*turns, {"role": "user", "content": _MARK}])
    if text.count(_MARK) != 1:
        raise DepthDecayError("the model's chat template does not write the user's message once; give prompts")
    header, behind = text.split(_MARK)
    own = control_tokens(tokenizer)
    control = own.spelled.match(behind.strip())
    if control is None:
        return header, next(iter(behind.split()), ""), frozenset()
    ids = tokenizer.encode(control[0], add_special_tokens=False)
    return header, control[0], frozenset(int(token) for token in ids[:1] if token in own.ids)


def _question_in(text: str, end_mark: str, *, has_ended: bool) -> str:
    """Up to the template's mark; of a text that was cut off up to its first paragraph's or last sentence's end."""
    before, mark, _ = text.partition(end_mark) if end_mark else (text, "", "")
    if mark or has_ended:
        return before.rstrip()
    paragraph, pair, _ = before.partition("\n\n")
    if pair and paragraph.strip():
        return paragraph.rstrip()
    end = max(before.rfind(sign) for sign in _SENTENCE_ENDS)
    return before[: end + 1]


def _is_sensible(text: str) -> bool:
    enough = sum(c.isalpha() * (1 if c.isascii() else 2) for c in text) >= _FEWEST_LETTERS  # other scripts say more
    return enough and len(text) <= _MOST_CHARACTERS and "\ufffd" not in text
