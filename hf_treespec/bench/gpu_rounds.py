"""The full round of `gpu_check`: verify, accept and commit, eagerly and replayed as a CUDA graph, beside stock's step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..cache import TreeCache
from ..config import TreeConfig
from ..prefill import prefill
from ..rounds import Rounds
from ..selection import TokenSelector
from ..texts import Texts
from ..tree import TokenTree
from ..verifying import Verifier
from .launches import flash_shaped


def flash_layers(layers: int = 4, experts: int = 32):
    """Random layers of DeepSeek-V4-Flash's widths in bf16 on the GPU, with fewer of them and fewer experts each."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(num_hidden_layers=layers, n_routed_experts=experts, vocab_size=1024, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return DeepseekV4ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


class FullRound:
    """Verifies, accepts and commits the same tree again and again: the lengths never move on.

    Args:
        model: enabled.
        tokens: committed, `[B, P]`.
        tree: of `B` rows.
        cuda_graphs: as in `TreeConfig`.
    """

    def __init__(self, model, tokens: torch.Tensor, tree: TokenTree, cuda_graphs: bool | str) -> None:
        batch, length = tokens.shape
        self.cache = TreeCache(model.config, batch, device=tokens.device, backend="torch")
        with torch.no_grad():
            prefill(model, self.cache, tokens, torch.full((batch,), length, device=tokens.device))
        self.cache.backend = "triton"
        config = TreeConfig(budget=tree.tokens.shape[1], backend="triton", cuda_graphs=cuda_graphs)
        self.tree, self.remaining = tree, torch.full_like(tree.tokens[:, 0], tree.tokens.shape[1])
        texts = Texts(tokens, torch.zeros_like(self.remaining), tree.tokens.shape[1])
        self.verifier = Verifier(TokenSelector(texts))
        self.rounds = Rounds(model, self.cache, config, tree.max_depth, length)

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        """Logits `[B, N, V]`."""
        with self.rounds.fork(self.tree, None) as fork:
            logits = self.rounds.forward(fork)
            verdict = self.rounds.judge(self.verifier, logits, fork, self.remaining)
            # What is committed does not count: the lengths are thrown away.
            fork.commit(verdict.path, verdict.accepted)
        return logits


@contextmanager
def stock_step(model, tokens: torch.Tensor) -> Iterator:
    """A decoding step of the model, not enabled, behind `tokens`; its cache grows by a token per step."""
    with torch.no_grad():
        cache = model(tokens, use_cache=True, logits_to_keep=1).cache
        length = tokens.shape[1]

        def step() -> None:
            nonlocal length
            positions = torch.full((len(tokens), 1), length, device=tokens.device)
            model(tokens[:, :1], cache=cache, use_cache=True, position_ids=positions)
            length += 1

        yield step


def full_rounds(device: str, small: bool, milliseconds, binary_trees, repeats: int) -> tuple[list[dict], list[dict]]:
    """Rows of milliseconds per round, and checks that replays compute what eager rounds do.

    Args:
        milliseconds: times a function, given the device and a number of repeats.
        binary_trees: makes `batch` trees of `nodes` nodes.
    """
    import hf_treespec

    model = flash_shaped(layers=1) if small else flash_layers()
    cases = [(1, 5, 2)] if small else [(b, 1024, n) for b in (1, 8) for n in (1, 8, 64)]
    vocabulary = model.config.vocab_size
    rows, checks, stock = [], [], {}
    for batch, length in dict.fromkeys((b, length) for b, length, _ in cases):
        tokens = torch.arange(batch * length, device=device).view(batch, length) * 7 % (vocabulary - 1) + 1
        with stock_step(model, tokens) as step:
            stock[batch, length] = tokens, milliseconds(step, device, repeats)
    hf_treespec.enable(model)
    for batch, length, nodes in cases:
        tokens, stock_time = stock[batch, length]
        tree = binary_trees(batch, nodes)
        tree = TokenTree(tree.tokens.to(device), tree.paths.to(device), tree.valid.to(device))
        row = {"batch": batch, "context": length, "nodes": nodes, "stock, 1 token": stock_time}
        rounds = {"eager": FullRound(model, tokens, tree, False), "graph": FullRound(model, tokens, tree, "auto")}
        for name, run in rounds.items():
            row[name] = milliseconds(run, device, repeats)
        eager, replayed = rounds["eager"](), rounds["graph"]()
        graphs = rounds["graph"].rounds.graphs
        if graphs is None:
            # Nothing was captured here: what was timed is the eager round.
            row["graph"] = float("nan")
        else:
            states = [
                [tensor for layer in run.cache.layers for *_, tensor in layer.tensors()] for run in rounds.values()
            ]
            compared = {"verify": [(eager, replayed)], "commit": zip(*states, strict=True)}
            for name, pairs in compared.items():
                error = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
                checks.append(
                    {
                        "kernel": f"{name} as a graph, batch {batch}, nodes {nodes}",
                        "dtype": str(model.dtype)[6:],
                        "error": error,
                        "passed": not graphs.failed and error <= 2**-6,
                    }
                )
        rows.append(row)
    return rows, checks
