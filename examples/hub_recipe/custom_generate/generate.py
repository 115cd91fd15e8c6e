"""Tree speculative decoding for DeepSeek-V4 as a `custom_generate` recipe; the README beside this folder says how."""

import hf_treespec


def generate(model, tree_config=None, **kwargs):
    """`model.generate(..., custom_generate=REPOSITORY, trust_remote_code=True)`.

    Args:
        model: a `DeepseekV4ForCausalLM`. It stays enabled: without `tree_config` its `generate` is what it was.
        tree_config (`dict` or `hf_treespec.TreeConfig`, *optional*): by default the model's own, else `TreeConfig()`.
        kwargs: of `generate`.
    """
    hf_treespec.enable(model)
    # What the caller left out comes as `None`.
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if tree_config is None:
        tree_config = getattr(model.generation_config, "tree_config", None) or hf_treespec.TreeConfig()
    return model.generate(**kwargs, tree_config=tree_config)
