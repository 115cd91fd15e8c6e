"""What `generate(tree_config=...)` refuses, before any compute, by name and with the way out."""

from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as hf

from .cache import TreeCache
from .config import HEADS, MAX_DEPTH, TreeConfig, is_integer
from .modeling import device_of
from .ops import kernels_fit, resolve_backend


_LATER = "it is not supported together with `tree_config` yet; drop one of the two"
_GREEDY = "tree decoding follows one path per row; drop it, or drop `tree_config`"
_SECOND_PROMPT = "guidance runs the model on a second prompt; drop it, or drop `tree_config`"
_FORWARD = "a round computes drafts too; run the model's forward over the returned `sequences` instead"
_OWN_CACHE = "tree decoding brings its own `TreeCache`; drop it"
# Option -> (values that are allowed beside None, what to do about others).
REFUSED = {
    "num_beams": ((1,), _GREEDY),
    "penalty_alpha": ((), _GREEDY),
    "dola_layers": ((), _GREEDY),
    "guidance_scale": ((1, 1.0), _SECOND_PROMPT),
    "constraints": ((), _GREEDY),
    "force_words_ids": ((), _GREEDY),
    "use_cache": ((True,), "tree decoding needs its cache; drop it"),
    "cache_implementation": ((), _OWN_CACHE),
    "speculation_type": ((), _LATER),
    "assistant_early_exit": ((), _LATER),
    "token_healing": ((False,), _LATER),
    "output_attentions": ((False,), _FORWARD),
    "output_hidden_states": ((False,), _FORWARD),
    "negative_prompt_ids": ((), _SECOND_PROMPT),
    "synced_gpus": ((False, True), "it is a switch"),
    "custom_generate": ((), "tree decoding is a generation method of its own; drop it"),
    "inputs_embeds": ((), "trees are drafted from token ids; pass `input_ids`"),
    "position_ids": ((), "positions follow from `attention_mask`; drop it"),
    "assistant_tokenizer": ((), "the assistant must share the target's vocabulary; drop it"),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or _is_list(value) and all(isinstance(text, str) for text in value)


# What transformers takes as it comes and trips over later: option -> (what it must be, whether a value is that).
_KINDS = {
    "generation_config": ("a `GenerationConfig`", lambda value: isinstance(value, GenerationConfig)),
    **dict.fromkeys(("max_new_tokens", "max_length", "min_new_tokens", "min_length"), ("an integer", is_integer)),
    "max_time": ("a number of seconds", _is_number),
    "assistant_confidence_threshold": ("a number", _is_number),
    "use_mtp": ("True or False", lambda value: isinstance(value, bool)),
    "stop_strings": ("a string or a list of strings", _is_text),
    "tokenizer": ("the model's tokenizer", lambda value: hasattr(value, "get_vocab")),
    "streamer": ("a streamer, with `put` and `end`", lambda value: hasattr(value, "put") and hasattr(value, "end")),
    "logits_processor": ("a list of processors", _is_list),
    "stopping_criteria": ("a list of criteria", _is_list),
}


def check_kinds(arguments: dict[str, Any], model_config) -> None:
    """Raises a `ValueError` for the first option of a call that is not of its kind."""
    for name, (expected, fits) in _KINDS.items():
        value = option(name, arguments, arguments.get("generation_config"), model_config)
        if value is not None and not fits(value):
            raise ValueError(f"`{name}` is {value!r:.80}; it must be {expected}, or `None`.")


def option(name: str, arguments: dict[str, Any], *configs: Any) -> Any:
    """An option of this call: the argument, also where it is `None`, else the first generation config that sets it."""
    if name in arguments:
        return arguments[name]
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def check_options(model, arguments: dict[str, Any]) -> None:
    """Raises a `ValueError` for the first option of a call that tree decoding cannot honour."""
    configs = (arguments.get("generation_config"), model.generation_config)
    for name, (allowed, advice) in REFUSED.items():
        value = option(name, arguments, *configs)
        if value is not None and not any(value is other or value == other for other in allowed):
            expected = " or ".join(f"`{other}`" for other in (None, *allowed))
            raise ValueError(f"`{name}` is `{value}`, but with `tree_config` it must be {expected}: {advice}.")
    _check_outputs("model", model.config)
    cache = arguments.get("cache")
    if cache is not None and not isinstance(cache, TreeCache):
        raise ValueError(
            f"`cache` is a {type(cache).__name__}; tree decoding takes a `TreeCache` returned by an earlier call with "
            "`tree_config` and `return_dict_in_generate=True`, or none."
        )


# Others lack operations.
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_inputs(input_ids: Any, attention_mask: Any, vocab_size: int) -> None:
    """Raises a `ValueError` unless prompts are token ids `[B, P]` with left padding only and none is empty."""
    if input_ids is None:
        raise ValueError("`input_ids` is missing: tree decoding needs at least one prompt token per row.")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        shape = f"of shape {list(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"`input_ids` must be a tensor `[batch, tokens]`, not {shape}.")
    if input_ids.numel() == 0:
        raise ValueError(
            f"`input_ids` of shape {list(input_ids.shape)} holds an empty prompt; pass at least one token."
        )
    if input_ids.dtype not in _INTEGERS:
        raise ValueError(f"`input_ids` must hold token ids, not {input_ids.dtype}; pass `input_ids.long()`.")
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= vocab_size:
        raise ValueError(f"`input_ids` must lie between 0 and {vocab_size - 1}, the model's vocabulary.")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"`attention_mask` must be a tensor `[batch, tokens]`, not {type(attention_mask).__name__}.")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` {list(attention_mask.shape)} must match `input_ids` {list(input_ids.shape)}."
        )
    mask = attention_mask.bool()
    empty = (~mask.any(1)).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(f"Rows {empty} of `attention_mask` are all padding; every row needs at least one token.")
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError(
            "`attention_mask` has zeros behind a real token; prompts must be left-padded: set "
            "`tokenizer.padding_side = 'left'`. (Without a mask every pad token counts as padding: then pass one.)"
        )


def check_own_options(options: dict[str, Any]) -> None:
    """Raises for an option of ours in a call that decodes without trees."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(
                f"`{name}` is `{value}`, but without `tree_config` it does nothing; pass `tree_config` too."
            )


def check_own_prepared(seeds: Any, return_logprobs: Any, generation_config) -> None:
    """Raises for options of ours that the generation config of the call leaves nothing to do."""
    if seeds is not None and not generation_config.do_sample:
        raise ValueError(f"`seeds` is `{seeds}`, but `do_sample` is False; set `do_sample=True` or drop `seeds`.")
    if return_logprobs not in (None, False, True):
        raise ValueError(f"`return_logprobs` is `{return_logprobs}`; it must be True or False.")
    if return_logprobs and not generation_config.return_dict_in_generate:
        raise ValueError("`return_logprobs` is True, which needs `return_dict_in_generate=True` too.")


# Processors of transformers that need more than a text model's scores: another model's outputs or a second forward.
FOREIGN_PROCESSORS = {
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor: "runs the model on a second prompt",
    hf.ClassifierFreeGuidanceLogitsProcessor: "needs a batch with a second prompt per row",
    hf.DiaClassifierFreeGuidanceLogitsProcessor: "needs a batch with a second prompt per row",
    hf.DiaEOSChannelFilterLogitsProcessor: "is made for audio codebooks",
    hf.DiaEOSDelayPatternLogitsProcessor: "is made for audio codebooks",
    hf.WhisperTimeStampLogitsProcessor: "is made for speech recognition",
    hf.WhisperNoSpeechDetection: "is made for speech recognition",
}


# What transformers itself hands to a decoding method; everything else is a model's own argument.
_KNOWN_INPUTS = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep"}


def check_prepared(logits_processor, model_kwargs: dict[str, Any]) -> None:
    """Raises for processors of other models, and for arguments of the model's forward that are not passed on."""
    extra = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _KNOWN_INPUTS)
    if extra:
        raise ValueError(f"Model arguments {extra} are not passed on by tree decoding; drop them, or `tree_config`.")
    for processor in logits_processor:
        if type(processor) in FOREIGN_PROCESSORS:
            reason = FOREIGN_PROCESSORS[type(processor)]
            name = type(processor).__name__
            raise ValueError(f"`{name}` in `logits_processor` {reason}; drop it, or `tree_config`.")


# Drafters that take no assistant -> what they draft with.
_OWN_DRAFTS = {**dict.fromkeys(HEADS, "with the checkpoint's own head"), "ngram": "from prompt and output alone"}


def prompt_lookup(tree_config: TreeConfig, arguments: dict[str, Any], *configs: Any) -> tuple[TreeConfig, int]:
    """Where `prompt_lookup_num_tokens` is set: `tree_config` with `drafter="ngram"` and, if it has none, that depth.

    Args:
        arguments, configs: the call's, in which `prompt_lookup_num_tokens`, `assistant_model` and
            `max_matching_ngram_size` are looked up.

    Returns:
        The config, and `max_matching_ngram_size` (2 by default, as in transformers).

    Raises:
        ValueError: for a value outside its range, or together with another drafter.
    """
    tokens = option("prompt_lookup_num_tokens", arguments, *configs)
    size = option("max_matching_ngram_size", arguments, *configs)
    for name, value in (("prompt_lookup_num_tokens", tokens), ("max_matching_ngram_size", size)):
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_DEPTH):
            raise ValueError(f"`{name}` is {value!r}; it must be an integer from 1 to {MAX_DEPTH}, or `None`.")
    if tokens is not None:
        foreign = tree_config.drafter not in ("auto", "ngram")
        if foreign or arguments.get("assistant_model") is not None:
            other = f"`drafter={tree_config.drafter!r}`" if foreign else "`assistant_model`"
            raise ValueError(
                f"`prompt_lookup_num_tokens` is {tokens} beside {other}, but only one can draft; drop one."
            )
        depth = tree_config.depth
        if depth is None and tree_config.budget > 1:
            depth = tokens
        tree_config = TreeConfig.from_dict({**tree_config.to_dict(), "drafter": "ngram", "depth": depth})
    if (
        arguments.get("max_matching_ngram_size") is not None
        and tree_config.drafter != "ngram"
        and tree_config.budget > 1
    ):
        raise ValueError(
            f"`max_matching_ngram_size` is {size}, but only prompt lookup matches n-grams: set `drafter='ngram'` or "
            "`prompt_lookup_num_tokens`, or drop it."
        )
    return tree_config, 2 if size is None else size


def mtp_wanted(tree_config: TreeConfig, arguments: dict[str, Any], *configs: Any) -> TreeConfig:
    """Where `use_mtp` is set: `tree_config` with `drafter="mtp"`.

    Raises:
        ValueError: together with another drafter.
    """
    if not option("use_mtp", arguments, *configs):
        return tree_config
    if tree_config.drafter not in ("auto", "mtp") or arguments.get("assistant_model") is not None:
        other = "`assistant_model`" if tree_config.drafter in ("auto", "mtp") else f"`drafter={tree_config.drafter!r}`"
        if option("prompt_lookup_num_tokens", arguments, *configs) is not None:
            other = "`prompt_lookup_num_tokens`"
        raise ValueError(f"`use_mtp` is True beside {other}, but only one can draft; drop one.")
    return TreeConfig.from_dict({**tree_config.to_dict(), "drafter": "mtp"})


def check_assistant(model, assistant_model, tree_config: TreeConfig) -> None:
    """Raises unless the backend and the assistant that the config needs are there and fit the target."""
    resolve_backend(tree_config.backend, device_of(model))
    if tree_config.backend == "triton" and not kernels_fit(model.config):
        raise ValueError(
            f"`backend='triton'` needs a `head_dim` ({model.config.head_dim}), `index_head_dim` "
            f"({model.config.index_head_dim}) and `hc_mult` ({model.config.hc_mult}) that are powers of two, the first "
            "two at least 16; use `'auto'` or `'torch'`."
        )
    if tree_config.budget == 1 and (tree_config.drafter == "auto" or assistant_model is None):
        return
    if tree_config.drafter in _OWN_DRAFTS and assistant_model is not None:
        raise ValueError(
            f"`drafter={tree_config.drafter!r}` drafts {_OWN_DRAFTS[tree_config.drafter]}; drop `assistant_model=`, or "
            "use another `drafter`."
        )
    if assistant_model is None and tree_config.drafter != "assistant":
        return
    if assistant_model is None:
        raise ValueError(
            f"`tree_config` has `budget={tree_config.budget}` and `drafter={tree_config.drafter!r}`, but there is "
            "nothing to draft with. Pass `assistant_model=`, or set `drafter='ngram'`, or `budget=1` for plain decoding."
        )
    config = getattr(assistant_model, "config", None)
    if config is None or not hasattr(assistant_model, "generate"):
        raise ValueError(f"`assistant_model` must be a causal language model, not {type(assistant_model).__name__}.")
    _check_outputs("assistant_model", config)
    if config.is_encoder_decoder:
        raise ValueError(f"`assistant_model` ({type(assistant_model).__name__}) is an encoder-decoder model.")
    sizes = (config.get_text_config().vocab_size, model.config.get_text_config().vocab_size)
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"`assistant_model` has a vocabulary of {sizes[0]} tokens, the target one of {sizes[1]}; tree decoding "
            "needs the same vocabulary. Use another assistant, or `budget=1`."
        )
    embedding = assistant_model.get_input_embeddings()
    if embedding is None or embedding.weight.device == torch.device("meta") and not hasattr(embedding, "_hf_hook"):
        raise ValueError("`assistant_model` has no weights (meta device); load it before drafting with it.")


def _check_outputs(name: str, config) -> None:
    """Raises unless a model returns what we read, by name."""
    for key, needed in (("output_router_logits", False), ("return_dict", True)):
        if bool(getattr(config, key, needed)) is not needed:
            raise ValueError(f"`{name}.config.{key}` is {not needed}; tree decoding needs it {needed}.")


def check_positions(assistant_model, max_length: int) -> None:
    """Raises if the text may outgrow an assistant's table of positions."""
    for name, module in [] if assistant_model is None else assistant_model.named_modules():
        if isinstance(module, torch.nn.Embedding) and name.split(".")[-1] in ("wpe", "embed_positions"):
            size = module.num_embeddings - getattr(module, "offset", 0)
            if max_length > size:
                raise ValueError(
                    f"`assistant_model` knows {size} positions, but the text may grow to {max_length} tokens: set "
                    f"`max_length` to at most {size}, or use an assistant with rotary embeddings."
                )
