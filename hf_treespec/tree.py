"""`TokenTree`: a batch of draft trees as flat tensors of static shape."""

import torch
from torch import Tensor


class TokenTree:
    """A batch of `B` trees of `N` nodes each, node 0 being the root, parents before children.

    A node is described by its *path*, the nodes from its tree's top to itself, so that depth, parent and ancestry are
    lookups. Rows with fewer nodes are filled with padding nodes: they carry the root's token and see only themselves.

    Args:
        tokens (`torch.LongTensor` of shape `[B, N]`): token of each node.
        paths (`torch.LongTensor` of shape `[B, N, S + 1]`, *optional*):
            `paths[b, n, d]` is the ancestor of node `n` at depth `d`, `n` itself at its own depth, -1 below it. `None`
            makes a chain (node `n` has depth `n`) without storing a table.
        valid (`torch.BoolTensor` of shape `[B, N]`): False for padding nodes.
    """

    def __init__(self, tokens: Tensor, paths: Tensor | None, valid: Tensor) -> None:
        self.tokens = tokens
        self._paths = paths
        self.valid = valid
        # Computed once, when asked for. (`cached_property` takes a lock in Python 3.11, which `torch.compile` refuses.)
        self._table = paths
        self._depths: Tensor | None = None

    @classmethod
    def chain(cls, tokens: Tensor, lengths: Tensor | None = None) -> "TokenTree":
        """A chain per row: `tokens` `[B, N]`, of which the first `lengths` `[B]` (all by default) are real."""
        if lengths is None:
            return cls(tokens, None, torch.ones_like(tokens, dtype=torch.bool))
        return cls(tokens, None, torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None])

    @classmethod
    def from_parents(cls, tokens: Tensor, parents: Tensor, max_depth: int, valid: Tensor | None = None) -> "TokenTree":
        """Trees from parent indices `[B, N]` (`parents[:, 0] == 0`, parents before children) of depth <= `max_depth`."""
        batch, count = tokens.shape
        nodes = torch.arange(count, device=tokens.device).expand(batch, count)
        parents = parents.clone()
        parents[:, 0] = 0
        # ancestors[i] is the i-th ancestor of every node; the root is its own parent, so it repeats at the end.
        ancestors = [nodes]
        for _ in range(max_depth):
            ancestors.append(parents.gather(1, ancestors[-1]))
        upward = torch.stack(ancestors, dim=-1)  # [B, N, S + 1]
        depths = (upward > 0).sum(-1, keepdim=True)
        distance = depths - torch.arange(max_depth + 1, device=tokens.device)
        paths = upward.gather(2, distance.clamp(min=0)).masked_fill(distance < 0, -1)
        if valid is None:
            valid = torch.ones_like(tokens, dtype=torch.bool)
        else:
            tokens = torch.where(valid, tokens, tokens[:, :1])
            paths = torch.where(valid[..., None], paths, _padding_paths(nodes, max_depth))
        return cls(tokens, paths, valid)

    @property
    def is_chain(self) -> bool:
        """Whether node `n` has depth `n` in every row, by construction."""
        return self._paths is None

    @property
    def max_depth(self) -> int:
        """The largest depth a node can have."""
        return (self.tokens.shape[1] if self.is_chain else self._paths.shape[2]) - 1

    @property
    def paths(self) -> Tensor:
        """`[B, N, S + 1]`. For a chain the table is built on demand: only small ones should ask."""
        if self._table is None:
            batch, count = self.tokens.shape
            nodes = torch.arange(count, device=self.tokens.device)
            table = nodes.expand(count, count).masked_fill(nodes > nodes[:, None], -1)
            padding = _padding_paths(nodes.expand(batch, count), count - 1)
            self._table = torch.where(self.valid[..., None], table, padding)
        return self._table

    @property
    def depths(self) -> Tensor:
        """Depth of each node, `[B, N]`; 1 for padding nodes of a tree, whose parent is the root."""
        if self._depths is None:
            depth = torch.arange(self.max_depth + 1, device=self.tokens.device)
            if self.is_chain:
                self._depths = depth.expand(self.tokens.shape)
            else:
                self._depths = depth.masked_fill(self._paths < 0, 0).amax(-1)
        return self._depths

    @property
    def parents(self) -> Tensor:
        """Parent of each node, `[B, N]`; the root is its own."""
        above = self.paths.gather(2, (self.depths - 1).clamp(min=0)[..., None])[..., 0]
        return torch.where(self.valid, above, 0).clamp(min=0)

    def node_at(self, nodes: Tensor, depths: Tensor) -> Tensor:
        """Ancestor at `depths` (any shape `[B, ...]`) of `nodes` (same shape); undefined below the node's own depth."""
        if self.is_chain:
            return depths
        batch = torch.arange(nodes.shape[0], device=nodes.device).view(-1, *[1] * (nodes.dim() - 1))
        return self._paths[batch, nodes, depths.clamp(0, self.max_depth)]

    def is_ancestor(self, ancestors: Tensor, start: int, stop: int) -> Tensor:
        """Whether `ancestors` `[B, A]` (-1: none) lie on the paths of nodes `start .. stop - 1`: `[B, stop - start, A]`."""
        if self.is_chain:
            nodes = torch.arange(start, stop, device=ancestors.device)
            return (ancestors[:, None] <= nodes[:, None]) & (ancestors[:, None] >= 0)
        known = ancestors.clamp(min=0)
        depths = self.depths.gather(1, known)[:, None].expand(-1, stop - start, -1)
        on_path = self._paths[:, start:stop].gather(2, depths) == ancestors[:, None]
        return on_path & (ancestors >= 0)[:, None]

    def ancestry(self, start: int, stop: int) -> Tensor:
        """`is_ancestor` of all nodes: which lie on the paths of nodes `start .. stop - 1`, `[B, stop - start, N]`."""
        batch, count = self.tokens.shape
        if self.is_chain:
            nodes = torch.arange(count, device=self.tokens.device)
            return (nodes <= nodes[start:stop, None]).expand(batch, -1, -1)
        # One column more, the first, takes what is below a node.
        places = self._paths[:, start:stop] + 1
        table = torch.zeros(batch, stop - start, count + 1, dtype=torch.bool, device=places.device)
        return table.scatter_(2, places, True)[..., 1:]

    def grow(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> "TokenTree":
        """This tree with one more level: `tokens`, `parents` (node numbers) and `valid` are `[B, M]`.

        Padding nodes of the new level carry and see what they would if they were real: nothing reads what comes of them.
        """
        batch, count = self.tokens.shape
        nodes = torch.arange(count, count + tokens.shape[1], device=tokens.device).expand_as(tokens)
        batch_index = torch.arange(batch, device=tokens.device)[:, None]
        above = torch.nn.functional.pad(self.paths, (0, 1), value=-1)
        depths = self.depths.gather(1, parents) + 1
        paths = above[batch_index, parents].scatter_(2, depths[..., None], nodes[..., None])
        grown = TokenTree(
            torch.cat([self.tokens, tokens], 1), torch.cat([above, paths], 1), torch.cat([self.valid, valid], 1)
        )
        # Known here; else they are searched for in the paths of all nodes.
        grown._depths = torch.cat([self.depths, depths], 1)
        return grown

    def padded(self, count: int, max_depth: int) -> "TokenTree":
        """This tree with padding nodes up to `count`, and paths as for depth `max_depth`: no smaller than they are."""
        batch, nodes = self.tokens.shape
        fill = torch.arange(nodes, count, device=self.tokens.device).expand(batch, -1)
        paths = torch.nn.functional.pad(self.paths, (0, max_depth - self.max_depth), value=-1)
        return TokenTree(
            torch.cat([self.tokens, self.tokens[:, :1].expand_as(fill)], 1),
            torch.cat([paths, _padding_paths(fill, max_depth)], 1),
            torch.nn.functional.pad(self.valid, (0, count - nodes)),
        )


def _padding_paths(nodes: Tensor, max_depth: int) -> Tensor:
    """Paths of padding nodes: at depth 1 (0 where there is no other), alone."""
    paths = nodes.new_full((*nodes.shape, max_depth + 1), -1)
    paths[..., min(1, max_depth)] = nodes
    return paths
