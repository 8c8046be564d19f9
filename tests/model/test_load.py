"""Loading: every source loads, a GGUF is converted once, and bad input gives a one-line error."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from saved_llamas import refusal, save_llama
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig, LlamaForCausalLM, T5Config, ViTConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.library_internals import attention_name
from depthdecay.model import gguf_tokenizer, prompts
from depthdecay.model import load as models

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    # The environment variable is read at import, which has already happened.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


# Folders


def test_folder_loads_as_saved(tmp_path: Path) -> None:
    saved = save_llama(tmp_path)
    loaded = models.load(str(tmp_path), device="cpu")
    assert (loaded.source, loaded.name, loaded.tokenizer) == ("folder", str(tmp_path), None)
    assert not loaded.model.training
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded.model(tokens).logits, saved(tokens).logits)


@pytest.mark.parametrize(
    ("asked", "given"),
    [(None, "bfloat16"), ("auto", "bfloat16"), ("bf16", "bfloat16"), ("fp16", "float16"), ("float32", "float32")],
)
def test_dtype(tmp_path: Path, asked: str | None, given: str) -> None:
    save_llama(tmp_path)
    LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert models.load(str(tmp_path), device="cpu", dtype=asked).model.dtype == getattr(torch, given)


def test_a_model_that_caps_scores_runs_an_attention_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # as in transformers 5.17
    tiny_model("gemma2").save_pretrained(tmp_path)
    assert attention_name(AutoModelForCausalLM.from_pretrained(tmp_path).config) == "sdpa"
    assert attention_name(models.load(str(tmp_path), device="cpu").model.config) == "eager"


def test_a_model_of_the_hub_is_told_by_its_commit(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files cached for its weights are stored under this key; without one, nothing is cached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    keys = []
    for commit in ("a" * 40, "b" * 40):
        save_llama(repository / "snapshots" / commit)
        (repository / "refs" / "main").write_text(commit)
        origin = models.load("someone/tiny", device="cpu").origin
        assert origin is not None
        keys.append(origin.key)
    assert len(set(keys)) == 2


def test_progress_is_told_in_single_lines(tmp_path: Path) -> None:
    save_llama(tmp_path)
    said: list[str] = []
    models.load(str(tmp_path), device="cpu", progress=said.append)
    assert said
    assert not any("\n" in line for line in said)


def test_libraries_are_quiet_and_left_as_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_llama(tmp_path)
    capfd.readouterr()
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    models.load(str(tmp_path), device="cpu")
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# Bad input


def test_missing_path(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "model"
    assert str(missing) in refusal(missing)
    assert "no.gguf" in refusal("no.gguf")
    assert "''" in refusal("")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["nobody/no-such-model", "nosuchmodel", "not an id at all"])
def test_unknown_hub_id(name: str) -> None:
    message = refusal(name)
    assert name in message
    assert models.EMBEDDED_MODEL in message


def test_without_a_network_an_unknown_model_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: Any, **__: Any) -> None:
        raise OSError("Name or service not known")

    def in_vain(*_: Any, **__: Any) -> None:
        raise AssertionError("the libraries were called, which retry for a minute")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models, "getproxies", dict)
    monkeypatch.setattr(models.socket, "create_connection", nobody)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", in_vain)
    assert "cannot be reached" in refusal("no-such-org/no-such-model")


def test_folder_without_config(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path)
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    assert str(tmp_path / "weights.gguf") in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter" in refusal(tmp_path)


def test_folder_with_broken_config(tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert str(tmp_path) in refusal(tmp_path)


def test_folder_with_truncated_weights(tmp_path: Path) -> None:
    save_llama(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 5000)
    assert str(tmp_path) in refusal(tmp_path)


def test_folder_that_lacks_tensors(tmp_path: Path) -> None:
    save_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert "model.layers.2" in message


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Bomb()}, tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert "pytorch_model.bin" in message
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (T5Config(), "T5ForConditionalGeneration"),
        (BertConfig(), "BertForMaskedLM"),
        (BertConfig(), "BertLMHeadModel"),
        (ViTConfig(), "ViTForImageClassification"),
        (LlamaConfig(), "LlamaForSequenceClassification"),
    ],
)
def test_no_causal_language_model(tmp_path: Path, config: Any, architecture: str) -> None:
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert architecture in message


def test_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of", "architectures": ["XForCausalLM"]}')
    (tmp_path / "model.safetensors").touch()
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert transformers.__version__ in message


def test_own_code_needs_trust(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of", "auto_map": auto_map}))
    (tmp_path / "configuration_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ArgumentError, match="set trust_remote_code") as caught:
        models.load(str(tmp_path), device="cpu")
    assert str(tmp_path) in str(caught.value)
    assert caught.value.parameters == ("trust_remote_code",)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_absent_gpu(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda:3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert refusal(tmp_path, device=device).startswith(f"device is '{device}', but ")


def test_absent_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert refusal(tmp_path, device="mps").startswith("device is 'mps', but ")


@pytest.mark.parametrize("device", ["gpu", "tpu:0", "meta", "cuda:x", ""])
def test_unknown_device(tmp_path: Path, device: str) -> None:
    save_llama(tmp_path)
    assert refusal(tmp_path, device=device).startswith(f"device is '{device}'; expected cpu, ")


@pytest.mark.parametrize("dtype", ["int8", "fp64", "nn", ""])
def test_unknown_dtype(tmp_path: Path, dtype: str) -> None:
    save_llama(tmp_path)
    assert refusal(tmp_path, dtype=dtype).startswith(f"dtype is '{dtype}'; expected auto, ")


def test_a_model_too_large_for_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    save_llama(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(
        ArgumentError, match="does not fit into the memory of cpu; use a smaller model, dtype"
    ) as caught:
        models.load(str(tmp_path), device="cpu")
    assert caught.value.parameters == ("dtype", "device")


def test_a_loaded_model_takes_no_options(tmp_path: Path) -> None:
    save_llama(tmp_path)
    loaded = models.load(str(tmp_path), device="cpu")
    assert models.as_loaded(loaded, device=None, progress=print) is loaded
    with pytest.raises(ArgumentError, match="device and dtype cannot be changed") as caught:
        models.as_loaded(loaded, device="cpu", dtype="bf16", progress=print)
    assert caught.value.parameters == ("device", "dtype")


def test_file_that_is_not_gguf(tmp_path: Path) -> None:
    for name in ("notes.gguf", "model.safetensors", "empty.gguf"):
        (tmp_path / name).write_bytes(b"" if name.startswith("empty") else b"something else")
        assert str(tmp_path / name) in refusal(tmp_path / name)


@pytest.mark.parametrize("size", [4, 20, 3000, 1_500_000, 50_000_000, -1])
@pytest.mark.usefixtures("no_conversion")
def test_truncated_gguf(tmp_path: Path, gguf_file: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "cache"))
    cut = tmp_path / "cut.gguf"
    shutil.copyfile(gguf_file, cut)
    os.truncate(cut, size if size > 0 else cut.stat().st_size + size)
    message = refusal(cut)
    assert str(cut) in message
    assert "truncated" in message


def test_gguf_of_an_architecture_that_transformers_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf
    import numpy as np

    monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "unheard_of")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = refusal(path)
    assert str(path) in message
    assert "unheard_of" in message
    assert not any((tmp_path / "cache" / "gguf").iterdir())


def test_embedded_model_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert models.EMBEDDED_MODEL in refusal(models.EMBEDDED_MODEL)


# The embedded model and the cache


@pytest.mark.slow
@pytest.mark.usefixtures("cache", "no_conversion")
def test_embedded_model_answers() -> None:
    loaded = models.load(device="cpu")
    assert (loaded.source, loaded.name) == ("embedded", "smollm2-135m")
    assert loaded.model.dtype == torch.float32
    assert loaded.tokenizer is not None
    ids = prompts.prompt_ids(loaded.tokenizer, "What is the capital of France?")
    answer = loaded.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :]
    assert "Paris" in loaded.tokenizer.decode(answer)
    end = loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert answer[-1] == end
    assert loaded.model.generation_config.eos_token_id == [end, loaded.tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    assert loaded.tokenizer.eos_token_id == end
    assert loaded.tokenizer.pad_token_id is not None
    assert loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight


@pytest.mark.slow
@pytest.mark.usefixtures("cache", "no_conversion")
def test_cached_weights_equal_the_file(gguf_file: Path) -> None:
    direct = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    ).eval()
    tokens = torch.tensor([[1, 9690, 198, 2683, 359, 253, 5356]])
    with torch.no_grad():
        assert torch.equal(models.load(device="cpu").model(tokens).logits, direct(tokens).logits)


# Prompts


class Template:
    """The part of a tokenizer that the functions under test use."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return [len(text)]

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool = True, **options: Any) -> Any:
        from jinja2 import Template as Jinja

        text = Jinja(self.chat_template or "", keep_trailing_newline=True).render(messages=messages)
        return [ord(letter) for letter in text] if tokenize else text


