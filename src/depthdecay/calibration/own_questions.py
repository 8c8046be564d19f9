"""Questions that the model writes itself: it continues the user turn of its chat template, or short openings."""

from __future__ import annotations

import math
import time
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
from depthdecay.calibration.text_batches import TextBatches, Written
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
BASE_TOKENS = 24  # sampled after an opening if there is no chat template: enough for texts to diverge
LEAST_QUESTIONS = 12  # the fewest that a calibration needs
_FEWEST_LETTERS, _MOST_CHARACTERS = 8, 800
_SENTENCE_ENDS = ".?!。？！؟"
_MARK = "\U000f5a5a"  # a private-use character: no template trims it or changes its case


class QuestionWriter:
    """Batches of distinct prompts of many kinds, with the chat template, as token ids; deterministic for a seed."""

    def __init__(
        self,
        batches: TextBatches,
        tokenizer: Any,
        *,
        longest: int | None,
        seed: int,
        folder: Path | None = None,
        say: Say = lambda message: None,
    ) -> None:
        """`folder`: questions are kept there, for resuming and for other uses."""
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
        self.work = None if folder is None else WorkFolder(folder, writing_inputs(batches.engine, tokenizer, seed))

    def batch(self, number: int, rows: int, until: float = math.inf) -> list[list[int]]:
        """The batch with this number: as kept, or written now and cut short at the time `until`."""
        prompts = self.recall(number, rows)
        if prompts is None:
            before = self.batches.written
            prompts = self.write(number, rows, until)
            took = self.batches.written - before
            asked = self.asked.take_added()
            if self.work is not None:
                self.work.write(_name(number), {"rows": rows, "prompts": prompts, "asked": asked, "took": vars(took)})
        return [prompt for prompt in prompts if self.longest is None or len(prompt) <= self.longest]

    def recall(self, number: int, rows: int) -> list[list[int]] | None:
        """A batch that was kept, or None; its questions are not repeated, and its speed counts as this run's."""
        kept = None if self.work is None else self.work.read(_name(number))
        if kept is None or kept["rows"] != rows:
            return None
        self.asked.restore(kept["asked"])
        self.batches.written += Written(**kept["took"])
        prompts: list[list[int]] = kept["prompts"]
        return prompts

    def write(self, number: int, rows: int, until: float = math.inf) -> list[list[int]]:
        """The batch with this number, of whatever length."""
        random = Random(f"{self.seed}/{number}")
        starts = [start for start in (self._start(random) for _ in range(rows)) if self._fits(start[1])]
        if not starts:
            raise DepthDecayError("the model's context has no room for a question after its chat template")
        ends = self.ends | self._header(None)[2] if self.is_chat else self.ends
        seed = random.randrange(2**31)
        ids = [ids for _, ids in starts]
        texts = self.batches.write(ids, self.new_tokens, ends=ends, rows=rows, temperature=1.0, seed=seed, until=until)
        prompts = [self._prompt(*start, text, ends, random) for start, text in zip(starts, texts, strict=True)]
        found = [prompt for prompt in prompts if prompt is not None]
        self.written += len(prompts)
        self.dropped += len(prompts) - len(found)
        return found

    def _start(self, random: Random) -> tuple[str, list[int]]:
        """The first words (possibly none), and the model's input: the user header followed by them."""
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
            # Without an opening the model is freer, but small models then write English despite the system prompt.
            opening = opening if random.random() < (0.4 if language == "English" else 0.75) else ""
        ids = self.tokenizer.encode(self._header(system)[0] + opening, add_special_tokens=False)
        return opening, [int(token) for token in ids]

    def _fits(self, prompt: list[int]) -> bool:
        limit = self.batches.engine.stack.context_limit()
        return limit is None or len(prompt) + self.new_tokens <= limit

    def _prompt(
        self, opening: str, start: list[int], text: list[int], ends: frozenset[int], random: Random
    ) -> list[int] | None:
        """A prompt to answer, or None if the text is unusable."""
        under = random.choice(ANSWERED_UNDER) if random.random() < 0.25 else None
        end = next((place for place, token in enumerate(text) if token in ends), None)
        text = text[:end]
        if repeats_itself(text):
            return None
        words = self._continuation(start, text).rstrip("\ufffd")  # an incomplete character
        if self.is_chat:
            words = _question_in(words, self._header(None)[1], has_ended=end is not None)
        if not _is_sensible(words) or not self.asked.is_new(letters(opening + words)):
            return None
        if not self.is_chat:
            return start + text
        turns = [{"role": "system", "content": under}] if under is not None and self.has_system else []
        return chat_ids(self.tokenizer, [*turns, {"role": "user", "content": (opening + words).strip()}])

    def _continuation(self, start: list[int], text: list[int]) -> str:
        """Decoded together with the preceding text: some tokenizers drop a leading space."""
        as_is = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        before, whole = (str(self.tokenizer.decode(ids, **as_is)) for ids in (start, start + text))
        return whole[len(before) :] if whole.startswith(before) else ""


