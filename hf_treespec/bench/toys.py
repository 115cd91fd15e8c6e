"""Toy checkpoints that are hard on budgets, for `hf-treespec profile` and `hf-treespec bench`.

    python -m hf_treespec.bench.toys FOLDER

All are random, with the vocabulary and the tokenizer of the shipped target. `experts` is a target whose time is that of
reading experts, so that every further node costs; `experts-draft` has its embeddings and output layer, and so guesses some of
its tokens; `random-draft` is a draft of the shipped size for the shipped target, which takes none of its drafts.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..demo import checkpoint
from .experts import expert_model


# With so many times the usual embeddings a random target's tokens hang on the last one enough for a draft to guess four in
# ten of them; with the usual ones it guesses none.
_EMBEDDINGS = 10.0


def expert_pair(experts: int, layers: int, vocab_size: int):
    """An expert-dominated target, and a draft of one layer and few experts between its embeddings and its output layer."""
    target, draft = expert_model(experts, layers, vocab_size), expert_model(8, 1, vocab_size)
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(_EMBEDDINGS)
    for part in ("model.embed_tokens", "model.norm", "model.hc_head", "lm_head"):
        draft.get_submodule(part).load_state_dict(target.get_submodule(part).state_dict())
    return target, draft


def main(
    folder: Annotated[Path, typer.Argument(help="Gets a folder for each of them.")],
    experts: Annotated[int, typer.Option(min=8, help="Per layer; 6 MiB per token and layer are read.")] = 256,
    layers: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Writes the checkpoints."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("tiny-target"))
    target, draft = expert_pair(experts, layers, len(tokenizer))
    torch.manual_seed(0)
    random = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint("tiny-draft")))
    for name, model in {"experts": target, "experts-draft": draft, "random-draft": random}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        typer.echo(
            f"{folder / name}: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:,.1f}M parameters"
        )


if __name__ == "__main__":
    typer.run(main)
