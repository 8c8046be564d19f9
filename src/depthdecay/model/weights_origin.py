"""Where a loaded model's weights came from: what may be kept on disk for them, and under which name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class WeightsOrigin:
    """A key that belongs to these weights alone, and the GGUF file where they came from one."""

    key: str
    gguf: Path | None = None

    @classmethod
    def of_conversion(cls, folder: Path, gguf: Path) -> WeightsOrigin:
        """A converted GGUF file: its folder is named by the file's content and the dtype."""
        return cls(folder.name, gguf)

    @classmethod
    def of_folder(cls, folder: Path, dtype: Any) -> WeightsOrigin:
        """A folder of safetensors: by place, size and time of change, since hashing takes a second per GB."""
        files = sorted(folder.glob("*.safetensors"))
        told = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return cls(_digest(str(folder.resolve()), told, dtype))

    @classmethod
    def of_hub(cls, name: str, dtype: Any) -> WeightsOrigin | None:
        """A model of the Hub at the commit that its cache holds; None where the cache has none.

        Asked of the cache: newer versions of transformers no longer write the commit into a model's configuration.
        """
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(name, "config.json")
        return cls(_digest(name, Path(file).parent.name, dtype)) if isinstance(file, str) else None


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
