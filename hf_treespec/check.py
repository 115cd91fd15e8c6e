"""The quality gate behind `hf-treespec check`: does a model with its drafter write what it should?

Prompts are decoded by stock transformers, by plain decoding on our cache and with trees, one at a time and in batches. A
text that leaves its reference does so at a near-tie, which rounding explains, or it is a fault. How much rounding explains
is measured where they part, on stock transformers alone: how far the gap moves when every module rounds once more.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .check_sampling import DRAWS, NEUTRAL, SamplerTest, check_sampler
from .config import HEADS, TreeConfig
from .generation import draft_depth
from .heads import head_of
from .heads.alarm import FLOOR, expected_accepted
from .intervals import Interval, bootstrap
from .metrics import AcceptedLength, AnswerMatch, Losslessness
from .metrics.answer_match.answer_match import final_answer
from .metrics.losslessness.losslessness import top1_gap
from .modeling import device_of, unwrap
from .oracle import oracle_logits, stable_topk
from .prompts import encode_prompts, new_tokens


# What two right computations in fp32 may differ by, in units of the largest logit.
FP32_TOLERANCE = 3e-6
# How often the effect of rounding is drawn for each difference.
_DRAWS = 8


@dataclass
class Texts:
    """What one way to decode wrote: new `tokens` of each prompt, and the `rounds` that took, where they are known."""

    tokens: list[list[int]] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """One way to decode against another, over all prompts.

    Attributes:
        way, reference: their names.
        first_differences: per prompt the number of equal new tokens before the first difference, or `None`.
        gaps: per prompt the oracle's top-1 gap there in logits, infinite where one text ends; or `None`.
        tolerances: the largest gap there, in logits, that rounding explains; or `None`.
    """

    way: str
    reference: str
    first_differences: list[int | None]
    gaps: list[float | None]
    tolerances: list[float | None]

    @property
    def identical(self) -> int:
        """How many texts are the same."""
        return self.first_differences.count(None)

    @property
    def near_ties(self) -> list[int]:
        """Prompts whose texts part where rounding explains it."""
        return [prompt for prompt in self._different() if self.gaps[prompt] <= self.tolerances[prompt]]

    @property
    def faults(self) -> list[int]:
        """Prompts whose texts part where rounding does not explain it."""
        return [prompt for prompt in self._different() if not self.gaps[prompt] <= self.tolerances[prompt]]

    def _different(self) -> list[int]:
        return [prompt for prompt, place in enumerate(self.first_differences) if place is not None]


@dataclass(frozen=True)
class Answers:
    """Final answers of plain decoding and of trees, and the paired difference (trees - plain), each 0 to 1.

    `given`: whether the right answers were given; otherwise they are plain decoding's own.
    """

    prompts: int
    given: bool
    plain: Interval
    tree: Interval
    difference: Interval


@dataclass(frozen=True)
class DecodingCheck:
    """What was found in one dtype.

    Attributes:
        dtype: of the model.
        comparisons: what was compared; the last one is plain decoding's own noise floor.
        accepted_length: tokens per round of the trees, with the bonus token.
        expected_length: what the accepted length must not lie below, if anything is known.
        answers: `None` if no prompt has one.
        sampler: whether tokens are drawn from the target's distribution.
    """

    dtype: str
    comparisons: list[Comparison]
    accepted_length: Interval
    expected_length: float | None
    answers: Answers | None
    sampler: SamplerTest | None = None

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; empty if nothing is."""
        found = [
            f"{self.dtype}: {item.way} leaves {item.reference} in {len(item.faults)} of {len(item.gaps)} texts by more "
            f"than rounding explains"
            for item in self.comparisons
            if item.faults
        ]
        if self.sampler is not None and self.sampler.is_fault:
            found.append(
                f"{self.dtype}: tokens are not drawn from the target's distribution (chi-square "
                f"{self.sampler.statistic:.0f} with {self.sampler.degrees} degrees of freedom)"
            )
        # Only what the prompts drawn cannot explain is a fault.
        if self.expected_length is not None and self.accepted_length.high < self.expected_length:
            found.append(
                f"{self.dtype}: the accepted length is {self.accepted_length:.2f}, at least {self.expected_length:.2f} "
                "was expected: a wrong head tap, an unprimed window, wrongly converted weights or a wrong prompt format"
            )
        return found


