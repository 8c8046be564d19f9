"""Convert prompts of every form to token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from depthdecay.errors import DepthDecayError, one_line
from depthdecay.model.control_tokens import control_tokens


def as_batch(prompts: Any) -> list[Any]:
    """The batch as a list; each row of a tensor or an array is a prompt."""
    _refuse_mapping(prompts)
    try:
        batch = [] if prompts is None else list(plain(prompts))
    except TypeError:
        raise DepthDecayError(
            f"prompts is {reprlib.repr(prompts)}; expected a string, or a list of strings, conversations or token ids"
        ) from None
    if not batch:
        raise DepthDecayError("no prompt was given; pass a string, or a list of strings, conversations or token ids")
    return batch


def token_ids(tokenizer: Any, prompt: Any, settings: dict[str, Any], vocabulary: int) -> list[int]:
    """One prompt as token ids: text and conversations are tokenized, ids are kept."""
    _refuse_mapping(prompt)
    prompt = plain(prompt)
    is_chat = isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if isinstance(prompt, str) or is_chat:
        if tokenizer is None:
            raise DepthDecayError("text prompts need a tokenizer; pass token ids, or Engine(model, tokenizer, plan)")
        if isinstance(prompt, str) and not (prompt if settings.get("chat") is False else prompt.strip()):
            raise DepthDecayError("the prompt is empty; give at least one word")
        control = {"control_tokens_in_content": bool(settings.get("control_tokens_in_content"))}
        if isinstance(prompt, str):
            ids = prompt_ids(tokenizer, prompt, chat=settings.get("chat"), system=settings.get("system"), **control)
        else:
            ids = chat_ids(tokenizer, prompt, **control)
    else:
        ids = _whole_ids(prompt)
    if not ids:
        raise DepthDecayError("the prompt is empty; give at least one token")
    bad = next((token for token in ids if not 0 <= token < vocabulary), None)
    if bad is not None:
        raise DepthDecayError(f"token id {bad} is outside the model's vocabulary of {vocabulary}")
    return ids


def prompt_ids(
    tokenizer: Any,
    text: str,
    *,
    chat: bool | None = None,
    system: str | None = None,
    control_tokens_in_content: bool = False,
) -> list[int]:
    """A prompt's token ids: as a user's turn for chat models, as plain text for others or with `chat=False`.

    Plain text may contain control tokens, so that callers can write turns without the template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat or (chat is None and has_template):
        turns = [{"role": "system", "content": system}] if system is not None else []
        messages = [*turns, {"role": "user", "content": text}]
        return chat_ids(tokenizer, messages, control_tokens_in_content=control_tokens_in_content)
    if system is not None:
        raise DepthDecayError("a system prompt needs a chat model; leave it out, or put its text into the prompt")
    _require_text("the prompt", text)
    return [int(token) for token in _needed(tokenizer).encode(text)]


def chat_ids(
    tokenizer: Any, messages: Sequence[dict[str, str]], *, control_tokens_in_content: bool = False
) -> list[int]:
    """The token ids of a conversation, up to where the assistant's next answer begins.

    `control_tokens_in_content`: read `<|im_end|>` and the like in a message as the tokens that end or begin turns.
    Otherwise they are text, like everything else in a message, and only the template writes such tokens.
    """
    if not getattr(_needed(tokenizer), "chat_template", None):
        raise DepthDecayError(
            "this model has no chat template; use a plain prompt, or an instruct version of the model"
        )
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise DepthDecayError(
                f"message {number} is {reprlib.repr(message)}; expected a mapping with role and content"
            )
        for name in ("role", "content"):
            _require_text(f"the {name} of message {number}", message.get(name))
    own = control_tokens(tokenizer)
    if control_tokens_in_content or not own.are_in(messages):
        ids = _templated(tokenizer, messages, return_dict=False)
    else:
        ids = own.chat_ids(messages, lambda marked: str(_templated(tokenizer, marked, tokenize=False)))
    return [int(token) for token in ids]


def chat_text(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """A conversation rendered by the chat template, up to where the assistant's next answer begins."""
    return str(_templated(tokenizer, messages, tokenize=False))


def _templated(tokenizer: Any, messages: Sequence[Any], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **options)
    except Exception as error:  # a template is the model's own code: it may raise anything, also on purpose
        raise DepthDecayError(f"the model's chat template rejects these messages: {one_line(error)}") from error


def _require_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise DepthDecayError(f"{name} is {reprlib.repr(text)}; expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DepthDecayError(
            f"{name} has a lone surrogate at position {error.start}; give text that UTF-8 can encode"
        ) from None


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise DepthDecayError("this model has no tokenizer, so it takes only token ids, not text")
    return tokenizer


def _whole_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, int):
        raise DepthDecayError(
            f"a prompt is a list of token ids, got {prompt}; wrap each prompt's ids in a list of their own: [[1, 2, 3]]"
        )
    try:
        ids = [plain(token) for token in prompt]
    except TypeError:
        raise DepthDecayError(
            f"a prompt is a string, a list of messages or a list of token ids, not {type(prompt).__name__}"
        ) from None
    rows = [row for row in ids if isinstance(row, list | tuple)]
    if rows and len(ids) == 1:  # a batch of one, as tokenizers return it
        ids = list(rows[0])
    elif rows:
        raise DepthDecayError(f"one prompt has {len(ids)} rows of token ids; pass every row as its own prompt")
    odd = next((token for token in ids if isinstance(token, bool) or not isinstance(token, int)), None)
    if odd is not None:
        raise DepthDecayError(f"token ids are whole numbers, got {reprlib.repr(odd)}; pass text as one string")
    return [int(token) for token in ids]


def _refuse_mapping(given: Any) -> None:
    if not isinstance(given, Mapping):
        return
    if "role" in given:
        raise DepthDecayError("a message was given as a prompt; a prompt is a list of messages: [[{...}, {...}]]")
    raise DepthDecayError(
        f'a {type(given).__name__} is not a prompt; pass its token ids, as in tokenizer("text")["input_ids"]'
    )


def plain(value: Any) -> Any:
    """Tensors, arrays and numpy scalars as Python lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
