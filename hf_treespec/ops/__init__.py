"""The operations of a round. Each is a function of tensors and a `TreeGeometry`, in plain torch."""

from .accept import accept
from .compress import compress
from .geometry import TreeGeometry
from .index_topk import index_topk
from .refresh import scatter_path
from .rotary import rotate_
from .tree_attention import tree_attention


__all__ = ["TreeGeometry", "accept", "compress", "index_topk", "rotate_", "scatter_path", "tree_attention"]
