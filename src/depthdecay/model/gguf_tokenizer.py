"""A GGUF file's tokenizer, built from the file's own fields.

transformers builds one too, but it adds no BOS, knows few pre-tokenizers, respells tokens with spaces or characters
outside byte-level BPE's alphabet, and does so differently from version to version.
"""

from __future__ import annotations

import warnings
from typing import Any

from depthdecay.model.gguf_fields import CONTROL, USER_DEFINED, TokenizerFields

_SPACE = "▁"  # sentencepiece's space
BOS_FIRST = "{{ bos_token }}"


def make_tokenizer(fields: TokenizerFields) -> Any:
    """A fast tokenizer that encodes and decodes as the file specifies."""
    from transformers import PreTrainedTokenizerFast

    if fields.names_no_split:
        warnings.warn(
            "the GGUF file names no pre-tokenizer, so text is split as GPT-2 does; "
            "if the model was trained differently, a newer conversion of it gives better text",
            stacklevel=2,
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_backend(fields),
        bos_token=fields.text(fields.bos),
        eos_token=fields.text(fields.eos),
        unk_token=fields.text(fields.unknown),
        pad_token=fields.text(fields.eos if fields.padding is None else fields.padding),
        add_bos_token=fields.adds_bos,
        add_eos_token=fields.adds_eos,
        clean_up_tokenization_spaces=False,  # it would remove spaces from the text
    )
    tokenizer.chat_template = fields.chat_template
    if needs_bos_first(tokenizer, fields):
        tokenizer.chat_template = BOS_FIRST + str(fields.chat_template)
    return tokenizer


def end_ids(tokenizer: Any, fields: TokenizerFields) -> list[int]:
    """The ids that end an answer: the file's, and the one that the chat template writes after an answer."""
    turn = end_of_turn(tokenizer, fields.of_type(CONTROL, USER_DEFINED))
    return list(dict.fromkeys([*fields.ends, *([] if turn is None else [turn])]))


def end_of_turn(tokenizer: Any, marked: dict[str, int]) -> int | None:
    """The id of the token that the chat template writes after an assistant's answer, if it is one token."""
    answer = "Zanzibar"
    text = _rendered(tokenizer, [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": answer}])
    _, found, behind = (text or "").rpartition(answer)
    behind = behind.lstrip()
    endings = [token for token in marked if token and behind.startswith(token)]
    return marked[max(endings, key=len)] if found and endings else None


def needs_bos_first(tokenizer: Any, fields: TokenizerFields) -> bool:
    """Whether the file wants a BOS that its template omits; llama.cpp then adds one before every prompt."""
    text = _rendered(tokenizer, [{"role": "user", "content": "Where?"}]) if fields.adds_bos else None
    return text is not None and not text.startswith(str(fields.text(fields.bos)))


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str | None:
    if not tokenizer.chat_template:
        return None
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template is code from the file, and may reject these messages
        return None


def _backend(fields: TokenizerFields) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers

    backend = Tokenizer(_model(fields))
    if fields.kind == "gpt2":
        backend.normalizer = normalizers.NFC() if fields.split.composes else None
        backend.decoder = decoders.ByteLevel()
    else:
        spaces = normalizers.Replace(" ", _SPACE)
        backend.normalizer = (
            normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if fields.adds_space else spaces
        )
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if fields.adds_space else [])])
    if fields.split.patterns:
        backend.pre_tokenizer = _pre_tokenizer(fields)
    # Matched in the raw text, before normalization.
    control = [AddedToken(text, special=True, normalized=False) for text in fields.of_type(CONTROL)]
    own = [AddedToken(text, special=False, normalized=False) for text in fields.of_type(USER_DEFINED)]
    backend.add_special_tokens(control)
    backend.add_tokens(own)
    return backend


def _model(fields: TokenizerFields) -> Any:
    from tokenizers import models

    vocabulary = {token: index for index, token in enumerate(fields.tokens)}
    if fields.kind == "gpt2":
        merges = _possible(fields.merges, vocabulary)
        return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=fields.split.whole_words)
    merges = _possible(fields.merges, vocabulary) if fields.kind == "gemma4" else _by_score(fields.scores, vocabulary)
    unknown = fields.text(fields.unknown)
    return models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _pre_tokenizer(fields: TokenizerFields) -> Any:
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in fields.split.patterns]
    if fields.kind == "gpt2":
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _possible(merges: list[tuple[str, str]], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges that join two tokens into a token; tokenizers rejects others, which could never apply."""
    return [(a, b) for a, b in merges if a in vocabulary and b in vocabulary and a + b in vocabulary]


def _by_score(scores: list[float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs that form each token, best token first: sentencepiece merges to the best-scored token."""
    merges = []
    for token in sorted(vocabulary, key=lambda token: -scores[vocabulary[token]]):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += [(a, b) for a, b in cuts if a in vocabulary and b in vocabulary]
    return merges
