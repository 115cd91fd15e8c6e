"""Reading a checkpoint without its weights: small files are downloaded, shards never."""

import json
import re
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file


class CheckpointFiles:
    """The small files of a checkpoint, and the headers of those shards that are on this machine.

    Args:
        path: local folder, or Hub repository id.
        revision: of the repository.

    Raises:
        ValueError: for a path that is neither, and, when a file is asked for, a repository that cannot be read.
    """

    def __init__(self, path: str, revision: str | None = None) -> None:
        self.path, self.revision, self.local = path, revision, Path(path).is_dir()
        if not self.local and not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            raise ValueError(f"There is no folder {path!r}; pass a local folder or an id on the Hub, `owner/name`.")

    def find(self, name: str, download: bool = True) -> Path | None:
        """Where a file is, if there is one; without `download`, on this machine."""
        try:
            found = cached_file(
                self.path,
                name,
                revision=self.revision,
                local_files_only=not download,
                _raise_exceptions_for_missing_entries=False,
            )
        except (OSError, ValueError) as error:
            if not download:
                return None
            raise ValueError(
                f"There is no folder {self.path!r}, and no repository of that id on the Hub can be read ({error})."
            ) from error
        return None if found is None else Path(found)

    def json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file, if there is that file."""
        found = self.find(name)
        if found is None:
            return None
        try:
            content = json.loads(found.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"`{name}` of {self.path!r} is not JSON: {error}.") from error
        if not isinstance(content, dict):
            raise ValueError(f"`{name}` of {self.path!r} must hold an object, not a {type(content).__name__}.")
        return content

    def listing(self) -> set[str]:
        """Names of all files; of a repository that cannot be listed, none."""
        if self.local:
            folder = Path(self.path)
            return {file.relative_to(folder).as_posix() for file in (*folder.glob("*"), *folder.glob("*/*.py"))}
        from huggingface_hub import HfApi

        try:
            return set(HfApi().list_repo_files(self.path))
        # The network's errors have no base in common; a list that cannot be had costs one line of the report.
        except Exception:
            return set()

    def tensors(self) -> tuple[set[str] | None, dict[str, dict], int]:
        """Tensor names; the headers (`dtype`, `shape`, `data_offsets`) if all shards are at hand; the index's total."""
        index = self.json(SAFE_WEIGHTS_INDEX_NAME)
        shards = {SAFE_WEIGHTS_NAME} if index is None else set(index.get("weight_map", {}).values())
        paths = [self.find(shard, download=False) for shard in sorted(shards)]
        headers = {}
        if all(paths):
            for path in paths:
                headers |= _header(path)
        stored = set(headers) if index is None else set(index.get("weight_map", {}))
        total = (index or {}).get("metadata", {}).get("total_size") or 0
        return stored or None, headers, int(total)


def _header(path: Path) -> dict[str, dict]:
    """The header of a safetensors file: its length in 8 bytes, then JSON."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header
