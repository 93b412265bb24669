"""Shared by all tests: GPU tests say why they are skipped, or fail where a GPU is required."""

import os

import pytest
import torch

torch.set_num_threads(1)


def _missing_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"FlashMLA's FP8 decode needs sm_90, this device is {torch.cuda.get_device_capability()}"
    return None


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None:
        return
    reason = _missing_gpu()
    if reason and os.environ.get("STALEGRAPH_REQUIRE_GPU") == "1":
        pytest.fail(f"STALEGRAPH_REQUIRE_GPU=1 and {reason}")
    if reason:
        pytest.skip(reason)
