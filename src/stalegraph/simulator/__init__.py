"""A GPU on the CPU: memory with true addresses, PyTorch's caching allocator, graphs that replay raw addresses."""

from stalegraph.simulator.allocator import CachingAllocator
from stalegraph.simulator.device import AllocationEvent, Counters, Device, current_device
from stalegraph.simulator.graph import CUDAGraph, StaleRead
from stalegraph.simulator.memory import Memory

__all__ = [
    "Device", "CUDAGraph", "Memory", "CachingAllocator", "Counters", "AllocationEvent", "StaleRead", "current_device",
]  # fmt: skip