@pytest.mark.usefixtures("cache", "no_conversion")
def test_prompts_of_a_chat_model() -> None:
    tokenizer = models.load(device="cpu").tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(prompts.prompt_ids(tokenizer, "Hello", system="Be brief."))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(prompts.prompt_ids(tokenizer, "Hello, world .", chat=False)) == "Hello, world ."
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    assert "Yes?<|im_end|>" in tokenizer.decode(prompts.chat_ids(tokenizer, turns))


def test_prompts_without_a_template() -> None:
    assert prompts.prompt_ids(Template(None), "abc") == [3]
    for call in (
        lambda: prompts.prompt_ids(Template(None), "abc", chat=True),
        lambda: prompts.prompt_ids(Template(None), "abc", system="Be brief."),
        lambda: prompts.prompt_ids(None, "abc"),
        lambda: prompts.chat_ids(None, []),
    ):
        with pytest.raises(DepthDecayError):
            call()


def test_template_that_refuses_a_role() -> None:
    with pytest.raises(DepthDecayError, match="rejects"):
        prompts.prompt_ids(Template("{{ missing.role }}"), "abc", chat=True, system="x")


@pytest.mark.parametrize("content", [None, ["text"], [{"type": "text", "text": "hi"}], 5])
def test_messages_that_hold_no_text(content: Any) -> None:
    with pytest.raises(DepthDecayError, match="the content of message 2 is"):
        prompts.chat_ids(Template(CHATML), [{"role": "system", "content": "x"}, {"role": "user", "content": content}])


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "hi"}, "hi", None])
def test_messages_that_are_none(message: Any) -> None:
    with pytest.raises(DepthDecayError, match="message 1"):
        prompts.chat_ids(Template(CHATML), [message])


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content + 1 }}", "{{ {}['a'].b }}", "{{ 1 // 0 }}", "{% broken", "{{ messages[9].x.y }}"],
)
def test_template_that_fails(template: str) -> None:
    with pytest.raises(DepthDecayError, match="chat template") as caught:
        prompts.chat_ids(Template(template), [{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)


def test_text_that_is_none() -> None:
    for text in ("a\ud800", None):
        with pytest.raises(DepthDecayError, match="prompt"):
            prompts.prompt_ids(Template(None), text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, 7),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }} </s>{% endfor %}", 2),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{{ missing.role }}", None),
        (None, None),
    ],
)
def test_end_of_turn(template: str | None, end: int | None) -> None:
    assert (
        gguf_tokenizer.end_of_turn(Template(template), {"</s>": 2, "<|im_start|>": 6, "<|im_end|>": 7, "<|": 8}) == end
    )
