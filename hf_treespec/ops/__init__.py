"""The operations of a round: functions of tensors and a `TreeGeometry`, in plain torch and as Triton kernels."""

from .accept import accept
from .backend import kernel, resolve_backend
from .compress import compress
from .geometry import TreeGeometry
from .index_topk import index_topk
from .refresh import scatter_path
from .rotary import rotate_
from .tree_attention import tree_attention


__all__ = [
    "TreeGeometry",
    "accept",
    "compress",
    "index_topk",
    "kernel",
    "resolve_backend",
    "rotate_",
    "scatter_path",
    "tree_attention",
]
