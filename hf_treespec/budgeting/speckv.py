"""SpecKV's controller (arXiv 2605.02888): a small network predicts the acceptance rate of every speculation length."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .controllers import Choice, Level, sizes_up_to
from .costs import RoundCosts
from .rounds import RoundRecords
from .tables import table_path


# Published: drafted tokens to choose from, hidden units, and the length where nothing is known yet.
LENGTHS, _HIDDEN, _FIRST = (2, 4, 6, 8), 16, 4
# What is maximised: the published objective, expected tokens alone, and the same over what they cost.
OBJECTIVES = ("tokens", "speed")
_STEPS, _LEARNING_RATE = 400, 0.02


@dataclass
class AcceptancePredictor:
    """A network with one hidden layer, from six features to the share of drafted tokens that is accepted.

    Features: mean and largest entropy, mean and smallest largest probability of the *previous* round's draft; bits per
    weight of the target (its compression); the speculation length.

    Attributes:
        tensors: `hidden_weight` `[16, 6]`, `hidden_bias` `[16]`, `weight` `[16]`, `bias` `[]`, `mean` and `scale` `[6]`.
        objective: one of `OBJECTIVES`.
        bits: of the target it is used with.
    """

    tensors: dict[str, np.ndarray]
    objective: str
    bits: float

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Acceptance rates `[...]` for features `[..., 6]`."""
        tensors = self.tensors
        scaled = (features - tensors["mean"]) / tensors["scale"]
        hidden = np.maximum(scaled @ tensors["hidden_weight"].T + tensors["hidden_bias"], 0)
        return 1 / (1 + np.exp(-(hidden @ tensors["weight"] + tensors["bias"])))

    def save(self, path: Path) -> None:
        """Writes a safetensors file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: torch.from_numpy(np.asarray(values)) for name, values in self.tensors.items()}
        save_file(tensors, path, {"objective": self.objective, "bits": str(self.bits)})

    @classmethod
    def load(cls, path: Path) -> "AcceptancePredictor":
        """Reads what `save` wrote."""
        with safe_open(path, "np") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls(tensors, metadata["objective"], float(metadata["bits"]))


def controller_path(key: dict[str, Any]) -> Path:
    """Where `hf-treespec train-controller` keeps the one for a key, and `generate` looks for it."""
    return table_path(key, "-speckv.safetensors")


class SpecKVController:
    """Chooses the speculation length with the best predicted outcome.

    A length is a number of drafted nodes; the best of as many levels are taken. A batch is looked at as its mean row.

    Args:
        predictor: trained on rounds of this drafter.
        costs: for the objective `"speed"`; may be `None` for `"tokens"`.
        budget: nodes per row at most.
        width: candidates per expanded node.
    """

    reads_entropy = True

    def __init__(self, predictor: AcceptancePredictor, costs: RoundCosts | None, budget: int, width: int) -> None:
        if predictor.objective == "speed" and costs is None:
            raise ValueError(
                "`controller='speckv'` was trained for the objective 'speed', and there is no cost table: run "
                "`hf-treespec profile`, or `hf-treespec train-controller --objective tokens`."
            )
        self.predictor, self.costs, self.width = predictor, costs, width
        self.sizes = sizes_up_to(budget)
        self.lengths = np.array(sorted({min(length, budget - 1) for length in LENGTHS}))
        self._features: np.ndarray | None = None

    @classmethod
    def load(cls, key: dict[str, Any], costs: RoundCosts | None, budget: int, width: int) -> "SpecKVController":
        """The one trained for a key.

        Raises:
            ValueError: if none was, or the drafter has no distribution to take features of.
        """
        if key["drafter"] == "ngram":
            raise ValueError("`controller='speckv'` reads draft distributions, prompt lookup has none; use 'cost'.")
        path = controller_path(key)
        if not path.exists():
            raise ValueError(
                f"`controller='speckv'` needs a controller trained for {key['model']} and {key['drafter']}: run "
                "`hf-treespec train-controller`, or use 'cost', 'libra' or 'fixed'."
            )
        return cls(AcceptancePredictor.load(path), costs, budget, width)

    def plan(self, batch: int, context: int, depth: int) -> int:
        self._entropies, self._confidences = [], []
        self._length = self._choose_length(batch, context, depth)
        return min(depth, self._length)

    def _choose_length(self, batch: int, context: int, depth: int) -> int:
        if self._features is None:
            return int(min(_FIRST, self.lengths[-1]))
        features = np.empty((len(self.lengths), 6))
        features[:, :4], features[:, 4], features[:, 5] = self._features, self.predictor.bits, self.lengths
        expected = self.predictor(features) * self.lengths + 1
        if self.predictor.objective == "speed":
            draft = self.costs.draft(np.minimum(self.lengths, depth), self.width, batch)
            expected /= draft + self.costs.verify(self.lengths + 1, batch, context)
        return int(self.lengths[expected.argmax()])

    def add(self, level: Level) -> None:
        self._entropies.append(level.entropies.mean())
        self._confidences.append(level.confidences.mean())

    def deeper(self) -> bool:
        return True

    def choose(self, probabilities: np.ndarray) -> Choice:
        columns = int(self.sizes[np.searchsorted(self.sizes, min(self._length, probabilities.shape[1]) + 1)])
        return Choice(np.minimum((probabilities > 0).sum(1), self._length) + 1, columns)

    def observe(self, rows: list[int], emitted: list[int]) -> None:
        if self._entropies:
            self._features = summary(np.array(self._entropies), np.array(self._confidences))


def summary(entropies: np.ndarray, confidences: np.ndarray) -> np.ndarray:
    """The four features of a draft, given the entropy and largest probability of each of its levels `[..., S]`."""
    return np.stack([entropies.mean(-1), entropies.max(-1), confidences.mean(-1), confidences.min(-1)], -1)


def examples(rounds: RoundRecords) -> tuple[np.ndarray, np.ndarray]:
    """Features `[M, 6]` and acceptance rates `[M]` of every length, for all rounds that have one before them.

    Rounds may be recorded at every position or as they were decoded: each length walks a text as it would decode it.
    """
    tensors = {name: tensor.numpy() for name, tensor in rounds.tensors.items()}
    order = (-tensors["probabilities"]).argsort(1, kind="stable")
    accepted = np.take_along_axis(tensors["accepted"] & (tensors["probabilities"] > 0), order, 1)[:, 1:]
    gained = np.pad(accepted.cumsum(1), ((0, 0), (1, 0)))
    features, rates = [], []
    for length in LENGTHS:
        taken = gained[:, min(length, accepted.shape[1])]
        levels = min(length, tensors["entropies"].shape[1])
        drafts = summary(tensors["entropies"][:, :levels], tensors["confidences"][:, :levels])
        for text in np.unique(tensors["texts"]):
            rows = np.flatnonzero(tensors["texts"] == text)
            rows = rows[tensors["positions"][rows].argsort()]
            before, position = None, 0
            for row in rows:
                if tensors["positions"][row] < position:
                    continue
                if before is not None and np.isfinite(drafts[before]).all():
                    for other in LENGTHS:
                        rate = gained[row, min(other, accepted.shape[1])] / other
                        features.append([*drafts[before], rounds.metadata["bits"], other])
                        rates.append(rate)
                before, position = row, tensors["positions"][row] + 1 + taken[row]
    return np.array(features, dtype=np.float64), np.array(rates, dtype=np.float64)


def train(features: np.ndarray, rates: np.ndarray, objective: str, bits: float, seed: int = 0) -> AcceptancePredictor:
    """Fits the network to examples by cross-entropy.

    Args:
        features, rates: of [`examples`], of one or several targets of different `bits`.
        objective: one of `OBJECTIVES`; what the controller maximises, the network is the same.
        bits: of the target that it will be used with.

    Raises:
        ValueError: for an unknown objective, or without examples.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"`objective` is {objective!r}; allowed values are {OBJECTIVES}.")
    if not len(features):
        raise ValueError("There are no rounds to learn from; record longer texts.")
    generator = torch.Generator().manual_seed(seed)
    mean, scale = features.mean(0), features.std(0)
    scale[scale < 1e-9] = 1.0
    inputs, targets = torch.tensor((features - mean) / scale), torch.tensor(rates)
    layers = {
        "hidden_weight": torch.randn(_HIDDEN, 6, generator=generator, dtype=torch.double) * 6**-0.5,
        "hidden_bias": torch.zeros(_HIDDEN, dtype=torch.double),
        "weight": torch.randn(_HIDDEN, generator=generator, dtype=torch.double) * _HIDDEN**-0.5,
        "bias": torch.zeros((), dtype=torch.double),
    }
    optimizer = torch.optim.Adam([tensor.requires_grad_() for tensor in layers.values()], _LEARNING_RATE)
    for _ in range(_STEPS):
        hidden = (inputs @ layers["hidden_weight"].T + layers["hidden_bias"]).relu()
        logits = hidden @ layers["weight"] + layers["bias"]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = {name: tensor.detach().numpy() for name, tensor in layers.items()}
    return AcceptancePredictor({**tensors, "mean": mean, "scale": scale}, objective, bits)


def bits_of(model) -> float:
    """Bits per weight of a model: its compression."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return 8.0 * model.dtype.itemsize
    config = quantizer.quantization_config.to_dict()
    if config.get("load_in_4bit"):
        return 4.0
    return float(config.get("bits") or 8)
