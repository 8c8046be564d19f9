"""Converted GGUF files are built once, identified by content, rebuilt when broken, and never half-written."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_llamas import refusal
from saved_model import save_tiny_chat_model

from depthdecay.model import gguf_cache, gguf_convert
from depthdecay.model import load as models


def conversion(cache: Path) -> Path:
    [folder] = (cache / "gguf").iterdir()
    return folder


@pytest.mark.usefixtures("no_conversion")
def test_copy_of_a_file_is_not_converted_again(tmp_path: Path, cache: Path, gguf_file: Path) -> None:
    assert gguf_cache.converted(gguf_file, torch.float32, pytest.fail) == (conversion(cache), False)
    # Identified by content: neither the name nor the extension matters.
    shutil.copyfile(gguf_file, tmp_path / "renamed")
    loaded = models.load(str(tmp_path / "renamed"), device="cpu", progress=pytest.fail)
    assert (loaded.source, loaded.model.dtype) == ("gguf", torch.float32)


@pytest.fixture
def fake_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_file: Path) -> list[str]:
    """Conversions write a tiny model in milliseconds and are counted."""
    count: list[str] = []

    def convert(path: Path, reader: object, folder: Path, dtype: torch.dtype) -> None:
        count.append(path.name)
        save_tiny_chat_model(folder)

    monkeypatch.setattr(gguf_convert, "convert", convert)
    monkeypatch.setattr(gguf_convert, "read_checked", lambda path: type("Reader", (), {"tensors": []}))
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "cache"))
    return count


def _cut_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 3000)


def _garble_weights(folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    (folder / "model.safetensors").write_bytes(b"\xff" * size)


def _garble_config(folder: Path) -> None:
    size = (folder / "config.json").stat().st_size
    (folder / "config.json").write_bytes(b"{" * size)


def _remove_manifest(folder: Path) -> None:
    (folder / "depthdecay.json").unlink()


def _garble_manifest(folder: Path) -> None:
    (folder / "depthdecay.json").write_text("[]")


def _remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "damage", [_cut_weights, _garble_weights, _garble_config, _remove_manifest, _garble_manifest, _remove_weights]
)
def test_broken_cache_is_rebuilt(tmp_path: Path, fake_conversion: list[str], damage: Any) -> None:
    models.load(device="cpu")
    models.load(device="cpu")
    assert len(fake_conversion) == 1
    damage(conversion(tmp_path / "cache"))
    models.load(device="cpu")
    assert len(fake_conversion) == 2
    models.load(device="cpu")
    assert len(fake_conversion) == 2
    assert conversion(tmp_path / "cache")  # nothing else is left


def test_each_dtype_has_its_own_copy(tmp_path: Path, fake_conversion: list[str]) -> None:
    models.load(device="cpu", dtype="bf16")
    models.load(device="cpu")
    models.load(device="cpu", dtype="bf16")
    assert len(fake_conversion) == 2


def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, fake_conversion: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, reader: object, folder: Path, dtype: torch.dtype) -> None:
        save_tiny_chat_model(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.load(device="cpu")
    assert not any((tmp_path / "cache" / "gguf").iterdir())
    models.load(device="cpu")
    assert len(fake_conversion) == 1


def test_two_conversions_at_once(tmp_path: Path, fake_conversion: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    convert = gguf_convert.convert

    def together(*args: Any) -> None:
        both.wait(timeout=30)
        convert(*args)

    monkeypatch.setattr(gguf_convert, "convert", together)
    found: list[tuple[Path, bool]] = []

    def work() -> None:
        found.append(gguf_cache.converted(models.embedded_file(), torch.float32, lambda line: None))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake_conversion) == 2
    assert found == [(conversion(tmp_path / "cache"), True)] * 2
    assert gguf_cache.is_complete(found[0][0])


@pytest.mark.usefixtures("fake_conversion")
def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "file"))
    assert "DEPTHDECAY_CACHE" in refusal(models.EMBEDDED_MODEL)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPTHDECAY_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert gguf_cache.cache_folder() == Path("/a")
    monkeypatch.delenv("DEPTHDECAY_CACHE")
    assert gguf_cache.cache_folder() == Path("/b/depthdecay")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf_cache.cache_folder() == Path.home() / ".cache" / "depthdecay"
