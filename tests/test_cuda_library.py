"""FlashMLA's library is found without vLLM being imported, and every misfit is told with the torch that would do."""

import struct
import sys

import pytest
import torch

from stalegraph.cuda import library
from stalegraph.cuda.elf import read_library
from stalegraph.cuda.library import BUILDS, build_of, check_device, check_torch, find_library, load_flashmla, numbers
from stalegraph.errors import RungUnavailable

CXX = ("libtorch.so", "libcudart.so.13", "libc10.so")
BUILD = next(build for build in BUILDS if build.first == "0.20.2")
STABLE = next(build for build in BUILDS if build.first == "0.26.0")


def write_library(path, needed, *, stable=False, nbytes=0):
    """The smallest 64-bit ELF library with a dynamic section that names `needed`, padded to `nbytes`."""
    strings, entries = b"\0", []
    for name in needed:
        entries.append((1, len(strings)))
        strings += name.encode() + b"\0"
    strings += b"aoti_torch_empty_strided\0" if stable else b"_ZN2at5emptyEv\0"
    base, header, program = 0x1000, 64, 2 * 56
    entries += [(5, base + header + program), (10, len(strings)), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    dynamic_at = header + program + len(strings)
    total = dynamic_at + len(dynamic)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    elf = ident + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, header, 0, 0, 64, 56, 2, 0, 0, 0)
    elf += struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, total, total, 0x1000)
    elf += struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, base + dynamic_at, 0, len(dynamic), len(dynamic), 8)
    data = elf + strings + dynamic
    path.write_bytes(data + bytes(max(0, nbytes - len(data))))
    return path


def test_needed_libraries_cuda_major_and_abi_are_read(tmp_path):
    cxx = read_library(write_library(tmp_path / "a.so", CXX, nbytes=5000))
    stable = read_library(write_library(tmp_path / "b.so", ("libtorch.so", "libcudart.so.12"), stable=True))
    assert (cxx.needed, cxx.cuda_major, cxx.stable_abi, cxx.nbytes) == (CXX, 13, False, 5000)
    assert (stable.cuda_major, stable.stable_abi) == (12, True)


@pytest.mark.parametrize(
    "data, message", [(b"not ELF", "no 64-bit ELF"), (b"\x7fELF\x02\x01\x01" + bytes(90), "dynamic")]
)
def test_a_file_that_is_no_library_is_refused(tmp_path, data, message):
    (tmp_path / "a.so").write_bytes(data)
    with pytest.raises(RungUnavailable, match=message):
        read_library(tmp_path / "a.so")


def test_a_truncated_library_is_refused(tmp_path):
    path = write_library(tmp_path / "a.so", CXX)
    path.write_bytes(path.read_bytes()[:130])
    with pytest.raises(RungUnavailable, match="cut short"):
        read_library(path)


def test_an_installed_vllm_is_found_and_not_imported(tmp_path, monkeypatch):
    monkeypatch.delenv("STALEGRAPH_FLASHMLA_LIB", raising=False)
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('vllm was imported')")
    (tmp_path / "vllm-0.20.2.dist-info").mkdir()
    (tmp_path / "vllm-0.20.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.2\n")
    write_library(package / "_flashmla_extension_C.abi3.so", CXX)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    found = read_library(find_library())
    assert found.path.parent == package and "vllm" not in sys.modules
    assert library.release_of(found) == "0.20.2"
    assert build_of(found, "0.20.2") == BUILD  # by release, whatever its size


def test_a_path_may_be_a_file_or_a_folder(tmp_path):
    path = write_library(tmp_path / "_flashmla_extension_C.abi3.so", CXX)
    assert find_library(path) == find_library(tmp_path) == path
    with pytest.raises(RungUnavailable, match="flashmla_lib is .*nowhere"):
        find_library(tmp_path / "nowhere")


def test_the_environment_names_a_library_too(tmp_path, monkeypatch):
    path = write_library(tmp_path / "_flashmla_extension_C.abi3.so", CXX)
    monkeypatch.setenv("STALEGRAPH_FLASHMLA_LIB", str(tmp_path))
    assert find_library() == path


def test_without_vllm_the_message_says_what_to_do(monkeypatch):
    monkeypatch.delenv("STALEGRAPH_FLASHMLA_LIB", raising=False)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RungUnavailable, match="vLLM is not installed.*--flashmla-lib"):
        find_library()


def test_a_build_is_known_by_its_size_where_nothing_else_tells(tmp_path):
    path = write_library(tmp_path / "a.so", CXX, nbytes=BUILD.nbytes)
    assert build_of(read_library(path), None) == BUILD
    path = write_library(tmp_path / "a.so", CXX, nbytes=BUILD.nbytes + 1)
    assert build_of(read_library(path), None) is None


@pytest.mark.parametrize(
    "build, torch_version, torch_cuda, message",
    [
        (BUILD, "2.11.0+cu130", "13.0", None),
        (BUILD, "2.10.0+cu130", "13.0", "built against torch 2.11, this is torch 2.10.0"),
        (BUILD, "2.12.0+cu130", "13.0", "built against torch 2.11, this is torch 2.12.0"),
        (BUILD, "2.11.0+cu128", "12.8", "needs CUDA 13, torch 2.11.0.cu128 brings CUDA 12.8"),
        (BUILD, "2.11.0+cpu", None, "built without CUDA"),
        (STABLE, "2.13.0+cu130", "13.0", None),
        (STABLE, "2.10.0+cu130", "13.0", "built against torch 2.11"),
        (None, "2.10.0+cu130", "13.0", None),  # not in the table: loading it will tell
        (None, "2.10.0+cu128", "12.8", "this FlashMLA library needs CUDA 13"),
    ],
)
def test_torch_must_fit_the_build(tmp_path, build, torch_version, torch_cuda, message):
    stable = bool(build and build.stable_abi)
    found = read_library(write_library(tmp_path / "a.so", CXX[:2] if stable else CXX, stable=stable))
    if message is None:
        check_torch(found, build, torch_version, torch_cuda)
        return
    with pytest.raises(RungUnavailable, match=message) as caught:
        check_torch(found, build, torch_version, torch_cuda)
    assert "vLLM 0.17.1 to 0.19.1: torch 2.10, CUDA 12" in str(caught.value)


@pytest.mark.parametrize(
    "capability, driver, message",
    [
        ((9, 0), 13000, None),
        ((10, 0), 13000, "sm_100; FlashMLA's FP8 dense decode runs on sm_90 only"),
        ((8, 0), 13000, "sm_80"),
        (None, 13000, "no CUDA device"),
        ((9, 0), 0, "libcuda.so.1 is missing"),
        ((9, 0), 12080, "driver supports CUDA 12.8, torch brings CUDA 13.0"),
    ],
)
def test_the_gpu_and_its_driver_must_fit(capability, driver, message):
    if message is None:
        check_device(capability, "GPU", driver, "13.0")
        return
    with pytest.raises(RungUnavailable, match=message):
        check_device(capability, "GPU", driver, "13.0")


def test_release_numbers_stop_at_the_first_that_is_none():
    assert numbers("2.13.0rc1") == (2, 13, 0) and numbers("0.20.2.dev3+g1") == (0, 20, 2) and numbers("main") == ()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_loading_without_cuda_names_the_torch_that_goes_with_the_library(tmp_path):
    path = write_library(tmp_path / "a.so", CXX, nbytes=BUILD.nbytes)
    with pytest.raises(RungUnavailable, match="built without CUDA; vLLM 0.20.2's"):
        load_flashmla(path)
