"""Triton kernels of the operations of `hf_treespec.ops`: same names, same signatures, one file per operation.

They are batch-invariant: what a node gets is summed in an order that its own position and path decide, never the tree
around it, the batch or the chunk. They run on CUDA devices, and anywhere in Triton's interpreter (`TRITON_INTERPRET=1`).
"""

from .accept import accept
from .compress import compress
from .hyper_connection import hyper_connection, mix_streams
from .index_topk import index_topk
from .refresh import scatter_paths
from .tree_attention import tree_attention


__all__ = [
    "accept",
    "compress",
    "hyper_connection",
    "index_topk",
    "mix_streams",
    "scatter_paths",
    "tree_attention",
]
