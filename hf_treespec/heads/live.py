"""The head of a live model."""

import os
from typing import Any

from ..modeling import HEAD_ATTRIBUTE, execution_device, is_enabled, unwrap
from .alarm import AcceptanceAlarm
from .block import DraftHead
from .loader import WAY_OUT, load_head


class LiveHead:
    """What a live model drafts with. Not a submodule, so that nothing that walks or saves the model meets it. Copies
    and pickles of the model leave it out and load it again when they need it, unless it was passed.

    Attributes:
        source: the checkpoint that the user named, if another than the model's own.
        head: once it is loaded, or where the user passed one.
        key: what it was loaded for; `None` for one that was passed.
        alarm: watches what is accepted.
    """

    def __init__(self, source: str | None = None, head: DraftHead | None = None, key: tuple | None = None) -> None:
        self.source, self.head, self.key = source, head, key
        self.alarm = None if head is None else AcceptanceAlarm(source or (key[0] if key else ""), head.kind)

    def __reduce__(self):
        return LiveHead, (self.source, self.head if self.key is None else None)


def attach_head(model: Any, head: DraftHead | str | os.PathLike) -> None:
    """Makes a model draft with another head than that of its own checkpoint, until `disable`: for a fine-tuned model,
    say, that was saved without its head.

    Args:
        model: an enabled model.
        head: a checkpoint (local folder or Hub id) that ships a head, read when it is first needed, or a head itself.

    Raises:
        ValueError: if the model is not enabled, or `head` is neither, or does not fit.
    """
    model = unwrap(model)
    if not is_enabled(model):
        raise ValueError("The model is not enabled; call `hf_treespec.enable(model)` first.")
    if isinstance(head, DraftHead):
        for name in ("hidden_size", "vocab_size", "hc_mult", "sliding_window", "num_hidden_layers"):
            own, wanted = getattr(head.config, name), getattr(model.config, name)
            wanted += len(head.layers) if name == "num_hidden_layers" else 0
            if own != wanted:
                raise ValueError(f"The head does not fit the model: its `{name}` is {own} instead of {wanted}.")
        live = LiveHead(head=head)
    elif isinstance(head, (str, os.PathLike)):
        live = LiveHead(source=str(head))
    else:
        raise ValueError(
            f"`head` is {head!r}; it must be a checkpoint (local folder or Hub id) that ships a draft head, or a head "
            "that `load_head` returned."
        )
    model.__dict__[HEAD_ATTRIBUTE] = live


def head_of(model: Any, kind: str | None = None) -> DraftHead:
    """The head attached to an enabled model, else that of the checkpoint it came from; beside the model's last layer,
    and read once per model.

    Args:
        kind: `"mtp"` or `"dspark"`, if it has to be that.

    Raises:
        ValueError: if there is none, naming what to do instead.
    """
    model = unwrap(model)
    live = model.__dict__.get(HEAD_ATTRIBUTE) or LiveHead()
    device = execution_device(model.model.layers[-1].input_layernorm)
    if live.head is not None and live.key is None:
        if kind not in (None, live.head.kind):
            raise ValueError(f"`drafter={kind!r}`, but the head attached to the model is of kind {live.head.kind!r}.")
        return live.head.fit(model.dtype, device)
    path = live.source or model.config._name_or_path
    if not path:
        raise ValueError(f"No draft head: the model was not loaded from a checkpoint. {WAY_OUT}")
    # Of the trunk's own repository the revision that the trunk came from.
    revision = None if live.source else getattr(model.config, "_commit_hash", None)
    key = (path, model.dtype, device)
    if live.key != key or kind not in (None, live.head.kind):
        head = load_head(path, model.config, model.dtype, device, kind, revision)
        live = model.__dict__[HEAD_ATTRIBUTE] = LiveHead(live.source, head, key)
    return live.head


def count_acceptance(model: Any, rounds: int, accepted: int, depth: int) -> None:
    """Tells the alarm of the model's head how a call went; see [`AcceptanceAlarm.count`]."""
    live = unwrap(model).__dict__.get(HEAD_ATTRIBUTE)
    if live is not None and live.alarm is not None:
        live.alarm.count(rounds, accepted, depth)
