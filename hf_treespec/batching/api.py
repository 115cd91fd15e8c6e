"""The `generate_batch` that `enable` binds: transformers' own signature and results, with trees."""

import logging
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..config import TreeConfig
from ..defaults import default_of
from ..generation import Drafting, TreeStats
from ..modeling import device_of
from ..ranks import Ranks, ranks_of
from ..sampling import resolve_seeds
from .memory import Cap, estimate, free_bytes, segments
from .queue import RequestQueue, finish, shape
from .requests import Prompt, Request, prepare


logger = logging.getLogger(__name__)

# Texts at a time, unless the configuration says otherwise.
DEFAULT_ROWS = 64
DEFAULT_SHARE = 0.9
# Fields of `ContinuousBatchingConfig` that are honoured ...
_HONOURED = ("page_size", "num_blocks", "max_batch_tokens", "max_memory_percent", "max_requests_per_batch")
_HONOURED += ("return_logprobs", "allow_block_sharing")
# ... and those that may ask for no more than what is done anyway.
_IDLE = {"use_async_batching": (False,), "use_cuda_graph": (False,), "auto_switch_to_flash": (False,)}
_IDLE |= {"max_blocks_per_request": (0,), "drop_unsupported_processors": (False,), "per_request_processors": (True,)}
# Options of `generate` that one call for many prompts has no use for.
_REFUSED = ("input_ids", "attention_mask", "cache", "streamer", "return_dict_in_generate", "return_logprobs")
_REFUSED += ("output_scores", "output_logits", "synced_gpus")


class BatchOutput(dict[str, GenerationOutput]):
    """Results by request id, in the order of the prompts; `tree_stats` as in `generate`, over all requests."""

    tree_stats: dict[str, Any]


def generate_batch(
    model,
    inputs: list[list[int]],
    generation_config: GenerationConfig | list[GenerationConfig] | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    tree_config: TreeConfig | dict[str, Any] | None = None,
    seeds: list[int] | None = None,
    callback: Callable[[GenerationOutput], Any] | None = None,
    aborted: Collection[str] = frozenset(),
    **kwargs,
) -> BatchOutput:
    """Writes a text behind each of many prompts: as soon as one ends, the next prompt takes its row (continuous
    batching). Every text is the one that `generate` writes for that prompt alone with the same seed.

    Args:
        inputs: prompts as token ids.
        generation_config: of all requests, or a list with one per prompt. Options of drafting are those of the first.
        continuous_batching_config: caps memory. `num_blocks` times `page_size` is the number of tokens that all rows
            may hold together, each counted as long as the longest may become; `max_requests_per_batch` (64 by default)
            the number of rows, `max_batch_tokens` that of tokens in a forward, `max_memory_percent` (90 % by default)
            the share of free memory for caches. `return_logprobs` adds those of the processed scores. The rest is
            for transformers' own scheduler.
        record_timestamps: notes the time of every token (tokens of one round have the same).
        progress_bar: shows one.
        persistent_manager: must be False, there is no manager.
        warmup: has no effect, nothing is captured.
        tree_config: as in `generate`; by default that of the generation config, else `budget=1`.
        seeds: one per returned sequence, with `do_sample=True`; by default drawn from torch's default generator.
        callback: takes every result as soon as it is there.
        aborted: ids of requests to stop, a set that the callback or another thread may add to; they come back with
            what they wrote until then, and an error.
        kwargs: further options of `generate`, of all requests, e.g. `max_new_tokens` and `assistant_model`.

    Returns:
        `{"req_0": GenerationOutput, ...}` in the order of `inputs`. With `num_return_sequences` the further texts of a
        prompt stand before it as `"req_0__child#0"` and so on. A prompt that cannot be served has an `error`.

    Raises:
        ValueError: for an option that cannot be honoured, or if no prompt can be served; before any compute.
    """
    if os.environ.get("HF_TREESPEC_DISABLE") == "1":
        # transformers' own fails on this model.
        logger.warning("HF_TREESPEC_DISABLE=1: `tree_config` and the assistant are dropped, decoding is plain.")
        kwargs.pop("assistant_model", None)
        tree_config = TreeConfig(budget=1)
    if isinstance(inputs, Tensor) or not hasattr(inputs, "__len__"):
        raise ValueError(f"`inputs` is a {type(inputs).__name__}; pass a list of prompts, each a list of token ids.")
    if not len(inputs):
        return BatchOutput()
    options = continuous_batching_config or ContinuousBatchingConfig()
    _check(options, kwargs, persistent_manager)
    configs = generation_config if isinstance(generation_config, list) else [generation_config] * len(inputs)
    if len(configs) != len(inputs):
        raise ValueError(
            f"`generation_config` has {len(configs)} entries for {len(inputs)} prompts; pass one for each."
        )
    with ExitStack() as stack:
        requests = _requests(model, inputs, configs, tree_config, kwargs)
        served = [request for request in requests if request.prompt is not None]
        drafting = served[0].prompt.drafting
        if drafting.synced is not None:
            raise ValueError(
                "`generate_batch` does not keep ranks in step whose forwards wait for one another (`synced_gpus`, ZeRO-3, "
                "FSDP); use `generate` there."
            )
        if drafting.tree_config.record_rounds:
            raise ValueError("`record_rounds` is set, which `generate_batch` does not honour; use `generate`.")
        if drafting.tree_config.deterministic:
            raise ValueError(
                "`deterministic` is set, but which requests share a forward of `generate_batch`, and with it its shape, "
                "depends on when others end. Set `deterministic=False`, or use `generate`."
            )
        # One call: the assistant is enabled once.
        stack.enter_context(drafting.assistant_enabled())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        ranks, device = ranks_of(model), device_of(model)
        sampled = _seed(requests, seeds, ranks, device)
        stats = TreeStats(seeds=[request.seed for request in requests] if sampled else None)
        bar = stack.enter_context(tqdm(total=len(requests), disable=not progress_bar, unit="request"))

        def report(request: Request) -> None:
            bar.update(1)
            if record_timestamps:
                request.output.timestamps = request.timestamps
            if callback is not None:
                callback(request.output)

        free = free_bytes(device, options.max_memory_percent or DEFAULT_SHARE)
        cap = _cap(options, drafting, free if ranks is None else ranks.least(free, device))
        depth, spare = shape(drafting)

        def row_bytes(prompt: Prompt) -> int:
            return estimate(model, drafting, prompt.length + depth + 1, spare)

        refusals = {
            request: f"Request `{request.output.request_id}`: {cap.refusal(request.prompt, row_bytes(request.prompt))}"
            for request in served
            if cap.rows_of(request.prompt, row_bytes(request.prompt)) < 1
        }
        served = [request for request in served if request not in refusals]
        if not served:
            raise ValueError(next(iter(refusals.values())))
        for request in requests:
            if request.prompt is None or request in refusals:
                finish(request, report, refusals.get(request, request.output.error))
        parts = segments(served, lambda prompt: cap.rows_of(prompt, row_bytes(prompt)))
        keep = frozenset({"processed_logprobs"} if options.return_logprobs else ())
        more = {
            "keep": keep,
            "batch_tokens": options.max_batch_tokens,
            "stats": stats,
            "share": options.allow_block_sharing,
        }
        for part, rows in parts:
            RequestQueue(model, part, rows, report, aborted, timestamps=record_timestamps, **more).run()
    results = BatchOutput({request.output.request_id: request.output for request in requests})
    results.tree_stats = stats.to_dict()
    return results


