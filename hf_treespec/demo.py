"""`hf-treespec demo`: the shipped pair decodes prompts in four ways; text, acceptance and speed side by side."""

import time
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from .cache import TreeCache
from .config import TreeConfig
from .drafting.assistant import AssistantTreeGenerator
from .fork import DEFAULT_SPARE
from .generation import TreeStats, decode_rows
from .metrics.tokens import first_difference
from .modeling import enable
from .prefill import prefill_once
from .prompts import encode_prompts
from .selection import TokenSelector
from .texts import Texts
from .tree import TokenTree
from .verifying import Verifier


# Mostly of the kind the tiny pair was trained on; the last one is not, and drafts are accepted less there.
PROMPTS = (
    "A bakery fills 7 trays with 12 rolls each and sells 58 rolls before noon. How many rolls are left?",
    "Mia reads 15 pages a day for 4 days. Her book has 100 pages. How many pages does she still have to read?",
    "A farmer has 3 fields with 24 rows of corn each. He sells the corn of 10 rows. How many rows are left?",
    "Write a function to count the vowels in a given string.",
)
# Rounds from which the one to draw is chosen.
_DRAWN_FROM = 16
_WARM_UP_TOKENS = 8


@dataclass
class Decoding:
    """One way to decode, and what it took over all prompts. `tree_config=None` is stock `generate`."""

    name: str
    tree_config: TreeConfig | None
    texts: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    rounds: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(text) for text in self.texts)


@dataclass
class Round:
    """One round of the target: the tree of row 0, the accepted `path` and the target's token at each node."""

    position: int
    tree: TokenTree
    path: list[int]
    predicted: list[int]


def checkpoint(name: str) -> Path:
    """Folder of a checkpoint in this package.

    Raises:
        ValueError: if the package was built without it.
    """
    folder = Path(str(files("hf_treespec"))) / "checkpoints" / name
    if not (folder / "config.json").exists():
        raise ValueError(f"The package has no checkpoint '{name}'; pass `--model` and `--assistant`.")
    return folder


def run(
    console: Console, model: str | None, assistant: str | None, max_new_tokens: int, tree_config: TreeConfig
) -> list[Decoding]:
    """Loads the pair, decodes `PROMPTS` in four ways, prints texts, table and one tree; returns the measurements."""
    start = time.perf_counter()
    if tree_config.budget == 1:
        raise ValueError("`budget` is 1; the demo needs at least 2 nodes per round to draft something.")
    if model is None:
        # A model this small gains nothing from a second thread, and on a busy machine two threads stall each other.
        torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    target, draft, tokenizer = load_pair(model or checkpoint("tiny-target"), assistant or checkpoint("tiny-draft"))
    decodings = ways_to_decode(tree_config)
    for decoding in decodings:
        _decode(target, draft, tokenizer, decoding, PROMPTS[0], _WARM_UP_TOKENS)
    decodings = ways_to_decode(tree_config)
    for prompt in PROMPTS:
        # One prompt at a time: stock transformers pools the padding of a batch into this architecture's cache.
        for decoding in decodings:
            _decode(target, draft, tokenizer, decoding, prompt, max_new_tokens)
        console.rule(style="dim")
        console.print(prompt, style="cyan", markup=False, highlight=False)
        console.print(tokenizer.decode(decodings[-1].texts[-1]), markup=False, highlight=False)
    console.rule(style="dim")
    console.print(_results(decodings))
    console.print(_verdict(decodings))
    console.print()
    console.print(draw(_round_to_draw(target, draft, tokenizer, tree_config), tokenizer))
    console.print(f"\nDone in {time.perf_counter() - start:.0f} s on {torch.get_num_threads()} threads.", style="dim")
    return decodings


def load_pair(model: str | Path, assistant: str | Path):
    """The enabled target, the draft and the tokenizer."""
    target = enable(AutoModelForCausalLM.from_pretrained(model).eval())
    return target, load_draft(assistant), AutoTokenizer.from_pretrained(model)


def load_draft(name: str | Path | None = None):
    """A draft model (by default the shipped one), enabled where it is a DeepSeek-V4 model: ready for a drafter."""
    draft = AutoModelForCausalLM.from_pretrained(name or checkpoint("tiny-draft")).eval()
    return enable(draft) if draft.config.model_type == "deepseek_v4" else draft


def ways_to_decode(tree_config: TreeConfig) -> list[Decoding]:
    """Stock, plain, the matched chain (as many nodes per round as the tree, one below the other), and the tree."""
    budget = tree_config.budget
    chain = TreeConfig(budget=budget, depth=budget - 1, top_k=1).as_fixed()
    depth, top_k = tree_config.resolved_depth, tree_config.resolved_top_k
    return [
        Decoding("stock generate", None),
        Decoding("budget=1", TreeConfig(budget=1)),
        Decoding(f"chain, depth {budget - 1}", chain),
        Decoding(f"tree, depth {depth}, top_k {top_k}", tree_config.as_fixed()),
    ]


def _decode(target, draft, tokenizer, decoding: Decoding, prompt: str, max_new_tokens: int) -> None:
    inputs = encode_prompts(tokenizer, [prompt])
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    if decoding.tree_config is not None:
        options |= {"tree_config": decoding.tree_config, "assistant_model": draft}
    start = time.perf_counter()
    result = target.generate(**inputs, **options, return_dict_in_generate=True)
    decoding.seconds += time.perf_counter() - start
    text = result.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    decoding.texts.append(text)
    decoding.rounds += len(text) if decoding.tree_config is None else result.tree_stats["rounds"]


