"""`enable` and `disable`: class swap of the inner modules of a live DeepSeek-V4 model."""

import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator

import torch
import transformers
from packaging.version import Version
from torch import nn

from .attention import SWAPPED


logger = logging.getLogger(__name__)

MINIMUM_TRANSFORMERS = "5.24.0"
# Where a live model keeps the draft head of its checkpoint (not a submodule).
HEAD_ATTRIBUTE = "_treespec_head"
_STOCK = {tree: stock for stock, tree in SWAPPED.items()}
_CALLS = {
    "DeepseekV4Attention": ("hidden_states", "position_embeddings", "position_ids", "attention_mask", "cache"),
    "DeepseekV4HCACompressor": ("hidden_states", "q_residual", "position_ids", "cache", "layer_idx"),
    "DeepseekV4CSACompressor": ("hidden_states", "q_residual", "position_ids", "cache", "layer_idx"),
    "DeepseekV4Indexer": ("hidden_states", "q_residual", "position_ids", "cache", "layer_idx"),
    "DeepseekV4HyperConnection": ("hidden_streams",),
    "DeepseekV4DecoderLayer": ("hidden_states", "input_ids"),
    "DeepseekV4SparseMoeBlock": ("hidden_states", "input_ids"),
    "DeepseekV4Experts": ("hidden_states", "top_k_index", "top_k_weights"),
}


def enable(model: nn.Module) -> nn.Module:
    """Gives a DeepSeek-V4 model a `generate` that accepts `tree_config`. Weights are untouched, nothing else changes:
    without `tree_config` the model computes bit for bit what it did before.

    Args:
        model: a `DeepseekV4ForCausalLM`, also wrapped in a `PeftModel` or dispatched by accelerate.

    Returns:
        The model passed in.

    Raises:
        ValueError: for another architecture, an untested transformers version, or a module whose forward was replaced
            by something unknown.
    """
    inner = unwrap(model)
    _check_model(inner)
    _check_versions()
    bound = _bound()
    for name, function in bound.items():
        own = inner.__dict__.get(name)
        if own is not None and getattr(own, "func", None) is not function:
            raise ValueError(f"The model has a `{name}` of its own ({own!r}); delete that attribute before `enable`.")
    for module in inner.modules():
        if isinstance(module, tuple(SWAPPED)) and type(module) not in SWAPPED and type(module) not in _STOCK:
            raise ValueError(
                f"{type(module).__qualname__} subclasses a DeepSeek-V4 module; only stock ones are swapped."
            )
    _swap([(module, SWAPPED[type(module)]) for module in _swappable(inner) if type(module) in SWAPPED])
    for name, function in bound.items():
        # A partial, not a bound method: it pickles and deep-copies with the model it belongs to.
        setattr(inner, name, functools.partial(function, inner))
    for module in inner.modules():
        if type(module) in _STOCK and _effective_forward(module) is not type(module).forward:
            raise RuntimeError(f"{type(module).__qualname__} is swapped, but its forward is not ours.")
    return model


def disable(model: nn.Module) -> nn.Module:
    """Takes back what `enable` and `set_default` did and returns the model."""
    inner = unwrap(model)
    restore(inner)
    # Stock `generate` would drop it without a word, and with it a `tree_config` in the call.
    if getattr(inner, "generation_config", None) is not None:
        inner.generation_config.__dict__.pop("tree_config", None)
    return model


def restore(inner: nn.Module) -> None:
    """Gives an unwrapped model its stock classes and methods back."""
    _swap([(module, _STOCK[type(module)]) for module in inner.modules() if type(module) in _STOCK])
    for name, function in _bound().items():
        if getattr(inner.__dict__.get(name), "func", None) is function:
            delattr(inner, name)
    inner.__dict__.pop(HEAD_ATTRIBUTE, None)


def _bound() -> dict[str, Callable]:
    """What `enable` binds to a model, by attribute."""
    from .batching import generate_batch, refuse_manager
    from .generation import generate

    return {"generate": generate, "generate_batch": generate_batch, "init_continuous_batching": refuse_manager}


def is_enabled(model: nn.Module) -> bool:
    """Whether every module that `enable` swaps is swapped."""
    modules = list(_swappable(unwrap(model)))
    return bool(modules) and all(type(module) in _STOCK for module in modules)


