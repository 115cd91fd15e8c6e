"""The operations of a round: functions of tensors and a `TreeGeometry`, in plain torch and as Triton kernels."""

from .accept import accept
from .backend import kernel, kernels_fit, resolve_backend
from .compress import compress
from .fixed import FixedGeometry
from .geometry import TreeGeometry
from .hyper_connection import hyper_connection, mix_streams
from .index_topk import index_topk
from .refresh import scatter_path
from .rotary import rotate_, unit_angle
from .tree_attention import tree_attention


__all__ = [
    "FixedGeometry",
    "TreeGeometry",
    "accept",
    "compress",
    "hyper_connection",
    "index_topk",
    "kernel",
    "kernels_fit",
    "mix_streams",
    "resolve_backend",
    "rotate_",
    "scatter_path",
    "tree_attention",
    "unit_angle",
]