def _name(number: int) -> str:
    return f"own-questions-{number:05}"


def own_prompts(
    engine: Engine,
    tokenizer: Any,
    count: int,
    *,
    longest: int | None,
    seed: int,
    folder: Path,
    say: Say,
    until: float = math.inf,
) -> list[list[int]]:
    """`count` prompts that the model wrote itself; fewer if most are unusable, or at the time `until`.

    The minimum for a calibration is written whatever the time. The choice is kept: with other prompts, what an
    interrupted run has measured would be invalid.
    """
    work = WorkFolder(folder, {**writing_inputs(engine, tokenizer, seed), "longest": longest, "count": count})
    kept: list[list[int]] | None = work.read("own-prompts")
    if kept is not None:
        return kept
    writer = QuestionWriter(TextBatches(engine), tokenizer, longest=longest, seed=seed, folder=folder, say=say)
    prompts: list[list[int]] = []
    number = 0
    rows = writer.batches.rows(256 + writer.new_tokens)
    most = 4 * -(-count // rows) + 4  # batches: give up on a model whose questions mostly repeat
    while len(prompts) < count and number < most:
        is_enough = len(prompts) >= LEAST_QUESTIONS
        if is_enough and time.monotonic() >= until:
            break
        prompts += writer.batch(number, rows, until if is_enough else math.inf)
        number += 1
        say(f"the model writes questions: {min(len(prompts), count)} of {count}")
    if len(prompts) < min(count, LEAST_QUESTIONS):
        raise DepthDecayError(
            f"the model wrote {len(prompts)} usable questions in {number * rows} tries, and calibration needs at least "
            f"{LEAST_QUESTIONS}; give prompts"
        )
    work.write("own-prompts", prompts[:count])
    return prompts[:count]


def writing_inputs(engine: Engine, tokenizer: Any, seed: int) -> dict[str, Any]:
    """Everything that determines what a model writes; kept texts with other inputs are not reused."""
    model = engine.stack.model
    return {
        "model": identity(model).to_dict(),
        "numbers": f"{model.dtype} {model.device.type}",
        "template": str(getattr(tokenizer, "chat_template", None)),
        "seed": seed,
    }


def end_tokens(engine: Engine, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text, from the model's generation config or the tokenizer."""
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
    """What the template puts before a user message, the text after it, and its token, if it is a single one.

    Found by rendering a message with a unique marker, so it works for any template.
    """
    turns = [] if system is None else [{"role": "system", "content": system}]
    text = chat_text(tokenizer, [*turns, {"role": "user", "content": _MARK}])
    if text.count(_MARK) != 1:
        raise DepthDecayError("the model's chat template does not render the user message exactly once; give prompts")
    header, behind = text.split(_MARK)
    own = control_tokens(tokenizer)
    control = own.spelled.match(behind.strip())
    if control is None:
        return header, next(iter(behind.split()), ""), frozenset()
    ids = tokenizer.encode(control[0], add_special_tokens=False)
    return header, control[0], frozenset(int(token) for token in ids[:1] if token in own.ids)


def _question_in(text: str, end_mark: str, *, has_ended: bool) -> str:
    """The text up to the template's end mark; if it was cut off, up to the first paragraph's or last sentence's end."""
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
