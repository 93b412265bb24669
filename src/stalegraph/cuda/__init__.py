"""The flashmla rung's silicon: FlashMLA's library, a device with the simulator's verbs, what CUDA graphs bake in."""

from stalegraph.cuda.device import CudaDevice
from stalegraph.cuda.graph import CudaGraph
from stalegraph.cuda.library import LibraryInfo, load_flashmla
from stalegraph.cuda.nodes import read_nodes

__all__ = ["CudaDevice", "CudaGraph", "LibraryInfo", "load_flashmla", "read_nodes"]