def refuse_manager(model, *args, **kwargs):
    """`init_continuous_batching` of an enabled model (`transformers serve` calls it)."""
    raise ValueError(
        "transformers' continuous batching manager has no paged cache for DeepSeek-V4's compressed layers; use "
        "`generate_batch(inputs, tree_config=...)` of the enabled model, or serve it with vLLM or SGLang."
    )


def _check(options: ContinuousBatchingConfig, kwargs: dict[str, Any], persistent_manager: bool) -> None:
    if persistent_manager:
        raise ValueError("`persistent_manager` is True, but there is no manager to keep; drop it.")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"`{name}` is not taken by `generate_batch`; use `generate`, or drop it.")
    for field in fields(ContinuousBatchingConfig):
        value, idle = getattr(options, field.name), (field.default, None, *_IDLE.get(field.name, ()))
        if field.name in _HONOURED or any(value is other or value == other for other in idle):
            continue
        raise ValueError(
            f"`continuous_batching_config.{field.name}` is {value!r}, which tree decoding does not honour; drop it. "
            f"Honoured are {_HONOURED}."
        )
    for name in ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch"):
        value = getattr(options, name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"`continuous_batching_config.{name}` is {value!r}; it must be a positive integer.")


def _requests(model, inputs, configs, tree_config, options) -> list[Request]:
    """One per text to be written; those that cannot be prepared have an error and no prompt."""
    requests, errors = [], []
    for number, (tokens, config) in enumerate(zip(inputs, configs)):
        chosen = tree_config if tree_config is not None else default_of(model, config)
        chosen = TreeConfig(budget=1) if chosen is None else chosen
        given = options if config is None else {**options, "generation_config": config}
        try:
            prompt = prepare(model, tokens, chosen, given)
        except ValueError as error:
            prompt = None
            errors.append(error)
        copies = 1 if prompt is None else prompt.config.num_return_sequences or 1
        names = [*(f"req_{number}__child#{child}" for child in range(copies - 1)), f"req_{number}"]
        ids = list(tokens) if isinstance(tokens, list | tuple) else []
        for name in names:
            output = GenerationOutput(name, prompt_ids=ids, error=str(errors[-1]) if prompt is None else None)
            requests.append(Request(prompt, output, key=id(config)))
    if len(errors) == len(inputs):
        raise errors[0]
    return requests


def _seed(requests: list[Request], seeds, ranks: Ranks | None, device: torch.device) -> bool:
    """Gives every request its seed; whether any of them draws tokens."""
    sampled = [request.prompt is not None and request.prompt.config.do_sample for request in requests]
    if not any(sampled):
        if seeds is not None:
            raise ValueError(f"`seeds` is `{seeds}`, but `do_sample` is False; set `do_sample=True` or drop `seeds`.")
        return False
    seeds = resolve_seeds(seeds, len(requests)).to(device)
    if ranks is not None:
        (seeds,) = ranks.agree(seeds)
    for request, seed in zip(requests, seeds.tolist()):
        request.seed = seed
    return True


def _cap(options: ContinuousBatchingConfig, drafting: Drafting, free: int) -> Cap:
    tokens = None if options.num_blocks is None else options.num_blocks * options.page_size
    rows = options.max_requests_per_batch or DEFAULT_ROWS
    if options.max_batch_tokens is not None:
        rows = max(1, min(rows, options.max_batch_tokens // drafting.tree_config.budget))
    return Cap(tokens, rows, free)
