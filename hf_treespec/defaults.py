"""A model's own `tree_config`, kept in its generation config, so that `pipeline` and others need not pass one."""

import logging
from typing import Any

from torch import nn

from .config import TreeConfig
from .modeling import is_enabled, unwrap


logger = logging.getLogger(__name__)


def set_default(model: nn.Module, tree_config: TreeConfig | dict[str, Any] | None) -> nn.Module:
    """Makes `tree_config` the default of an enabled model's `generate`; `None`, or `disable`, takes it back.

    It is saved with the model, in `generation_config.json`, and works again once the loaded model is enabled. A
    `tree_config` in the call, or in the `generation_config` passed to it, comes first.

    Args:
        model: a causal language model of transformers, also wrapped in a `PeftModel`.
        tree_config: the default.

    Returns:
        The model passed in.

    Raises:
        ValueError: for a model without a generation config, or an invalid `tree_config`.
    """
    generation_config = getattr(unwrap(model), "generation_config", None)
    if generation_config is None:
        raise ValueError(f"{type(model).__name__} has no `generation_config` that could keep a default.")
    if tree_config is None:
        generation_config.__dict__.pop("tree_config", None)
        return model
    # A plain dict is saved as it is; and a config that was derived from the model's would not be saved at all.
    generation_config.tree_config = TreeConfig.checked(tree_config).to_dict()
    generation_config._from_model_config = False
    if not is_enabled(model):
        logger.warning(
            "The model is not enabled: until `hf_treespec.enable(model)`, its `generate` is stock, and passes over any "
            "`tree_config`."
        )
    return model


def default_of(model, generation_config) -> dict[str, Any] | None:
    """The `tree_config` of a call that passes none: that of its generation config, else the model's."""
    configs = (generation_config, model.generation_config)
    return next((value for config in configs if (value := getattr(config, "tree_config", None)) is not None), None)
