"""`hf-treespec profile`: measures what rounds of a model and its drafter cost on this machine, by decoding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..cache import TreeCache
from ..config import TreeConfig
from ..modeling import device_of, unwrap
from ..prefill import prefill
from ..tree import TokenTree
from .costs import CostTable, VerifyPoint
from .fit import describe
from .measuring import Measurement, profiled, shapes


# New tokens per call: texts must not grow far beyond the context that they stand for.
_NEW_TOKENS = 96


def profile(
    model,
    tree_config: TreeConfig,
    key: dict[str, Any],
    assistant_model=None,
    batches: Sequence[int] = (1, 2, 4, 8),
    contexts: Sequence[int] = (256, 2048),
    repeats: int = 25,
    progress: Callable[[int], None] = lambda rounds: None,
) -> CostTable:
    """Decodes random prompts with rounds of every shape in turn, and takes medians over the turns.

    Seconds of verification are those of a whole round but its draft: acceptance, commit and the host's work are in.

    Args:
        model: an enabled model.
        tree_config: budget, depth and `top_k` up to which shapes are measured, and the drafter.
        key: of the table, see [`table_key`].
        assistant_model: what drafts, unless the model's head or prompt lookup does.
        batches, contexts: numbers of rows, one per octave, and lengths of their prompts.
        repeats: rounds per shape.
        progress: called with the number of rounds done since the last call.
    """
    measurement = Measurement(repeats, every_size=True)
    config = replace(tree_config, controller="cost", fallback=False, record_rounds=False)
    generator = torch.Generator().manual_seed(0)
    for context in contexts:
        for batch in sorted(batches):
            measurement.at(batch, context)
            prompts = torch.randint(model.config.vocab_size, (batch, context), generator=generator)
            prompts = prompts.to(device_of(model))
            inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
            with profiled(unwrap(model), measurement):
                _measure(model, inputs, config, assistant_model, measurement, (batch, context), progress)
    table = measurement.table(key)
    points = [_with_features(model, point) for point in table.verify_points]
    return replace(table, verify_points=points, fit=describe(points))


def rounds_to_time(tree_config: TreeConfig, repeats: int) -> int:
    """Rounds that `profile` times per batch and context, where nothing lowers the depth."""
    return repeats * len(shapes(tree_config.budget, tree_config.resolved_depth, every_size=True))


def _measure(model, inputs, config, assistant_model, measurement, place, progress) -> None:
    while not measurement.complete(place):
        before = measurement.rounds[place]
        model.generate(
            **inputs,
            tree_config=config,
            assistant_model=assistant_model,
            max_new_tokens=_NEW_TOKENS,
            do_sample=False,
            # No token has this number: texts do not end.
            eos_token_id=model.config.vocab_size,
            pad_token_id=0,
        )
        progress(measurement.rounds[place] - before)
        if measurement.rounds[place] == before:
            raise ValueError("The drafter proposes nothing on random prompts; profile it with another `drafter`.")


@torch.no_grad()
def _with_features(model, point: VerifyPoint) -> VerifyPoint:
    """What the fit of [`fit_costs`] needs to know of a point, counted on random tokens."""
    model = unwrap(model)
    generator = torch.Generator().manual_seed(point.nodes)
    tokens = torch.randint(model.config.vocab_size, (point.batch, 8 + point.nodes), generator=generator)
    tokens = tokens.to(device_of(model))
    cache, counts = TreeCache(model.config, point.batch, device=tokens.device), []
    prefill(model, cache, tokens[:, :8], torch.full((point.batch,), 8, device=tokens.device))
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    hooks = [
        router.register_forward_hook(lambda _, args, output: counts.append(output[2].unique().numel()))
        for router in routers
    ]
    try:
        with cache.fork(TokenTree.chain(tokens[:, 8:])) as fork:
            model(**fork.model_inputs())
    finally:
        for hook in hooks:
            hook.remove()
    return replace(point, experts=float(sum(counts)), context_bytes=context_bytes(model, point.batch, point.context))


def context_bytes(model, batch: int, context: int) -> float:
    """Bytes of committed state that a step of one node per row reads: window, selected entries, index keys."""
    config, total = model.config, 0
    for kind in config.layer_types:
        total += min(context, config.sliding_window) * config.head_dim
        if kind == "sliding_attention":
            continue
        entries = context // config.compress_rates[kind]
        if kind == "compressed_sparse_attention":
            total += entries * config.index_head_dim
            entries = min(entries, config.index_topk)
        total += entries * config.head_dim
    return float(batch * total * model.dtype.itemsize)
