"""Our own scheduling kernel: FlashMLA's schedule in one launch, written into the caller's buffers."""

from stalegraph.kernels.compiler import cache_folder
from stalegraph.kernels.launch import MAX_PARTS, ensure_compiled, schedule_into

__all__ = ["ensure_compiled", "schedule_into", "cache_folder", "MAX_PARTS"]
