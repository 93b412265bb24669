"""What a shared library asks of the system: the little of ELF that says whether FlashMLA's library can load here."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from stalegraph.errors import RungUnavailable

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NEEDED, DT_STRTAB, DT_STRSZ = 1, 5, 10


@dataclass(frozen=True)
class SharedLibrary:
    """`needed` are the libraries it links; `stable_abi` says that it calls torch through `aoti_torch_*` only."""

    path: Path
    nbytes: int
    needed: tuple[str, ...]
    stable_abi: bool

    @property
    def cuda_major(self) -> int | None:
        """The CUDA major release it was built for, or None where it does not link libcudart."""
        for name in self.needed:
            if name.startswith("libcudart.so."):
                return int(name.removeprefix("libcudart.so.").split(".")[0])
        return None


def _dynamic(data: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """The dynamic section's (tag, value) pairs, and the loaded segments as (virtual address, file offset, bytes)."""
    table, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    loads, dynamic = [], []
    for index in range(count):
        kind, _flags, offset, virtual, _physical, nbytes = struct.unpack_from("<IIQQQQ", data, table + index * size)
        if kind == PT_LOAD:
            loads.append((virtual, offset, nbytes))
        elif kind == PT_DYNAMIC:
            dynamic = list(struct.iter_unpack("<qQ", data[offset : offset + nbytes // 16 * 16]))
    return dynamic, loads


def read_library(path) -> SharedLibrary:
    """Reads a 64-bit little-endian ELF library; raises RungUnavailable where `path` is none."""
    path = Path(path)
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise RungUnavailable(f"{path} is no 64-bit ELF library; allowed: vLLM's _flashmla_extension_C*.so")
    try:
        dynamic, loads = _dynamic(data)
        values = {tag: value for tag, value in dynamic if tag in (DT_STRTAB, DT_STRSZ)}
        virtual, offset, _ = next(load for load in loads if load[0] <= values[DT_STRTAB] < load[0] + load[2])
        start = values[DT_STRTAB] - virtual + offset
        strings = data[start : start + values[DT_STRSZ]]
    except (struct.error, KeyError, StopIteration):
        raise RungUnavailable(f"{path} is cut short or has no dynamic section; copy or install it again") from None
    needed = tuple(
        strings[value : strings.index(b"\0", value)].decode() for tag, value in dynamic if tag == DT_NEEDED
    )
    # libc10 is torch's C++ ABI, tied to one minor release; the stable ABI does without.
    stable = b"aoti_torch_" in strings and not any(name.startswith("libc10") for name in needed)
    return SharedLibrary(path, len(data), needed, stable)
