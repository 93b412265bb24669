"""Checks the caller's tensors and launches the scheduling kernel on the current stream: one launch, nothing else."""

from __future__ import annotations

import ctypes
import struct
import threading
from functools import partial
from pathlib import Path

import torch

from stalegraph import schedule
from stalegraph.errors import CaptureError, RungUnavailable, StalegraphError, UsageError
from stalegraph.kernels.compiler import done, load

MAX_PARTS = 1024  # more than any GPU has SMs
LOWEST_CAPABILITY = (8, 0)  # the kernel reduces over a warp in one instruction
SOURCE = Path(__file__).with_name("schedule.cu")
WORD = 4  # bytes
_INT32, _WIDTH, _MAX_BATCH = torch.int32, schedule.METADATA_WIDTH, schedule.MAX_BATCH
# The table that the kernel looks lost blocks up in, in bytes: requests of up to some 3,000 tokens fit.
TABLE_A_REQUEST, LARGEST_TABLE = 64, 160 << 10
FEW = 28  # the largest batch of which each warp takes all requests: an H200 is as fast the other way from 30 on
ONE_EACH = 256  # the largest batch of which a thread takes one request, not four
WALKED_BEHIND = 16  # entries behind the parts that the kernel's walk may write
ENTRIES = ("schedule_few", "schedule_1", "schedule_4")
STATIC_SHARED = 1 << 10  # bytes that the kernel declares itself

