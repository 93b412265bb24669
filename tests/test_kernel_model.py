"""The scheduling kernel without a GPU: its model, and its CUDA source run thread by thread, against the reference."""

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from stalegraph import schedule
from stalegraph.errors import UsageError
from stalegraph.kernels import MAX_PARTS, launch, model

HERE = Path(__file__).parent / "kernel_on_cpu"
PARTS = (1, 2, 31, 32, 33, 66, 78, 132, 200)
EDGES = {
    "one token": [1],
    "empty": [0],
    "all empty": [0] * 200,
    "around a block": [0, 1, 63, 64, 65],
    "largest": [1] * schedule.MAX_BATCH,
    "one huge among many small": [1] * 500 + [4_000_000] + [0, 2] * 250,
    "huge first": [4_000_000] + [0] * 1000,
    "huge last": [0] * 1000 + [4_000_000],
    "batch below the parts": [5000, 70, 0, 900],
    "batch above the parts": [300 + 7 * r for r in range(400)],
    "as many as parts": [4096] * 132,
    "longest": [2**31 - 1] * 8,
}


def random_lengths(draw: random.Random, most: int = 1100) -> list[int]:
    batch = draw.choice([1, 2, draw.randint(1, 40), draw.randint(1, 300), draw.randint(100, most)])
    kind = draw.randrange(7)
    if kind == 0:
        return [draw.randint(0, 200_000) for _ in range(batch)]
    if kind == 1:
        return [int(200_001 ** draw.random()) for _ in range(batch)]
    if kind == 2:
        return [draw.choice([1, 64, 65, 1024, 8192, draw.randint(0, 5000)])] * batch
    if kind == 3:
        return [draw.choice([0, 1, 63, 64, 65]) for _ in range(batch)]
    if kind == 4:
        return [0 if draw.random() < 1 / 3 else draw.randint(1, 3000) for _ in range(batch)]
    if kind == 5:  # runs of empty and of long requests: what one of the two methods is bad at
        empty = draw.randint(0, batch)
        lengths = [0] * empty + [draw.randint(0, 20_000) for _ in range(batch - empty)]
        return lengths if draw.random() < 0.5 else lengths[::-1]
    lengths = [draw.choice([0, 1, 2]) for _ in range(batch)]
    lengths[draw.randrange(batch)] = draw.randint(1, 3_000_000)
    return lengths


def reference(lengths, parts):
    metadata, num_splits = schedule.plan(lengths, parts)
    return metadata.tolist(), num_splits.tolist()


@pytest.mark.parametrize("method", [None, model.few, model.walk, model.leap], ids=["chosen", "few", "walk", "leap"])
@pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES)
def test_the_model_equals_the_reference_on_every_edge(lengths, method):
    if method is model.walk and sum(lengths) > 1 << 23:
        method = model.leap  # a table of that length is never made
    for parts in PARTS:
        assert model.plan(lengths, parts, method) == reference(lengths, parts), parts


def test_the_model_equals_the_reference_on_random_batches():
    draw, taken = random.Random(6), {model.few: 0, model.walk: 0, model.leap: 0}
    for _ in range(1500):
        lengths, parts = random_lengths(draw), draw.choice([*PARTS, draw.randint(1, 300)])
        first = model.starts(lengths)
        stride = -(-int(first[-1]) // parts)
        if first[-1] < 1 << 17:  # a walk's table takes time
            assert model.walk(first, parts, stride).tolist() == model.leap(first, parts, stride).tolist()
        assert model.few(first, parts, stride).tolist() == model.leap(first, parts, stride).tolist()
        assert model.plan(lengths, parts) == reference(lengths, parts), (lengths, parts)
        taken[model.chosen(first, parts, stride)] += 1
    assert min(taken.values()) > 100  # the random batches call for all methods


def test_a_wrong_overhead_is_noticed(monkeypatch):
    monkeypatch.setattr(model, "FIXED_OVERHEAD_BLOCKS", 4)
    assert model.plan(EDGES["batch above the parts"], 132) != reference(EDGES["batch above the parts"], 132)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles the kernel for the CPU, with replacements in its source; returns plan(lengths, parts, capacity)."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernel for the CPU with")

    def compile_with(*replacements, table=launch.table_bytes, few=launch.FEW):
        source = launch.SOURCE.read_text()
        for old, new in (("extern __shared__ int4 shared[];", "int4* shared = (int4*)shared_words;"), *replacements):
            assert old in source
            source = source.replace(old, new)
        folder = tmp_path_factory.mktemp("kernel")
        (folder / "kernel.inc").write_text(source)
        command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", f"-I{folder}", "-o", str(folder / "kernel.so")]
        subprocess.run([*command, str(HERE / "threads.cpp")], check=True, capture_output=True, text=True)
        run_block = ctypes.CDLL(str(folder / "kernel.so")).run_block

        def plan(lengths, parts, capacity=None, block_table=None):
            batch, capacity = len(lengths), capacity or len(lengths) + 1
            seq_lens = torch.tensor(lengths, dtype=torch.int32)
            rows = torch.full((parts + 1, 8), -77, dtype=torch.int32)
            num_splits = torch.full((capacity + 1,), -77, dtype=torch.int32)
            each = 0 if batch <= few else 1 if batch <= launch.ONE_EACH else 4
            threads = launch.block_threads(max(batch, few + 1), parts) if each else launch.block_threads(1, parts)
            rc = run_block(
                ctypes.c_void_p(seq_lens.data_ptr()), batch, parts, ctypes.c_void_p(rows.data_ptr()),
                ctypes.c_void_p(num_splits.data_ptr()), capacity, table(batch),
                ctypes.c_void_p(0 if block_table is None else block_table.data_ptr()),
                0 if block_table is None else block_table.stride(0), each, threads,
            )  # fmt: skip
            assert rc == 0, "threads that should meet do not"
            assert num_splits[-1] == -77 and rows[-1].eq(-77).all()  # nothing is written behind the buffers
            return rows[:-1].tolist(), num_splits[:-1].tolist()

        return plan

    return compile_with


