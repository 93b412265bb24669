"""The GPU's memory by raw address, as a stale graph reads it: whatever lies there now, whoever owns it."""

from __future__ import annotations

import ctypes

import torch

from stalegraph.errors import IllegalAddressError


class Memory:
    """Reads of device memory through the driver, which refuses an address that is not mapped and stays usable."""

    def __init__(self, device):
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")

    def read(self, address: int, nbytes: int) -> torch.Tensor:
        """The `nbytes` bytes at `address` as they lie now, a uint8 tensor on the host; waits for the device."""
        self._device.synchronize()
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        failed = self._driver.cuMemcpyDtoH_v2(
            ctypes.c_void_p(data.data_ptr()), ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        )
        if failed:
            raise IllegalAddressError(f"{nbytes} bytes at {address:#x} cannot be read: CUDA error {failed}")
        return data

    def is_mapped(self, address: int, nbytes: int = 1) -> bool:
        """Whether [address, address + nbytes) can be read."""
        try:
            self.read(address, 1)
            self.read(address + max(nbytes, 1) - 1, 1)
        except IllegalAddressError:
            return False
        return True