def check_decoding(
    target,
    tokenizer,
    prompts: list[str],
    tree_config: TreeConfig,
    assistant_model=None,
    chat: bool | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    answers: list[str | None] | None = None,
    minimum_length: float | None = None,
    draws: int = DRAWS,
    progress: Callable = lambda items, name: items,
) -> DecodingCheck:
    """Decodes `prompts` in every way and compares.

    Args:
        target: an enabled model.
        tokenizer: the target's.
        prompts: one text each.
        tree_config: how the trees are drafted.
        assistant_model: what drafts; without one, the target's head or, with `drafter="ngram"`, prompt lookup.
        chat: as in [`encode_prompts`].
        max_new_tokens: tokens per prompt.
        batch_size: rows of the batches that are compared with single rows.
        answers: the right answer of each prompt, or `None` where there is none.
        minimum_length: accepted length (with the bonus token) that the trees must reach; by default 40 % of the drafts
            that are published for the target's head, and nothing for an assistant.
        draws: first tokens drawn behind each of the first prompts.
        progress: wraps an iterable of steps; also takes a name.

    Raises:
        ValueError: if there are no prompts, no tree, or nothing that drafts.
    """
    if not prompts:
        raise ValueError("`prompts` is empty; pass at least one.")
    if tree_config.budget == 1:
        raise ValueError("`budget` is 1, which is plain decoding; a check needs at least 2 nodes per round.")
    head = None
    if assistant_model is None and tree_config.drafter != "ngram":
        head = head_of(target, tree_config.drafter if tree_config.drafter in HEADS else None)
    trees = {"tree_config": tree_config.as_fixed(), "assistant_model": assistant_model}
    inputs = [encode_prompts(tokenizer, [prompt], chat)["input_ids"] for prompt in prompts]
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    options["pad_token_id"] = tokenizer.pad_token_id
    texts = {"stock": _decode_stock(target, inputs, options, progress)}
    batches, sampled = f", batches of {batch_size}", ", sampled"
    for name, rows in (
        ("budget=1", 1),
        ("tree", 1),
        (f"tree{batches}", batch_size),
        (f"budget=1{sampled}", batch_size),
        (f"tree{sampled}", batch_size),
        (f"budget=1{batches}", batch_size),
    ):
        way = trees if name.startswith("tree") else {"tree_config": TreeConfig(budget=1)}
        way = {**way, **NEUTRAL} if name.endswith(sampled) else way
        steps = progress(range(0, len(prompts), rows), name)
        texts[name] = _decode(target, tokenizer, prompts, chat, rows, steps, {**options, **way})
    ids = [tokens[0].tolist() for tokens in inputs]
    comparisons = [
        _compare(target, ids, texts, "budget=1", "stock"),
        *(_compare(target, ids, texts, way, "budget=1") for way in ("tree", f"tree{batches}")),
        _compare(target, ids, texts, f"tree{sampled}", f"budget=1{sampled}", list(range(len(ids)))),
        _compare(target, ids, texts, f"budget=1{batches}", "budget=1"),
    ]
    tokens = texts["tree"].tokens
    accepted = AcceptedLength(keep_in_memory=True).compute(
        emitted_tokens=[len(text) for text in tokens], rounds=texts["tree"].rounds
    )
    if minimum_length is None and head is not None:
        checkpoint = target.config._name_or_path
        drafts = expected_accepted(checkpoint, head.kind, draft_depth(tree_config, head))
        minimum_length = 1 + FLOOR * drafts
    return DecodingCheck(
        str(target.dtype).removeprefix("torch."),
        comparisons,
        Interval(accepted["accepted_length"], accepted["low"], accepted["high"]),
        minimum_length,
        _answers(tokenizer, texts["budget=1"].tokens, tokens, answers),
        check_sampler(target, inputs, options, draws),
    )


