"""CUDA graphs that replay stale addresses in LLM decode: see the bug, reproduce it, fix it, find the next one."""

__version__ = "0.1.0"