TABLES = {
    "chosen": {}, "leap": {"table": lambda batch: 0, "few": 0}, "walk": {"table": lambda batch: 128 << 10, "few": 0}
}  # fmt: skip


@pytest.mark.parametrize("ways", TABLES.values(), ids=TABLES)
def test_the_cuda_source_equals_the_reference(compiled, ways):
    plan, draw = compiled(**ways), random.Random(7)
    for lengths in EDGES.values():
        assert plan(lengths, 132) == reference(lengths, 132)
    for _ in range(150):
        lengths, parts = random_lengths(draw), draw.choice([*PARTS, draw.randint(1, 300)])
        assert plan(lengths, parts) == reference(lengths, parts), (lengths, parts)
    lengths = [draw.randint(0, 4000) for _ in range(schedule.MAX_BATCH)]
    for parts in (132, MAX_PARTS):
        assert plan(lengths, parts) == reference(lengths, parts)


def test_the_cuda_source_fills_the_tail_and_takes_negative_lengths_for_empty(compiled):
    plan = compiled()
    rows, num_splits = plan([700, 3, 0], 132, capacity=400)
    expected_rows, expected_splits = reference([700, 3, 0], 132)
    assert rows == expected_rows and num_splits == expected_splits + [expected_splits[-1]] * 396
    assert plan([-1, 130, -(2**31)], 66) == reference([0, 130, 0], 66) == model.plan([-1, 130, -(2**31)], 66)


def test_the_cuda_source_makes_the_page_before_an_empty_row_safe(compiled):
    table = torch.full((6, 4), -1, dtype=torch.int32)
    table[2, 3] = 9
    compiled()([70, 0, 0, 0, 70, 0], 132, block_table=table)
    assert table.ge(0).nonzero().tolist() == [[0, 3], [1, 3], [2, 3], [4, 3]] and table[2, 3] == 9


@pytest.mark.parametrize(
    "change",
    [
        ("end_block ? end_request : end_request - 1", "end_request"),
        ("__ballot_sync(ALL, left > OVERHEAD)", "__ballot_sync(ALL, left >= OVERHEAD)"),
        ("part.start + budget > part.reach", "true"),
        ("same = leads ?", "same = false ?"),
        ("part.request += over;", ""),
        ("; since; since--", "; since; since = 0"),
        ("jumps ? JUMP : 1", "1"),
        ("further <= overhead", "further < overhead"),
        ("its < least", "false"),
        ("if (ahead >= stride)", "if (ahead > stride)"),
        ("while (lost >= stride)", "while (false)"),
        ("its < part + side", "its <= part + side"),
    ],
)
def test_a_change_to_the_cuda_source_is_noticed(compiled, change):
    plan, draw = compiled(change), random.Random(8)
    cases = [random_lengths(draw) for _ in range(40)] + [[5000, 0, 70, 900]]
    cases += [[draw.randint(0, 3000) for _ in range(draw.randint(2, launch.FEW))] for _ in range(200)]
    assert any(plan(lengths, 132) != reference(lengths, 132) for lengths in cases)


def test_tensors_on_the_cpu_and_a_missing_gpu_are_refused():
    buffers = torch.zeros((132, 8), dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    with pytest.raises(UsageError, match="seq_lens is on cpu; allowed: a CUDA device"):
        launch.schedule_into(torch.ones(8, dtype=torch.int32), *buffers)
    with pytest.raises(UsageError, match="seq_lens is a list"):
        launch.schedule_into([1, 2], *buffers)
    with pytest.raises(UsageError, match="device is cpu|needs a CUDA device"):
        launch.ensure_compiled("cpu")


def test_the_packed_arguments_are_found_through_their_pointers():
    arguments = launch._Arguments()
    arguments.pack(*range(1, 10))
    pointers = (ctypes.c_void_p * 9).from_address(arguments.address)
    assert [ctypes.c_uint32.from_address(pointer).value for pointer in pointers] == list(range(1, 10))
    assert all(pointers[which] % 8 == 0 for which in (0, 3, 4, 7))  # those to 8-byte values


def test_shared_memory_of_every_launch_fits_a_hopper_block():
    for batch in (1, 4, 5, 256, 257, 1024, 1025, 2560, schedule.MAX_BATCH):
        assert launch.table_bytes(batch) % 16 == 0
        threads = launch.block_threads(batch, MAX_PARTS)
        assert threads % 32 == 0 and threads <= 1024
        assert batch <= threads * (1 if batch <= launch.ONE_EACH else 4)
        nbytes = launch.shared_bytes(batch, MAX_PARTS, launch.table_bytes(batch)) + launch.STATIC_SHARED
        assert nbytes <= 227 << 10  # sm_90: 227 KB a block
