"""Where a loaded model's weights came from: the key for anything cached on disk for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class WeightsOrigin:
    """A key unique to these weights, and the GGUF file if they came from one."""

    key: str
    gguf: Path | None = None

    @classmethod
    def of_conversion(cls, folder: Path, gguf: Path) -> WeightsOrigin:
        """A converted GGUF file: its folder is named after the file's content and the dtype."""
        return cls(folder.name, gguf)

    @classmethod
    def of_folder(cls, folder: Path, dtype: Any) -> WeightsOrigin:
        """A folder of safetensors: by path, size and modification time, since hashing takes a second per GB."""
        files = sorted(folder.glob("*.safetensors"))
        told = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return cls(_digest(str(folder.resolve()), told, dtype))

    @classmethod
    def of_hub(cls, name: str, dtype: Any) -> WeightsOrigin | None:
        """A model from the Hub at its cached commit; None if it is not cached.

        Read from the cache, since newer versions of transformers no longer store the commit in a model's configuration.
        """
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(name, "config.json")
        return cls(_digest(name, Path(file).parent.name, dtype)) if isinstance(file, str) else None


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