def _decode(target, tokenizer, prompts: list[str], chat, rows: int, steps, options: dict) -> Texts:
    """Decodes `rows` prompts at a time, from each of `steps`; rounds are known per prompt where that is one."""
    texts = Texts()
    for start in steps:
        inputs = encode_prompts(tokenizer, prompts[start : start + rows], chat)
        inputs = {name: value.to(device_of(target)) for name, value in inputs.items()}
        seeds = list(range(start, start + len(inputs["input_ids"]))) if options["do_sample"] else None
        output = target.generate(**inputs, **options, seeds=seeds)
        texts.tokens += new_tokens(output, inputs["attention_mask"])
        if rows == 1:
            texts.rounds.append(output.tree_stats["rounds"])
    return texts


def _decode_stock(target, inputs: list[Tensor], options: dict, progress) -> Texts:
    """Texts of stock transformers, one prompt at a time."""
    texts, model = Texts(), unwrap(target)
    for ids in progress(inputs, "stock"):
        ids = ids.to(device_of(target))
        with stable_topk():
            sequence = type(model).generate(model, ids, attention_mask=torch.ones_like(ids), **options).sequences
        texts.tokens.append(sequence[0, ids.shape[1] :].tolist())
    return texts


def _compare(target, prompts, texts: dict[str, Texts], way: str, reference: str, seeds=None) -> Comparison:
    one, other = texts[way].tokens, texts[reference].tokens
    more = {"model": target, "prompts": prompts, "seeds": seeds}
    found = Losslessness(keep_in_memory=True).compute(predictions=one, references=other, **more)
    places, gaps = found["first_differences"], found["gaps"]
    tolerances = [
        None if place is None else _tolerance(target, *texts_of_prompt, place, gap, seed)
        for texts_of_prompt, place, gap, seed in zip(
            zip(prompts, one, other), places, gaps, seeds or [None] * len(prompts)
        )
    ]
    return Comparison(way, reference, places, gaps, tolerances)


def _tolerance(target, prompt: list[int], one: list[int], other: list[int], place: int, gap: float, seed) -> float:
    """The largest gap between two texts' tokens at `place` that rounding explains."""
    if not math.isfinite(gap):
        return 0.0
    ids = torch.tensor([[*prompt, *one[:place]]], device=device_of(target))
    largest = float(oracle_logits(target, ids)[0, -1].float().abs().max())
    moves = [max(FP32_TOLERANCE, torch.finfo(target.dtype).eps) * largest]
    for draw in range(_DRAWS):
        with _extra_rounding(unwrap(target), draw):
            moves.append(abs(top1_gap(target, prompt, one, other, place, seed) - gap))
    # Each of two right computations may be off by that much.
    return 2 * max(moves)


@contextmanager
def _extra_rounding(model, seed: int) -> Iterator[None]:
    """Every module with parameters of its own returns values that are off by one unit in the last place, up or down."""
    generators: dict[torch.device, torch.Generator] = {}

    def move(module, args, output):
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(seed)
        up = torch.rand(output.shape, device=output.device, generator=generators[output.device]) < 0.5
        eps = torch.finfo(output.dtype).eps
        return output * torch.where(up, 1 + eps, 1 - eps).to(output.dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                hooks.callback(module.register_forward_hook(move).remove)
        yield


def _answers(tokenizer, plain: list[list[int]], trees: list[list[int]], answers: list[str | None] | None):
    """Answers side by side, where they are known."""
    plain, trees = (tokenizer.batch_decode(texts, skip_special_tokens=True) for texts in (plain, trees))
    given = any(answers or [])
    expected = answers if given else plain
    known = [row for row, answer in enumerate(expected) if answer and final_answer(answer) is not None]
    if not known:
        return None
    matches = []
    for texts in (plain, trees):
        found = AnswerMatch(keep_in_memory=True).compute(
            predictions=[texts[row] for row in known], references=[expected[row] for row in known]
        )
        matches.append((Interval(found["answer_match"], found["low"], found["high"]), found["matches"]))
    (plain_share, plain_matches), (tree_share, tree_matches) = matches
    gain = torch.tensor(tree_matches, dtype=torch.double) - torch.tensor(plain_matches, dtype=torch.double)
    difference = bootstrap(lambda index: gain[index].mean(1), len(gain))
    return Answers(len(known), given, plain_share, tree_share, difference)
