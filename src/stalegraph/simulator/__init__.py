"""A GPU on the CPU: memory with true addresses, PyTorch's caching allocator, graphs that replay raw addresses."""

from stalegraph.simulator.device import Device, current_device
from stalegraph.simulator.graph import CUDAGraph
from stalegraph.simulator.allocator import CachingAllocator
from stalegraph.simulator.memory import Memory
from stalegraph.simulator.events import AllocationEvent, Counters, StaleRead

__all__ = [
    "Device", "current_device", "CUDAGraph", "CachingAllocator", "Memory", "AllocationEvent", "Counters", "StaleRead",
]  # fmt: skip
