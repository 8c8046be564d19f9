"""Cache of converted GGUF files. Each is a folder that is complete or absent: built aside, then renamed into place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from depthdecay.errors import DepthDecayError, one_line
from depthdecay.files import cache_folder
from depthdecay.model import gguf_convert

if TYPE_CHECKING:
    import torch

CONVERSION = 2  # increase it when the conversion's output changes
_MANIFEST = "depthdecay.json"
# Hashing takes about a second per GB: a small file is hashed whole, a large one is sampled and identified by its
# modification time as well.
_HASH_WHOLE_BYTES = 256 << 20
_HEADER_BYTES, _CHUNK_BYTES, _CHUNKS = 8 << 20, 64 << 10, 64
_BUILDING = ".building-"
_ABANDONED_SECONDS = 24 * 3600


def converted(path: Path, dtype: torch.dtype, say: Callable[[str], None]) -> tuple[Path, bool]:
    """The folder with the converted file, and whether it was converted just now.

    The dtype is part of the key: a block-quantized weight (scale times integer plus offset) has no exact 16-bit
    float. So a float32 load must not use a bfloat16 copy, and a bfloat16 load should not read twice the bytes.
    """
    root = cache_folder() / "gguf"
    folder = root / _key(path, dtype)
    if is_complete(folder):
        return folder, False
    reader = gguf_convert.read_checked(path)
    say(f"converting {path.name} (once) …")
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root)
        needed = sum(int(tensor.n_elements) for tensor in reader.tensors) * dtype.itemsize
        free = shutil.disk_usage(root).free
        if needed > free:
            raise DepthDecayError(
                f"converting '{path}' needs {needed / 1e9:.1f} GB in {root}, where {free / 1e9:.1f} GB are free; "
                f"set DEPTHDECAY_CACHE to a folder on a larger disk"
            )
        building = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=root))
    try:
        with _writing(root):
            gguf_convert.convert(path, reader, building, dtype)
            _seal(building, path)
            _move_into_place(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder, True


def is_complete(folder: Path) -> bool:
    """Whether every file in the manifest exists with its size."""
    try:
        files = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
        return bool(files) and all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def discard(folder: Path) -> None:
    """Remove a folder that turned out to be broken; renamed first, so that nobody sees it half removed."""
    aside = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=folder.parent))
    try:
        os.rename(folder, aside / "broken")
    except FileNotFoundError:
        pass  # another process was faster
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _key(path: Path, dtype: torch.dtype) -> str:
    import transformers

    digest = hashlib.sha256(f"{CONVERSION} {transformers.__version__.split('.')[0]} ".encode())
    status = path.stat()
    with path.open("rb") as file:
        if status.st_size <= _HASH_WHOLE_BYTES:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
        else:
            digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
            digest.update(file.read(_HEADER_BYTES))
            for chunk in range(_CHUNKS):
                file.seek((status.st_size - _CHUNK_BYTES) * chunk // (_CHUNKS - 1))
                digest.update(file.read(_CHUNK_BYTES))
    # By content only, so that a renamed or copied file is not converted again; the manifest names the source.
    return f"{digest.hexdigest()[:24]}-{str(dtype).removeprefix('torch.')}"


def _seal(folder: Path, source: Path) -> None:
    """Flush the files to disk, then write the manifest that marks the folder as complete."""
    files = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb+") as handle:
            # Without this, a power cut may leave files of the right size filled with zeros.
            os.fsync(handle.fileno())
        files[file.name] = file.stat().st_size
    manifest = {"conversion": CONVERSION, "source": source.name, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _move_into_place(building: Path, folder: Path) -> None:
    for _ in range(3):
        try:
            os.rename(building, folder)
            return
        except OSError:
            if is_complete(folder):
                return  # another process converted the same file in the meantime
            if not folder.exists():
                raise
            discard(folder)
    raise DepthDecayError(f"cannot replace the broken conversion in {folder}; remove that folder by hand")


def _remove_abandoned(root: Path) -> None:
    """Remove what killed conversions left behind: each takes as much disk space as the model."""
    for folder in root.glob(f"{_BUILDING}*"):
        try:
            if folder.is_dir() and time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DepthDecayError(
            f"cannot write the converted model into {root} ({one_line(error)}); "
            f"set DEPTHDECAY_CACHE to a writable folder"
        ) from error
