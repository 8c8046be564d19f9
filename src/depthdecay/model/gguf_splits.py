"""Pre-tokenizers: how byte-level BPE splits text into words before merging, by their names in GGUF files.

A file has no pattern, only a name in `tokenizer.ggml.pre`. The patterns come from the models' own tokenizer.json;
everything else that a name implies follows llama.cpp, which invented the names.
"""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _PUNCTUATION_AND_SPACE
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _PUNCTUATION_AND_SPACE
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = r"[^\r\n\p{{L}}\p{{N}}]?{0}*{1}+{2}|[^\r\n\p{{L}}\p{{N}}]?{0}+{1}*{2}"
_SLASHES_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED_WORDS.format(_UPPER, _LOWER, "") + r"|\p{N}" + _SLASHES_AND_SPACE
_GPT4O = _CASED_WORDS.format(_UPPER, _LOWER, _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _SLASHES_AND_SPACE
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_HAN_AND_HANGUL = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _HAN_AND_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class WordSplit:
    """Patterns, each applied to the pieces left by the previous ones, and what else a name implies."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token stays one, regardless of merges
    adds_bos: bool = False  # default if the file does not say
    composes: bool = False  # NFC: letters and their accents are first composed into one character


def _named(split: WordSplit, *names: str) -> dict[str, WordSplit]:
    return dict.fromkeys(names, split)


SPLITS: dict[str, WordSplit] = {
    **_named(
        WordSplit((_LLAMA3,), whole_words=True, adds_bos=True),
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    **_named(WordSplit((_LLAMA3,)), "dbrx", "smaug-bpe", "chatglm-bpe"),
    **_named(WordSplit((_LLAMA3,), whole_words=True), "glm4", "glm5"),
    # llama.cpp does not normalize, but Qwen's models were trained on NFC text.
    **_named(WordSplit((_QWEN2,), composes=True), "qwen2", "deepseek-r1-qwen"),
    **_named(WordSplit((_QWEN35,), composes=True), "qwen35"),
    **_named(WordSplit((_QWEN2,)), "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
    **_named(WordSplit((_TEKKEN,), whole_words=True, adds_bos=True), "tekken"),
    **_named(WordSplit((_GPT4O,)), "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    **_named(
        WordSplit((_GPT2,)),
        *("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "exaone4"),
    ),
    **_named(
        WordSplit((r"\p{N}", _GPT2)),
        *("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    **_named(WordSplit(_DEEPSEEK_V3), "deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    **_named(WordSplit(_DEEPSEEK_LLM), "deepseek-llm"),
    **_named(WordSplit(_DEEPSEEK_CODER), "deepseek-coder"),
    **_named(WordSplit(_FALCON), "falcon"),
    **_named(WordSplit((_BLOOM,)), "poro-chat", "bloom", "gpt3-finnish"),
    **_named(WordSplit((_BLOOM, r"\p{N}")), "viking"),
    **_named(WordSplit((_BAILING,)), "bailingmoe", "bailingmoe2", "llada-moe"),
    **_named(WordSplit((_SEED_CODER,)), "seed-coder"),
}
# Old files name none. Most models of that time split as GPT-2 does; llama.cpp's own default fits only Falcon.
UNNAMED = ("", "default")
UNNAMED_SPLIT = WordSplit((_GPT2,))
# Not byte-level: text is split at newlines only.
LINES = WordSplit((r"[^\n]+|\n+",), adds_bos=True)
