"""The `generate` that `enable` binds, and the decoding loop: draft, verify, accept, refresh."""

import copy
import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput

from . import snapshots
from .budgeting.live import RoundBudget, make_budget
from .cache import TreeCache
from .config import HEADS, TreeConfig
from .defaults import default_of
from .drafting import RootGenerator, TreeCandidateGenerator
from .fork import DEFAULT_SPARE
from .intervals import synchronize
from .modeling import device_of, enable, is_enabled, restore, unwrap
from .outputs import Recorder, Stream, ended
from .prefill import left_align, prefill_once
from .processors import warpers
from .ranks import ranks_of
from .reuse import reuse_prefix
from .rounds import Rounds, check_rounds
from .routing import ExpertCounter
from .sampling import resolve_seeds
from .selection import DraftNoise
from .steps import fields_to_keep, make_verifier
from .stopping import add_stop_strings, token_limit
from .synced import SyncedForwards, synced_forwards
from .texts import Texts
from .validation import (
    check_assistant,
    check_inputs,
    check_kinds,
    check_options,
    check_own_options,
    check_own_prepared,
    check_positions,
    check_prepared,
    mtp_wanted,
    option,
    prompt_lookup,
)
from .verifying import Verifier


logger = logging.getLogger(__name__)


@dataclass
class TreeGenerateOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with `tree_stats`, see [`TreeStats.to_dict`]; `cache` is the `TreeCache`.

    With `return_logprobs=True`, `logprobs` and `processed_logprobs` `[B, new tokens]` are those of the returned tokens
    under the model's own logits, and after processors and warpers; 0 behind a row's end.
    """

    logprobs: Tensor | None = None
    processed_logprobs: Tensor | None = None
    tree_stats: dict[str, Any] | None = None


@dataclass
class TreeStats:
    """Counts of one call, over all rows. Accepted length = emitted tokens / rounds; without the bonus, one less."""

    seeds: list[int] | None = None
    rounds: int = 0
    emitted_tokens: int = 0
    nodes: int = 0
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    time: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", *PHASES), 0.0))
    # Counts what verification reads, where rounds are recorded.
    experts: ExpertCounter | None = None
    # Seconds of phases inside the one that is being timed.
    _inner: float = 0.0

    def count(self, rows: list[int], lengths: list[int], nodes: list[int]) -> None:
        """Adds a round: tokens emitted by each of the physical `rows`, nodes verified in each (no padding nodes)."""
        self.rounds += len(lengths)
        self.nodes += sum(nodes)
        self.emitted_tokens += sum(lengths)
        for length in lengths:
            self.accepted_lengths[length] = self.accepted_lengths.get(length, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """`rounds`, `emitted_tokens`, `nodes` (verified), `accepted_lengths` (histogram), `seeds` (of each row, where
        tokens were sampled), `time` (seconds by phase, as the host sees them).

        Where rounds are recorded, also `distinct_experts` (read per mixture layer and verification, on average); `time`
        then waits for the devices.
        """
        recorded = {} if self.experts is None else {"distinct_experts": self.experts.mean}
        return {
            "rounds": self.rounds,
            "emitted_tokens": self.emitted_tokens,
            "nodes": self.nodes,
            "accepted_lengths": dict(sorted(self.accepted_lengths.items())),
            "seeds": self.seeds,
            "time": dict(self.time),
            **recorded,
        }

    @contextmanager
    def timed(self, phase: str):
        """Adds the time spent inside to a phase, less that of phases timed inside it."""
        outer, self._inner = self._inner, 0.0
        start = time.perf_counter()
        yield
        if self.experts is not None:
            synchronize()
        seconds = time.perf_counter() - start
        self.time[phase] += seconds - self._inner
        self._inner = outer + seconds


# Names that transformers still maps to `cache`, later than we look.
CACHE_ALIASES = ("past_key_values", "cache_params")
# Of a round. `build` makes a tree of what was drafted.
PHASES = ("draft", "build", "verify", "accept", "refresh")


def generate(model, *args, **kwargs):
    """`model.generate` of an enabled model: transformers' own, plus trees when `tree_config` is given.

    Args:
        tree_config (`TreeConfig` or `dict`, *optional*): verify draft trees. Without it this is stock `generate`.
        assistant_model (`PreTrainedModel`, *optional*): a causal model of the same vocabulary that drafts. Without
            one, the draft head inside the model's checkpoint does.
        num_assistant_tokens (`int`, *optional*): the depth, where `tree_config` has none.
        use_mtp (`bool`, *optional*): the head in the checkpoint is to be an MTP head, and drafts.
        prompt_lookup_num_tokens (`int`, *optional*): draft from prompt and output themselves (`drafter="ngram"`), and
            the depth, where `tree_config` has none.
        max_matching_ngram_size (`int`, *optional*, defaults to 2): the longest suffix that prompt lookup matches.
        assistant_confidence_threshold (`float`, *optional*): do not draft below this estimated path probability.
        prefill_chunk_size (`int`, *optional*, defaults to 512): prompt tokens per prefill forward.
        seeds (`list[int]`, *optional*): one per returned sequence, with `do_sample=True`: a sequence depends on its
            prompt and seed alone. By default they are drawn from torch's default generator.
        return_logprobs (`bool`, *optional*): with `return_dict_in_generate=True`, adds `logprobs` and
            `processed_logprobs` of the returned tokens to the output, at the cost of one number per token.
        cache (`TreeCache`, *optional*): from an earlier call; pass the whole conversation in `input_ids`.

    Returns:
        `torch.LongTensor` `[B, P + new tokens]`, or a [`TreeGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        ValueError: for whatever tree decoding cannot honour, before any compute.
    """
    if isinstance(kwargs.get("custom_generate"), str):
        # A recipe from the Hub decodes; ours comes back here without its name.
        return type(model).generate(model, *args, **kwargs)
    own = {name: kwargs.pop(name, None) for name in ("seeds", "return_logprobs")}
    tree_config = kwargs.pop("tree_config", None)
    if tree_config is None:
        tree_config = default_of(model, kwargs.get("generation_config", args[1] if len(args) > 1 else None))
    if tree_config is None:
        check_own_options(own)
        return type(model).generate(model, *args, **kwargs)
    if os.environ.get("HF_TREESPEC_DISABLE") == "1":
        logger.warning("HF_TREESPEC_DISABLE=1: `tree_config` and what goes with it are dropped, decoding is stock.")
        kwargs.pop("assistant_model", None)
        for name in ("prompt_lookup_num_tokens", "use_mtp"):
            _unset(name, kwargs, model)
        for name in ("cache", *CACHE_ALIASES):
            if isinstance(kwargs.get(name), TreeCache):
                del kwargs[name]
        return type(model).generate(model, *args, **kwargs)
    bound = inspect.signature(GenerationMixin.generate).bind(model, *args, **kwargs).arguments
    arguments = {**bound, **bound.get("kwargs", {})}
    for name in ("self", "kwargs"):
        arguments.pop(name, None)
    for alias in CACHE_ALIASES:
        if arguments.get(alias) is not None:
            arguments.setdefault("cache", arguments.pop(alias))
    with ended(arguments.get("streamer")):
        return run_call(model, arguments, tree_config, decode, **own)


def run_call(model, arguments: dict[str, Any], tree_config, method: Callable, seeds=None, return_logprobs=None):
    """Validates a call of `generate` with `tree_config`, has transformers prepare it, and runs `method`, which takes
    what [`decode`] does."""
    tree_config = TreeConfig.checked(tree_config)
    input_ids = arguments.get("input_ids", arguments.get("inputs"))
    check_kinds(arguments, model.generation_config)
    check_options(model, arguments)
    check_inputs(input_ids, arguments.get("attention_mask"), model.config.vocab_size)
    configs = (arguments.get("generation_config"), model.generation_config)
    tree_config, ngram_size = prompt_lookup(tree_config, arguments, *configs)
    tree_config = mtp_wanted(tree_config, arguments, *configs)
    for name in ("prompt_lookup_num_tokens", "use_mtp"):
        _unset(name, arguments, model)
    assistant_model = arguments.pop("assistant_model", None)
    check_assistant(model, assistant_model, tree_config)
    check_rounds(model, tree_config)
    drafting = Drafting(model, arguments, tree_config, assistant_model, ngram_size)
    add_stop_strings(model, arguments)
    _unset("stop_strings", arguments, model)
    drafting.synced = synced_forwards(model, arguments.pop("synced_gpus", None))
    for name in ("tokenizer", "num_assistant_tokens", "assistant_confidence_threshold", "custom_generate"):
        arguments.pop(name, None)
    # Inference tensors could not be written by a later call outside inference mode; the cache outlives this one.
    with drafting.assistant_enabled(), torch.inference_mode(False), torch.no_grad():
        method = partial(
            method,
            drafting=drafting,
            seeds=seeds,
            return_logprobs=return_logprobs,
            streamer=arguments.get("streamer"),
        )
        return type(model).generate(model, **arguments, custom_generate=method)


def _unset(name: str, arguments: dict[str, Any], model) -> None:
    """Hides an option from transformers' `generate`, which refuses it before our loop runs."""
    config = arguments.get("generation_config")
    if getattr(config, name, None) is not None:
        config = arguments["generation_config"] = copy.deepcopy(config)
        setattr(config, name, None)
    # As an argument `None` has the last word, also over the model's own config; with a config it draws a warning.
    arguments.pop(name, None)
    if config is None or getattr(model.generation_config, name, None) is not None:
        arguments[name] = None


# Calls that use an assistant which they enabled themselves.
_borrowers: "weakref.WeakKeyDictionary[torch.nn.Module, int]" = weakref.WeakKeyDictionary()
_borrowing = threading.Lock()


class Drafting:
    """What the loop needs to make its drafter: the resolved options of one call."""

    def __init__(
        self, model, arguments: dict[str, Any], tree_config: TreeConfig, assistant_model, ngram_size: int
    ) -> None:
        configs = (arguments.get("generation_config"), model.generation_config)
        depth = option("num_assistant_tokens", arguments, *configs)
        if depth is not None:
            try:
                with_depth = TreeConfig.from_dict({**tree_config.to_dict(), "depth": depth})
            except ValueError as error:
                raise ValueError(f"`num_assistant_tokens` is {depth!r}, which is to be a depth. {error}") from error
            tree_config = with_depth if tree_config.depth is None else tree_config
        self.tree_config = tree_config
        self.ngram_size = ngram_size
        self.synced: SyncedForwards | None = None
        self.model = model
        self.assistant_model = None
        if assistant_model is not None and tree_config.budget > 1:
            self.assistant_model = unwrap(assistant_model)
        self.threshold = option("assistant_confidence_threshold", arguments, *configs) or 0.0
        if not 0 <= self.threshold < 1:
            raise ValueError(f"`assistant_confidence_threshold` is {self.threshold}; it must be at least 0, below 1.")
        self.chunk_size = option("prefill_chunk_size", arguments, *configs)
        if self.chunk_size is not None and (type(self.chunk_size) is not int or self.chunk_size < 1):
            raise ValueError(f"`prefill_chunk_size` is {self.chunk_size!r}; it must be a positive integer or `None`.")
        self.head = None
        if tree_config.budget > 1 and assistant_model is None and tree_config.drafter != "ngram":
            from .heads import head_of

            try:
                self.head = head_of(model, tree_config.drafter if tree_config.drafter in HEADS else None)
            except ValueError as error:
                raise ValueError(f"`tree_config` has `budget={tree_config.budget}`. {error}") from error

    @contextmanager
    def assistant_enabled(self):
        """A DeepSeek-V4 assistant is enabled for the call; of calls that overlap in threads, the last one disables."""
        assistant = self.assistant_model
        borrowed = assistant is not None and assistant.config.model_type == "deepseek_v4"
        with _borrowing:
            borrowed = borrowed and (assistant in _borrowers or not is_enabled(assistant))
            if borrowed:
                _borrowers[assistant] = _borrowers.get(assistant, 0) + 1
        try:
            if borrowed:
                with _borrowing:
                    enable(assistant)
            yield
        finally:
            if borrowed:
                with _borrowing:
                    _borrowers[assistant] -= 1
                    if not _borrowers[assistant]:
                        del _borrowers[assistant]
                        restore(assistant)

    @property
    def head_layers(self) -> int:
        """Window rings that the drafter needs in the target's cache."""
        return 0 if self.head is None else len(self.head.layers)

    def generator(self, cache: TreeCache, end: Tensor | None) -> TreeCandidateGenerator:
        """The drafter of this call, which ends rows at the tokens `end` `[E]`."""
        config, threshold = self.tree_config, self.threshold
        if config.drafter == "ngram" and config.budget > 1:
            from .drafting.ngram import NgramTreeGenerator

            return NgramTreeGenerator(cache, config, self.ngram_size, end, threshold)
        if self.head is not None:
            from .drafting.head import HeadTreeGenerator

            return HeadTreeGenerator.of(self.head)(self.model, self.head, cache, config, threshold)
        if self.assistant_model is None:
            return RootGenerator()
        from .drafting.assistant import AssistantTreeGenerator

        return AssistantTreeGenerator(self.assistant_model, config, cache, threshold, self.chunk_size)


def draft_depth(tree_config: TreeConfig, head=None) -> int:
    """Levels to draft. A DSpark head was trained for blocks of one size, which is its default depth, not its limit."""
    depth, block_size = tree_config.resolved_depth, getattr(head, "block_size", None)
    if block_size is None or depth <= block_size:
        return depth
    if tree_config.depth is None:
        return block_size
    logger.warning_once(
        f"`depth` is {depth}, the DSpark head's `dspark_block_size` {block_size}: some heads draft worse beyond it. "
        "Compare `tree_stats['accepted_lengths']`."
    )
    return depth


def decode(
    model,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    drafting: Drafting,
    seeds=None,
    return_logprobs=None,
    streamer=None,
    **model_kwargs,
):
    """The decoding method passed to transformers' `generate`: greedy or sampled, all rows ragged.

    Every round drafts a tree per unfinished row, verifies all nodes in one forward, accepts the longest path that the
    model itself would have written, and commits it. Rows leave as they finish.
    """
    check_prepared(logits_processor, model_kwargs)
    check_own_prepared(seeds, return_logprobs, generation_config)
    # Without a mask transformers makes one, in which every pad token is padding, wherever it stands.
    check_inputs(input_ids, model_kwargs.get("attention_mask"), model.config.vocab_size)
    batch, width = input_ids.shape
    limit = token_limit(stopping_criteria, width)
    check_positions(drafting.assistant_model, width + limit)
    depth = draft_depth(drafting.tree_config, drafting.head)
    tokens, lengths = (x.to(device_of(model)) for x in left_align(input_ids, model_kwargs.get("attention_mask")))
    cache = model_kwargs.get("cache")
    brought = isinstance(cache, TreeCache)
    if not brought:
        spare = max(DEFAULT_SPARE, depth + 1, drafting.tree_config.fixed_nodes or 0)
        cache = TreeCache(model.config, batch, spare, tokens.device, drafting.head_layers)
    if brought or generation_config.return_dict_in_generate:
        # The cache outlives the call.
        cache.snapshot_interval = snapshots.INTERVAL
    pad = generation_config._pad_token_tensor
    texts = Texts(input_ids.to(tokens.device), width - lengths, limit, pad=0 if pad is None else int(pad))
    ranks = ranks_of(model)
    seeds = resolve_seeds(seeds, batch) if generation_config.do_sample else None
    if seeds is not None and ranks is not None:
        (seeds,) = ranks.agree(seeds.to(tokens.device))
    keep = fields_to_keep(generation_config, return_logprobs)
    verifier = make_verifier(texts, logits_processor, stopping_criteria, seeds, keep)
    recorder, stream = Recorder(texts, keep), Stream(streamer, texts)
    with cache.claimed(model):
        cache.configure(drafting.tree_config)
        # Made before the cache is touched: it may refuse the assistant.
        generator = drafting.generator(cache, verifier.end)
        if seeds is not None:
            generator.noise = DraftNoise(warpers(logits_processor), seeds, cache)
        generator.synced = drafting.synced
        budget = make_budget(model, drafting.tree_config, generator, drafting.assistant_model, drafting.head)
        reuse_prefix(cache, model.config, tokens, lengths, depth + 1, drafting.head)
        stats = TreeStats(seeds=None if seeds is None else seeds.tolist())
        if drafting.tree_config.record_rounds:
            stats.experts = ExpertCounter(model)
        with generator.attached():
            with stats.timed("prefill"):
                copies = generation_config.num_return_sequences
                prefill_once(model, cache, tokens, lengths - 1, drafting.chunk_size, generator, copies)
            roots = tokens.gather(1, lengths[:, None] - 1)[:, 0]
            with nullcontext() if stats.experts is None else stats.experts.attached():
                engines = {
                    "rounds": Rounds(model, cache, drafting.tree_config, depth, width + limit, generator.taps),
                    "budget": budget,
                }
                decode_rows(model, cache, texts, roots, generator, depth, verifier, stats, recorder, stream, **engines)
    # Where processors or samples decide, rows wait for one another, or texts end before a path can, drafts are rightly
    # rejected, and a controller drafts less: that says nothing about the head.
    telling = type(verifier) is Verifier and verifier.selector.is_plain and limit >= 4 * depth
    telling = telling and budget.controller is None
    if drafting.head is not None and telling:
        from .heads import count_acceptance

        count_acceptance(model, budget.drafted_rounds, budget.accepted_drafts, depth)
    sequences = texts.sequences(texts.complete).to(input_ids.device)
    if generation_config.return_dict_in_generate:
        tree_stats = stats.to_dict() | budget.stats(texts)
        return TreeGenerateOutput(sequences=sequences, cache=cache, tree_stats=tree_stats, **recorder.fields())
    return sequences


def decode_rows(
    model,
    cache: TreeCache,
    texts: Texts,
    roots: Tensor,
    generator: TreeCandidateGenerator,
    depth: int,
    verifier: Verifier,
    stats: TreeStats,
    recorder: Recorder | None = None,
    stream: Stream | None = None,
    rounds: Rounds | None = None,
    budget: RoundBudget | None = None,
    refill: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """The rounds, until every row of `texts` has stopped; `roots` `[B]` are the last prompt tokens of the live rows, the
    first not in the cache. After every round `refill` may let rows leave and enter: it takes the roots, gives theirs."""
    rounds = rounds or Rounds(model, cache, TreeConfig(cuda_graphs=False), depth, cache.capacity)
    generator.timed = stats.timed
    budget = budget or RoundBudget()
    ranks = generator.ranks = ranks_of(model)
    while True:
        rows = texts.rows
        with stats.timed("draft"):
            remaining = texts.remaining
            levels = min(depth, texts.most_remaining - 1)
            levels = budget.begin(len(texts.live_rows), cache.length_bound, levels)
            if generator.synced is not None:
                levels = generator.synced.levels(levels)
            tree = generator.propose(rows, roots, levels, remaining - 1)
            if ranks is not None:
                tree = ranks.agree_on_tree(tree, generator.budget)
            budget.drafted(texts, tree, cache.lengths)
        with rounds.fork(tree, rows) as fork:
            with stats.timed("verify"):
                logits = rounds.forward(fork)
            with stats.timed("accept"):
                verifier.selector.begin(fork)
                verdict = rounds.judge(verifier, logits, fork, remaining)
                if ranks is not None:
                    verdict = ranks.agree_on_verdict(verdict)
                verifier.selector.commit(fork, verdict.path, verdict.accepted)
                accepted, emitted = verdict.accepted, verdict.emitted
            with stats.timed("refresh"):
                generator.read(fork, verdict.path, accepted, emitted)
                fork.refresh(verdict.path, accepted)
        with stats.timed("accept"):
            if recorder is not None:
                recorder.add(verdict)
            texts.append(emitted, accepted)
            roots = emitted.gather(1, accepted[:, None] - 1)[:, 0]
            on_host, finished, nodes = torch.stack([accepted, verdict.finished.long(), tree.valid.sum(1)]).tolist()
        live_rows = texts.live_rows
        stats.count(live_rows, on_host, nodes)
        budget.count(on_host)
        kept = texts.leave(on_host, finished)
        if stream is not None:
            stream.send()
        if refill is None and generator.synced is None and not texts.live_rows:
            return
        with stats.timed("draft"):
            generator.update(verdict.path, accepted, verdict.selection.tokens)
            budget.end(live_rows, on_host, timed=not rounds.capturing)
        if kept is not None:
            roots = roots[kept]
        if refill is not None:
            roots = refill(roots)
        if not texts.live_rows:
            if generator.synced is not None:
                generator.synced.idle(model, cache, generator)
            return
