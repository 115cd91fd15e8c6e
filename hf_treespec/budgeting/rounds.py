"""Recorded rounds: what was drafted with which estimated chance, and what the target took of it."""

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass
class RoundRecords:
    """Rounds of any number of texts, one row per round and text, on the *full* pool of candidates.

    A tree of any smaller budget and depth can be replayed on a row: its nodes are the best candidates of at most that
    depth, and the accepted ones among them are a path. Candidates stand in the order they were drafted in, parents
    before children; candidate 0 is the root.

    Attributes:
        texts: which text a round belongs to, `[R]`.
        positions: tokens that the text had emitted before the round, `[R]`.
        contexts: committed tokens before the round, prompt included, `[R]`.
        batches: rows that were decoded together in the round, `[R]`.
        parents: candidate above each, `[R, C]`; the root's is itself.
        depths: `[R, C]`; 0 for the root, -1 where there is no candidate.
        probabilities: calibrated path probability, the estimated chance that the target walks there, `[R, C]`, fp32; 1
            for the root, 0 where there is no candidate.
        accepted: whether the text goes there, `[R, C]`, known for all candidates; True for the root.
        entropies, confidences: per drafted level the entropy in nats and the largest probability of the draft's
            distribution at the best node expanded for it, `[R, S]`, NaN where a level was not drafted.
        metadata: how the rounds were recorded (model, drafter, tree_config, prompt set, compression of the target).
    """

    texts: Tensor
    positions: Tensor
    contexts: Tensor
    batches: Tensor
    parents: Tensor
    depths: Tensor
    probabilities: Tensor
    accepted: Tensor
    entropies: Tensor
    confidences: Tensor
    metadata: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "metadata"}

    def select(self, rows: Tensor) -> "RoundRecords":
        """The rounds `rows`: places `[r]` or a mask `[R]`."""
        return RoundRecords(**{name: tensor[rows] for name, tensor in self.tensors.items()}, metadata=self.metadata)

    def save(self, path: Path) -> None:
        """Writes a safetensors file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, path, {"rounds": json.dumps(self.metadata)})

    @classmethod
    def load(cls, path: Path) -> "RoundRecords":
        """Reads what `save` wrote.

        Raises:
            ValueError: if the file holds no recorded rounds.
        """
        with safe_open(path, "pt") as file:
            names = [item.name for item in fields(cls) if item.name != "metadata"]
            metadata = (file.metadata() or {}).get("rounds")
            if metadata is None or set(names) - set(file.keys()):
                raise ValueError(f"{str(path)!r} holds no recorded rounds.")
            return cls(**{name: file.get_tensor(name) for name in names}, metadata=json.loads(metadata))

    @classmethod
    def concatenate(cls, parts: list["RoundRecords"], renumber: bool = True) -> "RoundRecords":
        """All rounds of `parts`; narrower pools are filled up, and with `renumber` every part's texts are other ones.

        Metadata is the first one's.
        """
        tensors: dict[str, list[Tensor]] = {name: [] for name in parts[0].tensors}
        widest = {name: max(part.tensors[name].shape[-1] for part in parts) for name in tensors}
        filler = {"depths": -1, "entropies": math.nan, "confidences": math.nan}
        first = 0
        for part in parts:
            for name, tensor in part.tensors.items():
                if tensor.dim() == 2:
                    missing = widest[name] - tensor.shape[1]
                    tensor = torch.nn.functional.pad(tensor, (0, missing), value=filler.get(name, 0))
                tensors[name].append(tensor + first if name == "texts" else tensor)
            first += int(part.texts.max()) + 1 if renumber else 0
        return cls(**{name: torch.cat(values) for name, values in tensors.items()}, metadata=parts[0].metadata)
