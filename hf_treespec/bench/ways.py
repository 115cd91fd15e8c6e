"""What `hf-treespec bench` compares: ways to decode, and the cells in which they take turns."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..config import DRAFTERS, HEADS, TreeConfig
from ..generation import draft_depth


STOCK, PLAIN = "stock", "budget=1"


@dataclass(frozen=True)
class Drafter:
    """What drafts.

    Attributes:
        name: as reports call it.
        setting: `TreeConfig.drafter`.
        model: the assistant, or `None`.
        head: the target's head, or `None`.
    """

    name: str
    setting: str
    model: Any = None
    head: Any = None


@dataclass(frozen=True)
class Way:
    """A way to decode; the name says its shape and controller: `s3_k2_d6` has depth 3, top_k 2 and budget 6, and so has
    `s3_k2_d6_cost` at most."""

    name: str
    tree_config: TreeConfig | None = None
    drafter: Drafter | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Drafter (empty where nothing drafts) and name."""
        return ("" if self.drafter is None else self.drafter.name), self.name


@dataclass(frozen=True)
class Cell:
    """Where ways take turns: prompts of a set, in batches, at a temperature (0 is greedy)."""

    prompt_set: str
    batch: int
    temperature: float


@dataclass(frozen=True)
class Shapes:
    """The trees to try. Every budget, depth and `top_k` goes with every other; `None` is the drafter's default.

    Attributes:
        chains: budgets of the chains among which the best one is looked for, besides those that match `budgets`.
        controllers: of the trees, as in `TreeConfig`; depth and budget are caps where they choose.
        baselines: whether stock `generate` and chains take turns too, beside plain decoding.
    """

    budgets: tuple[int, ...]
    depths: tuple[int | None, ...]
    top_ks: tuple[int | None, ...]
    chains: tuple[int, ...]
    controllers: tuple[str, ...] = ("fixed",)
    baselines: bool = True


def make_ways(drafters: Iterable[Drafter], shapes: Shapes) -> list[Way]:
    """Stock `generate`, plain decoding, and every drafter's chains and trees, each shape once."""
    plain, stock = Way(PLAIN, TreeConfig(budget=1)), Way(STOCK)
    ways = {way.key: way for way in ([stock, plain] if shapes.baselines else [plain])}
    sizes = sorted({*shapes.budgets, *shapes.chains}) if shapes.baselines else []
    chains = [(size, None, 1, "fixed") for size in sizes]
    trees = product(shapes.budgets, shapes.depths, shapes.top_ks, shapes.controllers)
    shaped = [shape for shape in [*chains, *trees] if shape[0] > 1]
    for drafter in drafters:
        for way in (_way(drafter, *shape) for shape in shaped):
            ways.setdefault(way.key, way)
    return list(ways.values())


def _way(drafter: Drafter, budget: int, depth: int | None, top_k: int | None, controller: str) -> Way:
    # Named controllers run as users run them.
    fallback = controller != "fixed"
    config = TreeConfig(budget, depth, top_k, drafter.setting, controller=controller, fallback=fallback)
    config.depth, config.top_k = draft_depth(config, drafter.head), config.resolved_top_k
    suffix = "" if controller == "fixed" else f"_{controller}"
    return Way(f"s{config.depth}_k{config.top_k}_d{budget}{suffix}", config, drafter)


def parse_shape(name: str) -> tuple[int, int, int] | None:
    """Depth, top_k and budget of a shape's name; `None` for ways that draft nothing."""
    if name in (STOCK, PLAIN):
        return None
    return tuple(int(part[1:]) for part in name.split("_")[:3])


def has_controller(name: str) -> bool:
    """Whether a way's depth and nodes are chosen round by round."""
    return name.count("_") > 2


def make_drafters(target, assistants: dict[str, Any], settings: Iterable[str]) -> list[Drafter]:
    """The drafters of a run.

    Args:
        target: the enabled target.
        assistants: draft models by name.
        settings: further values of `TreeConfig.drafter`: `"auto"` and the kinds of heads take the checkpoint's head.

    Raises:
        ValueError: for a setting that is unknown, or a head that is not there.
    """
    from ..heads import head_of

    drafters = [Drafter(name, "assistant", model) for name, model in assistants.items()]
    for setting in settings:
        if setting not in DRAFTERS or setting == "assistant":
            allowed = tuple(value for value in DRAFTERS if value != "assistant")
            raise ValueError(f"`--drafter` is {setting!r}; allowed values are {allowed}, and `--assistant MODEL`.")
        if setting == "ngram":
            drafters.append(Drafter(setting, setting))
        else:
            head = head_of(target, setting if setting in HEADS else None)
            drafters.append(Drafter(head.kind, head.kind, head=head))
    return list({drafter.name: drafter for drafter in drafters}.values())
