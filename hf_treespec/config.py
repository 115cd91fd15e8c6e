"""`TreeConfig`: the shape of the draft tree and how it is verified."""

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any


CONFIG_NAME = "tree_config.json"
BACKENDS = ("auto", "torch", "triton")
HEADS = ("mtp", "dspark")
DRAFTERS = ("auto", "assistant", *HEADS, "ngram")
CONTROLLERS = ("auto", "fixed", "cost", "libra", "speckv")
MAX_BUDGET = 256
# Nodes of every forward with `deterministic=True`.
DETERMINISTIC_NODES = 8
MAX_DEPTH = 64
DEFAULT_EXPERT_WORKSPACE = 1 << 30


@dataclass(slots=True)
class TreeConfig:
    """Shape of the draft trees of one `generate` call.

    Args:
        budget (`int`, defaults to 8):
            Number of nodes the target verifies per round, the root included. `budget=1` is plain decoding.
        depth (`int`, *optional*):
            Drafted levels below the root, the most drafted tokens a round can accept. `None` takes
            [`~TreeConfig.resolved_depth`]'s default; with a DSpark head at most its block size.
        top_k (`int`, *optional*):
            Children drafted per expanded node. `top_k=1` drafts a chain. `None` takes
            [`~TreeConfig.resolved_top_k`]'s default.
        drafter (`str`, defaults to `"auto"`):
            What drafts: `"assistant"` is the `assistant_model` of the call, `"mtp"` and `"dspark"` are the head in the
            model's checkpoint, `"ngram"` looks up what followed earlier occurrences of the last tokens, without a
            model; `"auto"` takes the assistant where there is one, else the head that is there.
        backend (`str`, defaults to `"auto"`):
            Implementation of the operations: `"torch"`, or `"triton"`, kernels that need a CUDA device. `"auto"` takes
            the kernels on CUDA devices where Triton is installed, else torch.
        controller (`str`, defaults to `"auto"`):
            What chooses depth and nodes of every round, `depth` and `budget` being the caps: `"fixed"` always takes
            them; `"cost"` takes what a cost table of this model, drafter and machine says pays most, and measures one
            in the first rounds where `hf-treespec profile` has not written one; `"libra"` and `"speckv"` are published
            rules to compare with, the latter needs `hf-treespec train-controller`. `"auto"` is `"cost"` where a
            cost table exists, else `"fixed"`.
        fallback (`bool`, defaults to `True`):
            Decode plainly for a while where speculation is seen to emit fewer tokens per second than plain decoding.
        record_rounds (`bool`, defaults to `False`):
            Keep what was drafted in every round, `tree_stats["round_records"]`, count the distinct experts that
            verification read, and wait for the device after every phase, so that `time` is true: for measuring.
        expert_workspace (`int`, defaults to 2**30):
            Bytes that the temporaries of a layer's routed experts may take: which of transformers' implementations runs
            depends on it, and forwards of more tokens run in slices. At least one token is run at a time.
        deterministic (`bool` or `int`, defaults to `False`):
            The target's logits are the same bit for bit for any `budget`, 1 included: every forward is padded to the
            same rows and to this number of nodes (`True` is 8; else a multiple of 8, at least `budget`), and nothing
            is summed in an order that depends on what is drafted. Slower.
        cuda_graphs (`bool` or `"auto"`, defaults to `"auto"`):
            Replay forward, acceptance and commit as CUDA graphs, per number of rows and nodes and cache capacity.
            `"auto"` does on CUDA devices with the kernels. A model that cannot be captured falls back with one warning.

    Raises:
        ValueError: for an unknown key or a value outside its range.
    """

    budget: int = 8
    depth: int | None = None
    top_k: int | None = None
    drafter: str = "auto"
    backend: str = "auto"
    controller: str = "auto"
    fallback: bool = True
    record_rounds: bool = False
    expert_workspace: int = DEFAULT_EXPERT_WORKSPACE
    deterministic: bool | int = False
    cuda_graphs: bool | str = "auto"

    def __post_init__(self) -> None:
        _check_integer("budget", self.budget, 1, MAX_BUDGET)
        if self.depth is not None:
            _check_integer("depth", self.depth, 0 if self.budget == 1 else 1, MAX_DEPTH)
        if self.top_k is not None:
            _check_integer("top_k", self.top_k, 1, MAX_BUDGET)
        _check_integer("expert_workspace", self.expert_workspace, 1 << 20, 1 << 50)
        choices = {"drafter": DRAFTERS, "backend": BACKENDS, "controller": CONTROLLERS}
        for name, allowed in choices.items():
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; allowed values are {allowed}.")
        for name in ("fallback", "record_rounds"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; allowed values are `True` and `False`.")
        if self.cuda_graphs != "auto" and not isinstance(self.cuda_graphs, bool):
            raise ValueError(f"`cuda_graphs` is {self.cuda_graphs!r}; allowed values are ('auto', True, False).")
        if type(self.deterministic) is not bool and (
            type(self.deterministic) is not int or not 8 <= self.deterministic <= MAX_BUDGET
        ):
            raise ValueError(
                f"`deterministic` is {self.deterministic!r}; allowed values are True, False and multiples of 8 up to "
                f"{MAX_BUDGET}, at least `budget`."
            )
        nodes = self.fixed_nodes
        if nodes is not None and (nodes % 8 or nodes < self.budget):
            raise ValueError(
                f"`deterministic` is {self.deterministic!r}, {nodes} nodes per forward: it must be a multiple of 8 and at "
                f"least `budget`, which is {self.budget}. Set `deterministic={-(-max(nodes, self.budget) // 8) * 8}`, also "
                "in the runs that this one is compared with."
            )

    @property
    def fixed_nodes(self) -> int | None:
        """Nodes that every forward is padded to, where it is deterministic."""
        return DETERMINISTIC_NODES if self.deterministic is True else self.deterministic or None

    @property
    def resolved_top_k(self) -> int:
        """`top_k`, or its default: 3 up to 16 nodes, 4 up to 64, 8 above."""
        if self.top_k is not None:
            return self.top_k
        return 3 if self.budget <= 16 else 4 if self.budget <= 64 else 8

    @property
    def resolved_depth(self) -> int:
        """`depth` (at most budget - 1, deeper levels cannot be verified), or its default.

        The default is that of the matched chain, budget - 1, up to 7 levels, and grows by one level per doubling of
        the budget above 8. Levels that cannot enter the tree are not drafted.
        """
        deepest = self.budget - 1
        if self.depth is not None:
            return min(self.depth, deepest)
        if self.top_k == 1:
            return min(deepest, MAX_DEPTH)
        return min(deepest, 7 + max(0, (self.budget - 1).bit_length() - 3))

    def as_fixed(self) -> "TreeConfig":
        """The same trees in every round, without a fallback: for comparing and measuring."""
        return replace(self, controller="fixed", fallback=False)

    @classmethod
    def checked(cls, config: "TreeConfig | dict[str, Any]") -> "TreeConfig":
        """A copy of what a caller passed, checked again: a config can be changed after it was made."""
        return cls.from_dict(config.to_dict() if isinstance(config, TreeConfig) else config)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "TreeConfig":
        """Builds a config from a dict; unknown keys raise a `ValueError` that lists them."""
        if not isinstance(config, dict):
            raise ValueError(f"`tree_config` must be a `TreeConfig` or a dict, not {type(config).__name__}.")
        known = [field.name for field in fields(cls)]
        unknown = sorted(str(key) for key in config if key not in known)
        if unknown:
            raise ValueError(f"Unknown `tree_config` keys {unknown}; allowed keys are {known}.")
        return cls(**config)

    def to_dict(self) -> dict[str, Any]:
        """The config as a plain dict, for JSON."""
        return asdict(self)

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes `tree_config.json` to `save_directory`."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike) -> "TreeConfig":
        """Reads `tree_config.json` from a local folder or a Hub repository."""
        from transformers.utils import cached_file

        path = cached_file(str(pretrained_model_name_or_path), CONFIG_NAME)
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, of Python or NumPy, and no boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_integer(name: str, value: Any, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{name}` is {value!r}; it must be a Python integer from {lowest} to {highest}.")
    if not lowest <= value <= highest:
        raise ValueError(f"`{name}` is {value}; allowed values are {lowest} to {highest}.")