def _results(decodings: list[Decoding]) -> Table:
    budget = decodings[-1].tree_config.budget
    table = Table(
        title=f"{len(PROMPTS)} prompts, chain and tree of {budget} nodes; prefill included",
        caption="Single-run speeds are rough.",
    )
    table.add_column("decoding", no_wrap=True)
    for name in ("accepted\nlength", "without\nbonus", "tokens/s", "against\nbudget=1"):
        table.add_column(name, justify="right")
    plain = decodings[1].tokens / decodings[1].seconds
    for decoding in decodings:
        length, speed = decoding.tokens / decoding.rounds, decoding.tokens / decoding.seconds
        table.add_row(decoding.name, f"{length:.2f}", f"{length - 1:.2f}", f"{speed:.1f}", f"{speed / plain:.2f}x")
    return table


def _verdict(decodings: list[Decoding]) -> str:
    reference = decodings[0]
    different = [
        f"{other.name} differs from {reference.name} at token {first_difference(expected, text)} of prompt {number}"
        for other in decodings[1:]
        for number, (expected, text) in enumerate(zip(reference.texts, other.texts), start=1)
        if expected != text
    ]
    if different:
        return "[bold red]The texts differ:[/] " + escape("; ".join(different)) + "."
    return f"[bold green]All {len(decodings)} ways wrote the same {reference.tokens} tokens.[/]"


class WatchedGenerator(AssistantTreeGenerator):
    """Drafts as its base does, and remembers every round of row 0, the first one from `position` on."""

    def __init__(self, assistant_model, tree_config: TreeConfig, target_cache: TreeCache, position: int) -> None:
        super().__init__(assistant_model, tree_config, target_cache)
        self.rounds: list[Round] = []
        self._position = position

    def propose(self, *args, **kwargs) -> TokenTree:
        self._tree = super().propose(*args, **kwargs)
        return self._tree

    def update(self, path: Tensor, path_lengths: Tensor, predicted: Tensor) -> None:
        walked = path[0, : int(path_lengths[0])].tolist()
        self.rounds.append(Round(self._position, self._tree, walked, predicted[0].tolist()))
        self._position += len(walked)
        super().update(path, path_lengths, predicted)


@torch.no_grad()
def decode_rounds(
    target, draft, input_ids: Tensor, tree_config: TreeConfig, count: int, end: int | None = None
) -> list[Round]:
    """The first `count` rounds after a prompt `[1, P]`, fewer if the text ends with the token `end`."""
    lengths, depth = torch.tensor([input_ids.shape[1] - 1]), tree_config.resolved_depth
    cache = TreeCache(target.config, rows=1, spare=max(DEFAULT_SPARE, depth + 1))
    watched = WatchedGenerator(draft, tree_config, cache, int(lengths))
    prefill_once(target, cache, input_ids, lengths, None, watched, copies=1)
    texts = Texts(input_ids, torch.zeros_like(lengths), limit=count * (depth + 1) + depth)
    verifier = Verifier(TokenSelector(texts), None if end is None else torch.tensor([end]))

    def stop(roots: Tensor) -> Tensor:
        if texts.live_rows and len(watched.rounds) == count:
            texts.leave([0], [True])
        return roots

    decode_rows(target, cache, texts, input_ids[:, -1], watched, depth, verifier, TreeStats(), refill=stop)
    return watched.rounds


def _round_to_draw(target, draft, tokenizer, tree_config: TreeConfig) -> Round:
    """Of the first rounds of all prompts one where the target leaves the draft's first choice, the longest such."""
    rounds = []
    for prompt in PROMPTS:
        input_ids = encode_prompts(tokenizer, [prompt])["input_ids"]
        rounds += decode_rounds(target, draft, input_ids, tree_config, _DRAWN_FROM, tokenizer.eos_token_id)
    return max(rounds, key=lambda current: (_leaves_first_choice(current), len(current.path)))


def _leaves_first_choice(current: Round) -> bool:
    """Whether some accepted node is not its parent's first child: a chain would have ended there."""
    parents = current.tree.parents[0].tolist()
    return any(parents.index(parents[node], 1) != node for node in current.path[1:])


def draw(current: Round, tokenizer) -> Tree:
    """The tree of a round, the target's path through it highlighted."""

    def show(token: int) -> str:
        return escape(repr(tokenizer.decode([token])))

    tree = current.tree
    tokens, parents, valid = tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.valid[0].tolist()
    accepted = len(current.path) - 1
    title = (
        f"One round: {sum(valid)} nodes verified in one forward, drafts accepted: {accepted}, bonus: 1\n"
        f"[bold]{show(tokens[0])}[/] [dim]root, position {current.position}[/]"
    )
    branches = {0: Tree(title)}
    for node in range(1, len(tokens)):
        if valid[node]:
            style = "bold green" if node in current.path else "dim"
            branches[node] = branches[parents[node]].add(f"[{style}]{show(tokens[node])}[/]")
    bonus = show(current.predicted[current.path[-1]])
    branches[current.path[-1]].add(f"[bold yellow]{bonus}[/] [dim]bonus: the target's own next token[/]")
    return branches[0]