_kernels: dict[int, _Kernel] = {}  # by device index
_kernels_lock = threading.Lock()
# PyTorch's own generated code asks for the stream this way; the public call makes an object first.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class _Arguments(threading.local):
    """The kernel's arguments packed in one buffer, and an array of pointers into it, one a thread: launching copies.

    In order: seq_lens, batch, num_sm_parts, rows, num_splits, its capacity, table's bytes, block_table, its stride.
    """

    LAYOUT = struct.Struct("@PIIPPIIPI")
    OFFSETS = (0, 8, 12, 16, 24, 32, 36, 40, 48)

    def __init__(self):
        self._buffer = (ctypes.c_uint64 * -(-self.LAYOUT.size // 8))()
        begin = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * len(self.OFFSETS))(*(begin + offset for offset in self.OFFSETS))
        self.pack = partial(self.LAYOUT.pack_into, self._buffer, 0)
        self.address = ctypes.addressof(self._pointers)


class _Kernel:
    """The kernel as loaded on one device."""

    def __init__(self, index: int):
        capability = torch.cuda.get_device_capability(index)
        arch = f"{capability[0]}{capability[1]}"
        if capability < LOWEST_CAPABILITY:
            raise RungUnavailable(f"the scheduling kernel needs sm_80 or later; device {index} is sm_{arch}")
        with torch.cuda.device(index):
            torch.cuda.current_stream(index)  # makes sure that PyTorch's context exists and is current
            self.few, self.one_each, self.four_each = load(SOURCE.read_text(), f"sm_{arch}", ENTRIES)
            self.largest_table = allow_shared_memory((self.one_each, self.four_each), index)
        from cuda.bindings import driver

        self.launch = driver.cuLaunchKernel
        self.shapes: dict[tuple[int, int], tuple] = {}

    def shape(self, batch: int, parts: int) -> tuple:
        """(function, threads, bytes of shared memory, of which table) of a launch, kept for the next one alike."""
        threads, table = block_threads(batch, parts), min(table_bytes(batch), self.largest_table)
        function = self.one_each if batch <= ONE_EACH else self.four_each
        found = function, threads, shared_bytes(batch, parts, table), table
        if batch <= FEW:
            found = self.few, threads, 0, 0
        self.shapes[batch, parts] = found
        return found


def allow_shared_memory(functions, index: int) -> int:
    """Lets `functions` use all of a block's shared memory; returns how many bytes of it the largest table may take."""
    from cuda.bindings import driver

    most = done(
        driver.cuDeviceGetAttribute(
            driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, driver.CUdevice(index)
        ),
        "cuDeviceGetAttribute",
    )
    rest = shared_bytes(schedule.MAX_BATCH, MAX_PARTS, 0)
    table = min(LARGEST_TABLE, (most - rest - STATIC_SHARED) // 32 * 32)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    for function in functions:
        done(driver.cuFuncSetAttribute(function, attribute, rest + table), "cuFuncSetAttribute")
    return table


def shared_bytes(batch: int, parts: int, table: int) -> int:
    """The dynamic shared memory of a launch of more than FEW requests: the table, two words a cut and a request, more."""
    return table + WORD * (2 * (parts + 1) + WALKED_BEHIND + 2 * batch + 2)


_arguments = _Arguments()


def ensure_compiled(device=None) -> None:
    """Compiles the kernel, or takes it from the cache, and loads it on `device` (default: the current one).

    Call it before a capture: loading a kernel is not permitted within one (CaptureError).
    """
    if not torch.cuda.is_available():
        raise RungUnavailable("the scheduling kernel needs a CUDA device; on CPU tensors use stalegraph.schedule.plan")
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise UsageError(f"device is {device}; allowed: a CUDA device")
    _kernel(torch.cuda.current_device() if device.index is None else device.index)


def _kernel(index: int) -> _Kernel:
    found = _kernels.get(index)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "the scheduling kernel is not compiled yet; call stalegraph.kernels.ensure_compiled() before a capture"
            )
        with _kernels_lock:
            found = _kernels.get(index) or _Kernel(index)
            _kernels[index] = found
    return found


def _check_buffer(name: str, tensor, like: torch.Tensor, dims: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name} is a {type(tensor).__name__}; allowed: a torch.Tensor")
    if not tensor.is_cuda or tensor.get_device() != like.get_device():
        where = "a CUDA device" if tensor is like else f"{like.device}, where seq_lens is"
        raise UsageError(f"{name} is on {tensor.device}; allowed: {where}")
    if tensor.dtype != torch.int32 or tensor.dim() != dims:
        raise UsageError(f"{name} is {tensor.dtype} of {tensor.dim()} dims; allowed: torch.int32 of {dims}")
    if not tensor.is_contiguous():
        raise UsageError(f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; allowed: contiguous")


def check_arguments(seq_lens, tile_scheduler_metadata, num_splits, num_sm_parts) -> tuple[int, int, int]:
    """(batch, parts, capacity of num_splits) of a call that is sound; raises UsageError for any other."""
    _check_buffer("seq_lens", seq_lens, seq_lens, 1)
    _check_buffer("tile_scheduler_metadata", tile_scheduler_metadata, seq_lens, 2)
    _check_buffer("num_splits", num_splits, seq_lens, 1)
    batch, capacity = seq_lens.size(0), num_splits.size(0)
    rows, columns = tile_scheduler_metadata.shape
    parts = rows if num_sm_parts is None else num_sm_parts
    if not 1 <= batch <= schedule.MAX_BATCH:
        raise UsageError(f"seq_lens has {batch} entries; allowed: 1 to {schedule.MAX_BATCH}")
    if not isinstance(parts, int) or not 1 <= parts <= MAX_PARTS:
        raise UsageError(f"num_sm_parts is {parts!r}; allowed: an integer from 1 to {MAX_PARTS}")
    if columns != schedule.METADATA_WIDTH or rows < parts:
        raise UsageError(
            f"tile_scheduler_metadata has shape {(rows, columns)}; allowed: at least {parts} rows "
            f"of {schedule.METADATA_WIDTH}"
        )
    if tile_scheduler_metadata.data_ptr() % 16:
        raise UsageError(
            f"tile_scheduler_metadata is at {tile_scheduler_metadata.data_ptr():#x}; allowed: a multiple of 16 bytes"
        )
    if capacity <= batch:
        raise UsageError(f"num_splits has {capacity} entries; allowed: at least {batch + 1}, the batch and one")
    return batch, parts, capacity


def block_threads(batch: int, parts: int) -> int:
    """How many threads the one block has: one a part where requests are few, else one a request or for four."""
    if batch <= FEW:
        return -(-parts // 32) * 32
    return 256 if batch <= 1024 else 1024


def table_bytes(batch: int) -> int:
    """How many bytes of shared memory the look-up tables may take."""
    return min(TABLE_A_REQUEST * batch, LARGEST_TABLE)


def schedule_into(
    seq_lens: torch.Tensor,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    num_sm_parts: int | None = None,
    *,
    block_table: torch.Tensor | None = None,
    check: bool = False,
) -> None:
    """FlashMLA's schedule of `seq_lens` (batch,) int32, into the given buffers: one kernel on the current stream.

    tile_scheduler_metadata (at least num_sm_parts, 8) and num_splits (at least batch + 1,) int32, contiguous, on the
    same device. `num_sm_parts` defaults to the rows given. The rows' three unused columns become 0 (FlashMLA leaves
    them), and num_splits behind batch + 1 repeats its last sum. Batch 1 to 4096, all together below 2^30 blocks.

    With `block_table` (at least batch, width) int32, rows contiguous, the entry in memory before the row of each empty
    request becomes 0 where it is negative: the attention kernel loads that page (vLLM #33664).

    Nothing is allocated, copied or read back, so lengths are not checked: negative ones count as 0. `check=True` reads
    them back first, which waits for the device, and raises UsageError instead.
    Raises UsageError before any launch, CaptureError where a capture finds the kernel not compiled.
    """
    index = seq_lens.get_device() if isinstance(seq_lens, torch.Tensor) else -1
    kernel = _kernels.get(index)
    if kernel is None:
        check_arguments(seq_lens, tile_scheduler_metadata, num_splits, num_sm_parts)
        kernel = _kernel(index)
    # The short way through the checks; whoever fails one is told by check_arguments what is wrong.
    try:
        batch, capacity = seq_lens.numel(), num_splits.numel()
        rows, columns = tile_scheduler_metadata.shape
        parts = rows if num_sm_parts is None else num_sm_parts
        address = tile_scheduler_metadata.data_ptr()
        sound = (
            seq_lens.dtype is _INT32 and tile_scheduler_metadata.dtype is _INT32 and num_splits.dtype is _INT32
            and tile_scheduler_metadata.get_device() == index == num_splits.get_device()
            and seq_lens.dim() == 1 == num_splits.dim() and columns == _WIDTH
            and seq_lens.is_contiguous() and tile_scheduler_metadata.is_contiguous() and num_splits.is_contiguous()
            and 0 < batch <= _MAX_BATCH and batch < capacity and address % 16 == 0
            and isinstance(parts, int) and 0 < parts <= rows and parts <= MAX_PARTS
        )  # fmt: skip
    except (AttributeError, TypeError, ValueError):
        sound = False
    if not sound:
        batch, parts, capacity = check_arguments(seq_lens, tile_scheduler_metadata, num_splits, num_sm_parts)
    if check:
        _check_lengths(seq_lens)
    shape = (batch, parts)
    function, threads, shared, table = kernel.shapes.get(shape) or kernel.shape(*shape)
    pages = stride = 0
    if block_table is not None:
        _check_block_table(block_table, seq_lens)
        pages, stride = block_table.data_ptr(), block_table.stride(0)
    arguments = _arguments
    arguments.pack(
        seq_lens.data_ptr(), batch, parts, address, num_splits.data_ptr(), capacity, table, pages, stride
    )  # fmt: skip
    if index == _current_device():
        (status,) = kernel.launch(function, 1, 1, 1, threads, 1, 1, shared, _raw_stream(index), arguments.address, 0)
    else:
        with torch.cuda.device(index):
            stream = _raw_stream(index)
            (status,) = kernel.launch(function, 1, 1, 1, threads, 1, 1, shared, stream, arguments.address, 0)
    if status:
        raise StalegraphError(f"launching the scheduling kernel failed: {status.name}")


def _check_block_table(block_table, seq_lens: torch.Tensor) -> None:
    if not isinstance(block_table, torch.Tensor):
        raise UsageError(f"block_table is a {type(block_table).__name__}; allowed: a torch.Tensor")
    if block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.get_device() != seq_lens.get_device():
        raise UsageError(
            f"block_table is {block_table.dtype} of {block_table.dim()} dims on {block_table.device}; allowed: "
            f"torch.int32 of 2 on {seq_lens.device}"
        )
    if block_table.size(0) < seq_lens.size(0) or block_table.stride(1) != 1:
        raise UsageError(
            f"block_table has shape {tuple(block_table.shape)} and strides {block_table.stride()}; allowed: at least "
            f"{seq_lens.size(0)} rows, each contiguous"
        )


def _check_lengths(seq_lens: torch.Tensor) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError("check is True, which reads seq_lens back; a capturing stream does not permit that")
    shortest = int(seq_lens.min())
    if shortest < 0:
        raise UsageError(f"seq_lens holds {shortest}; allowed: 0 or more")