def _swappable(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that `enable` swaps. Experts that transformers spreads over processes have a forward of its own, which
    sends tokens around; they stay stock."""
    for module in model.modules():
        spread = getattr(module.__dict__.get("forward"), "__module__", "").startswith("transformers.distributed.")
        if isinstance(module, tuple(SWAPPED)) and not spread:
            yield module


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside a `PeftModel`; any other model is returned as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") and hasattr(model, "peft_config") else model


def check_model_type(model_type: str | None, caller: str, is_encoder_decoder: bool = False) -> None:
    """Raises a `ValueError` for a config's `model_type` that is not DeepSeek-V4's."""
    if model_type == "deepseek_v4":
        return
    reason = f"`model_type` is {model_type!r}"
    if is_encoder_decoder:
        reason += " (an encoder-decoder model)"
    if model_type == "deepseek_v41":
        reason += ", whose compression differs from DeepSeek-V4's"
    raise ValueError(f"{caller} supports `DeepseekV4ForCausalLM` models ('deepseek_v4') only; {reason}.")


def _check_model(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    check_model_type(getattr(config, "model_type", None), "`hf_treespec.enable`", encoder_decoder)
    for kind, rope in config.rope_parameters.items():
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(
                f"`rope_parameters['{kind}']` is of type '{rope['rope_type']}', whose frequencies depend on the length of "
                "a forward, so that drafts would change them; use 'default', 'linear', 'yarn' or 'llama3'."
            )
    if config.head_dim % 2 or config.index_head_dim % 2:
        raise ValueError(f"`head_dim` {config.head_dim} and `index_head_dim` {config.index_head_dim} must be even.")
    if not isinstance(model, transformers.DeepseekV4ForCausalLM):
        raise ValueError(
            f"`hf_treespec.enable` needs a `DeepseekV4ForCausalLM`, not {type(model).__name__}: "
            "load the checkpoint with `AutoModelForCausalLM`."
        )


def _check_versions() -> None:
    if Version(transformers.__version__).release < Version(MINIMUM_TRANSFORMERS).release:
        raise ValueError(
            f"transformers {transformers.__version__} is too old; `pip install 'transformers>={MINIMUM_TRANSFORMERS}'`."
        )
    for stock in SWAPPED:
        found = tuple(inspect.signature(stock.forward).parameters)[1:]
        expected = _CALLS[stock.__name__]
        if found[: len(expected)] != expected:
            raise ValueError(
                f"transformers {transformers.__version__} changed `{stock.__name__}.forward` to {found}; "
                f"hf_treespec needs {expected}. Install a tested version: `pip install 'transformers==5.24.*'`."
            )


def _swap(swaps: list[tuple[nn.Module, type]]) -> None:
    for module, _ in swaps:
        _check_forward(module)
    for module, target in swaps:
        module.__class__ = target
        # accelerate keeps the forward of the class it met: in `_old_forward` under a hook, in the instance after one.
        if "_old_forward" in module.__dict__:
            module._old_forward = types.MethodType(target.forward, module)
        elif "forward" in module.__dict__:
            del module.forward


def _check_forward(module: nn.Module) -> None:
    """Raises for a forward that someone else put into the instance."""
    forward = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
    if forward is not None and getattr(forward, "__func__", None) not in _known_forwards(module):
        raise ValueError(
            f"The `forward` of a {type(module).__name__} was replaced by {forward!r}, which `hf_treespec` does not "
            "know. Undo that patch before `enable` or `disable`."
        )


def _known_forwards(module: nn.Module) -> set:
    return {cls.forward for pair in SWAPPED.items() for cls in pair if isinstance(module, pair[0])}


def _effective_forward(module: nn.Module):
    forward = module.__dict__.get("_old_forward", module.forward)
    return getattr(forward, "__func__", forward)


def device_of(model: nn.Module) -> torch.device:
    """Where the model expects `input_ids`: the embedding's execution device under accelerate hooks."""
    return execution_device(unwrap(model).get_input_embeddings())


def execution_device(module: nn.Module) -> torch.device:
    """Where a module with a `weight` runs: its own device, or the one that accelerate's hook brings it to."""
    execution = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return module.weight.device if execution is None else torch.device(execution)
