"""The hot-fix in a stand-in for vLLM's FlashMLA backend: what it does, where it does nothing, that it never breaks."""

import importlib
import logging
import os
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from stalegraph import ops
from stalegraph.errors import UsageError
from stalegraph.schedule import plan
from stalegraph.vllm import affected as affected_module
from stalegraph.vllm import hotfix

SM_COUNT = ops.DEFAULT_SM_COUNT
MODES = ("copying", "inplace", "ingraph", "auto")


@dataclass
class SchedulerMetadata:
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


@dataclass
class DecodeMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    scheduler_metadata: SchedulerMetadata


def backend(*, fixed=False, decode_method="forward_mqa"):
    """A module with the names of vLLM's backend; `fixed` copies into the builder's buffers, as from 0.19.0 on."""
    module = types.ModuleType(hotfix.BACKEND)

    class FlashMLAMetadataBuilder:
        def __init__(self, max_num_seqs=8, fp8=True, full_graphs=True):
            self.is_fp8_kvcache = fp8
            self.cg_buf_tile_scheduler_metadata = self.cg_buf_num_splits = None
            if full_graphs:
                self.cg_buf_tile_scheduler_metadata = torch.zeros((SM_COUNT, 8), dtype=torch.int32)
                self.cg_buf_num_splits = torch.full((max_num_seqs + 1,), -7, dtype=torch.int32)

        def _build_decode(self, block_table_tensor, seq_lens_device, max_seq_len=0):
            metadata = SchedulerMetadata()
            if self.is_fp8_kvcache:
                rows, splits = module.get_mla_metadata_dense_fp8(seq_lens_device, 16, 1)
                if fixed and self.cg_buf_num_splits is not None:
                    self.cg_buf_tile_scheduler_metadata[: len(rows)].copy_(rows)
                    self.cg_buf_num_splits[: len(splits)].copy_(splits)
                    rows = self.cg_buf_tile_scheduler_metadata[: len(rows)]
                    splits = self.cg_buf_num_splits[: len(splits)]
                metadata = SchedulerMetadata(rows, splits)
            return DecodeMetadata(block_table_tensor, seq_lens_device, metadata)

    class FlashMLAImpl:
        pass

    def decode(self, q, kv_cache, attn_metadata, layer):
        made = attn_metadata.decode.scheduler_metadata
        return made.tile_scheduler_metadata.clone(), made.num_splits.clone(), attn_metadata.decode.block_table.clone()

    setattr(FlashMLAImpl, decode_method, decode)
    module.FlashMLAMetadataBuilder = FlashMLAMetadataBuilder
    module.FlashMLAImpl = FlashMLAImpl
    module.get_mla_metadata_dense_fp8 = lambda *args: ops.get_mla_metadata_dense_fp8(*args)
    return module


@pytest.fixture
def arrive(monkeypatch):
    """Let a stand-in backend be what vLLM imports, in a process where the release needs the hot-fix."""
    monkeypatch.setattr(hotfix, "diagnose", lambda: (True, "vLLM 0.15.0 has bug #33638"))
    hotfix._told.clear()

    def arrive(module):
        monkeypatch.setitem(sys.modules, hotfix.BACKEND, module)
        return module

    yield arrive
    hotfix.uninstall()


def table(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def step(module, builder, seq_lens, block_table, decode_method="forward_mqa", layers=2):
    """Build, then run the layers; what the first one read."""
    decode = builder._build_decode(block_table_tensor=block_table, seq_lens_device=seq_lens, max_seq_len=1)
    metadata = types.SimpleNamespace(decode=decode)
    read = [
        getattr(module.FlashMLAImpl(), decode_method)(None, None, metadata, None) for _ in range(layers)
    ]
    return decode, read[0]


@pytest.mark.parametrize("fixed", [False, True], ids=["affected", "fixed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("decode_method", ["forward_mqa", "_forward_decode"])
def test_every_mode_plans_into_persistent_buffers(arrive, mode, fixed, decode_method):
    module = arrive(backend(fixed=fixed, decode_method=decode_method))
    hotfix.install(mode, force=True)
    builder = module.FlashMLAMetadataBuilder()
    held = []
    for values in ((1, 1, 1, 1), (900, 70, 3, 0), (5, 6)):
        rows = table(*[[1, 2]] * len(values))
        made, read = step(module, builder, lens(*values), rows, decode_method)
        held.append(torch.zeros(9))
        schedule = made.scheduler_metadata
        assert schedule.tile_scheduler_metadata.data_ptr() == builder.cg_buf_tile_scheduler_metadata.data_ptr()
        assert schedule.num_splits.data_ptr() == builder.cg_buf_num_splits.data_ptr()
        expected = plan(list(values), SM_COUNT)
        assert torch.equal(read[0], expected[0])
        assert torch.equal(read[1], expected[1])
        tail = builder.cg_buf_num_splits[len(values) + 1 :]
        assert torch.equal(tail, expected[1][-1].expand_as(tail))


def test_without_the_hotfix_the_stand_in_has_the_bug(arrive):
    module = arrive(backend())
    builder = module.FlashMLAMetadataBuilder()
    first, _ = step(module, builder, lens(1, 1), table([1], [1]))
    second, _ = step(module, builder, lens(1, 1), table([1], [1]))
    addresses = {made.scheduler_metadata.num_splits.data_ptr() for made in (first, second)}
    assert len(addresses) == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sanitize", [True, False])
def test_padded_rows_are_made_safe_in_place(arrive, mode, sanitize):
    module = arrive(backend())
    hotfix.install(mode, sanitize_padding=sanitize)
    rows = table([3, 4], [5, 0], [-1, -1], [-1, -1])
    made, read = step(module, module.FlashMLAMetadataBuilder(), lens(100, 3, 0, 0), rows)
    assert made.block_table is rows
    padding = 0 if sanitize else -1
    assert read[2].tolist() == [[3, 4], [5, 0], [padding] * 2, [padding] * 2]


def test_ingraph_launches_once_a_step_before_the_first_layer_and_again_when_the_step_is_run_again(arrive, monkeypatch):
    module = arrive(backend())
    hotfix.install("ingraph")
    builder = module.FlashMLAMetadataBuilder()
    step(module, builder, lens(1, 1), table([1], [1]))  # settles that our kernel runs here
    launches = []
    schedule_into = ops.schedule_into
    monkeypatch.setattr(ops, "schedule_into", lambda *a, **k: (launches.append(1), schedule_into(*a, **k)))
    decode = builder._build_decode(table([1], [1]), lens(1, 700))
    assert launches == []
    metadata, layers = types.SimpleNamespace(decode=decode), [module.FlashMLAImpl() for _ in range(3)]
    for expected in (1, 2):  # V2 to 0.21.0 warms up and captures with one metadata object
        for layer in layers:
            layer.forward_mqa(None, None, metadata, None)
        assert len(launches) == expected


@pytest.mark.parametrize("case", ["bf16 cache", "no full graphs"])
def test_what_has_no_bug_is_let_be(arrive, case, caplog):
    module = arrive(backend())
    builder = module.FlashMLAMetadataBuilder(fp8=case != "bf16 cache", full_graphs=case != "no full graphs")
    hotfix.install("copying")
    rows = table([3], [-1])
    with caplog.at_level(logging.INFO, "vllm.stalegraph"):
        made = builder._build_decode(rows, lens(1, 0))
    assert rows.tolist() == [[3], [-1]]
    assert (made.scheduler_metadata.num_splits is None) == (case == "bf16 cache")
    assert caplog.records == []


def test_a_batch_beyond_the_buffers_gets_fresh_tensors(arrive):
    module = arrive(backend())
    hotfix.install("copying")
    builder = module.FlashMLAMetadataBuilder(max_num_seqs=2)
    made, read = step(module, builder, lens(1, 1, 1), table([1], [1], [1]))
    assert made.scheduler_metadata.num_splits.data_ptr() != builder.cg_buf_num_splits.data_ptr()
    assert torch.equal(read[1], plan([1, 1, 1], SM_COUNT)[1])


def test_it_says_once_what_it_did(arrive, caplog):
    module = arrive(backend())
    with caplog.at_level(logging.INFO, "vllm.stalegraph"):
        hotfix.install("inplace")
        builder = module.FlashMLAMetadataBuilder()
        for _ in range(3):
            step(module, builder, lens(1), table([1]))
    assert [record.getMessage() for record in caplog.records] == [
        "stalegraph hot-fix: vLLM 0.15.0 has bug #33638; the decode schedule is written straight into persistent "
        "buffers, the tail of num_splits is filled, padded block-table rows point at page 0"
    ]


@pytest.mark.parametrize("mode, level", [("auto", logging.DEBUG), ("inplace", logging.WARNING)])
@pytest.mark.parametrize("fault", ["does not compile", "disagrees"])
def test_where_our_kernel_does_not_do_the_plan_is_copied(arrive, monkeypatch, caplog, mode, level, fault):
    module = arrive(backend())
    hotfix.install(mode)

    def schedule_into(seq_lens, rows, splits, **_):
        if fault == "does not compile":
            raise RuntimeError("no compiler")

    monkeypatch.setattr(ops, "schedule_into", schedule_into)
    builder = module.FlashMLAMetadataBuilder()
    with caplog.at_level(logging.DEBUG, "vllm.stalegraph"):
        made, read = step(module, builder, lens(700, 1), table([1], [1]))
    assert torch.equal(read[1], plan([700, 1], SM_COUNT)[1])
    assert made.scheduler_metadata.num_splits.data_ptr() == builder.cg_buf_num_splits.data_ptr()
    assert caplog.records[0].levelno == level


def test_a_fault_in_a_later_step_goes_on_copying_into_the_same_buffers(arrive, monkeypatch):
    module = arrive(backend())
    hotfix.install("inplace")
    builder = module.FlashMLAMetadataBuilder()
    step(module, builder, lens(1, 1), table([1], [1]))
    monkeypatch.setattr(ops, "schedule_into", lambda *_, **__: 1 / 0)
    made, read = step(module, builder, lens(900, 1), table([1], [1]))
    assert made.scheduler_metadata.num_splits.data_ptr() == builder.cg_buf_num_splits.data_ptr()
    assert torch.equal(read[1], plan([900, 1], SM_COUNT)[1])


@pytest.mark.parametrize("missing", ["_build_decode", "get_mla_metadata_dense_fp8", "FlashMLAImpl", "decode method"])
def test_a_backend_built_otherwise_is_left_alone(arrive, caplog, missing):
    module = arrive(backend(decode_method="decode" if missing == "decode method" else "forward_mqa"))
    if missing == "_build_decode":
        del module.FlashMLAMetadataBuilder._build_decode
    elif missing != "decode method":
        delattr(module, missing)
    before = dict(vars(module.FlashMLAMetadataBuilder))
    with caplog.at_level(logging.WARNING, "vllm.stalegraph"):
        hotfix.install("copying")
    assert dict(vars(module.FlashMLAMetadataBuilder)) == before
    assert len(caplog.records) == 1


def test_a_builder_that_plans_otherwise_keeps_its_own_plan(arrive, caplog):
    module = arrive(backend())
    own = SchedulerMetadata(torch.zeros(1), torch.zeros(1))
    build_decode = lambda self, block_table, seq_lens: DecodeMetadata(block_table, seq_lens, own)  # noqa: E731
    module.FlashMLAMetadataBuilder._build_decode = build_decode
    hotfix.install("copying")
    with caplog.at_level(logging.WARNING, "vllm.stalegraph"):
        made = module.FlashMLAMetadataBuilder()._build_decode(table([-1]), lens(1))
    assert made.scheduler_metadata is own
    assert made.block_table.tolist() == [[-1]]
    assert len(caplog.records) == 1


def test_regress_puts_the_bug_back_on_a_fixed_release(arrive):
    module = arrive(backend(fixed=True))
    builder = module.FlashMLAMetadataBuilder()
    made, _ = step(module, builder, lens(1), table([1]))
    assert made.scheduler_metadata.num_splits.data_ptr() == builder.cg_buf_num_splits.data_ptr()
    assert "put back on purpose" in hotfix.regress()
    rows = table([-1])
    first, read = step(module, builder, lens(700), rows)
    second, _ = step(module, builder, lens(700), rows)
    addresses = {item.scheduler_metadata.num_splits.data_ptr() for item in (first, second)}
    assert len(addresses | {builder.cg_buf_num_splits.data_ptr()}) == 3
    assert torch.equal(read[1], plan([700], SM_COUNT)[1])
    assert rows.tolist() == [[-1]]


def test_installing_twice_wraps_once_and_uninstalling_restores(arrive):
    module = arrive(backend())
    originals = (module.FlashMLAMetadataBuilder._build_decode, module.get_mla_metadata_dense_fp8)
    hotfix.install("copying")
    hotfix.install("inplace")
    assert module.FlashMLAMetadataBuilder._build_decode.__wrapped__ is originals[0]
    hotfix.uninstall()
    assert (module.FlashMLAMetadataBuilder._build_decode, module.get_mla_metadata_dense_fp8) == originals


def test_it_waits_for_the_backend_to_be_imported(arrive, monkeypatch, tmp_path):
    name = "stalegraph_backend_to_come"
    (tmp_path / f"{name}.py").write_text("class FlashMLAMetadataBuilder:\n    def _build_decode(self): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hotfix, "BACKEND", name)
    arrived = []
    monkeypatch.setattr(hotfix, "_patch_quietly", arrived.append)
    hotfix.install("copying")
    assert arrived == []
    module = __import__(name)
    assert arrived == [module]
    del sys.modules[name]


# ------------------------------------------------------------------------------------------------- registration


@pytest.mark.parametrize(
    "needed, environment, installed, level",
    [
        (True, {}, True, "DEBUG"),
        (True, {"STALEGRAPH_HOTFIX": "off"}, False, "DEBUG"),
        (True, {"STALEGRAPH_HOTFIX": "sideways"}, False, "WARNING"),
        (True, {"STALEGRAPH_HOTFIX": "regressed"}, False, "WARNING"),
        (False, {}, False, "DEBUG"),
        (False, {"STALEGRAPH_HOTFIX": "copying"}, False, "DEBUG"),
        (False, {"STALEGRAPH_HOTFIX": "regressed", "STALEGRAPH_HOTFIX_FORCE": "1"}, True, "DEBUG"),
        (None, {}, False, "WARNING"),
    ],
)
def test_register(monkeypatch, caplog, needed, environment, installed, level):
    for name in ("STALEGRAPH_HOTFIX", "STALEGRAPH_HOTFIX_FORCE", "STALEGRAPH_HOTFIX_PADDING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hotfix, "diagnose", lambda: (needed, "because"))
    with caplog.at_level(logging.DEBUG, "vllm.stalegraph"):
        hotfix.register()
    assert (hotfix._settings is not None) == installed
    assert [record.levelname for record in caplog.records] == [level]
    hotfix.uninstall()


def test_register_survives_whatever_happens(monkeypatch, caplog):
    def diagnose():
        raise OSError("the disk is gone")

    monkeypatch.setattr(hotfix, "diagnose", diagnose)
    with caplog.at_level(logging.WARNING, "vllm.stalegraph"):
        hotfix.register()
    assert "the disk is gone" in caplog.text


def test_a_mode_that_does_not_exist_is_a_usage_error(arrive):
    with pytest.raises(UsageError, match="mode is 'sideways'; allowed: off, auto, copying, inplace, ingraph$"):
        hotfix.install("sideways")
    with pytest.raises(UsageError, match="regressed"):
        hotfix.install("sideways", force=True)


# -------------------------------------------------------------------------------------- in a process of its own

STAND_IN = """
from types import SimpleNamespace
import torch
from stalegraph.ops import get_mla_metadata_dense_fp8

class FlashMLAMetadataBuilder:
    is_fp8_kvcache = True
    def __init__(self):
        self.cg_buf_tile_scheduler_metadata = torch.zeros((132, 8), dtype=torch.int32)
        self.cg_buf_num_splits = torch.zeros((9,), dtype=torch.int32)
    def _build_decode(self, block_table, seq_lens):
        rows, splits = get_mla_metadata_dense_fp8(seq_lens, 16, 1)
        FIX
        schedule = SimpleNamespace(tile_scheduler_metadata=rows, num_splits=splits)
        return SimpleNamespace(block_table=block_table, seq_lens=seq_lens, scheduler_metadata=schedule)

class FlashMLAImpl:
    def forward_mqa(self, q, kv_cache, attn_metadata, layer):
        return None
"""
FIX = (
    "self.cg_buf_num_splits[:2].copy_(splits); splits = self.cg_buf_num_splits[:2]; "
    "self.cg_buf_tile_scheduler_metadata"
)
PROCESS = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
from stalegraph.vllm.hotfix import register
register()
register()
assert "vllm" not in sys.modules and "torch" not in sys.modules
import torch
from vllm.v1.attention.backends.mla import flashmla
builder, rows = flashmla.FlashMLAMetadataBuilder(), torch.tensor([[-1]], dtype=torch.int32)
built = [builder._build_decode(rows, torch.tensor([700], dtype=torch.int32)) for _ in range(2)]
print("stable", len({made.scheduler_metadata.num_splits.data_ptr() for made in built}) == 1)
print("padding", rows.item())
"""


@pytest.mark.parametrize(
    "version, fixed, environment, stable, padding, level",
    [
        ("0.15.0", False, {}, True, 0, "INFO"),
        ("0.18.1", False, {"STALEGRAPH_HOTFIX": "copying"}, True, 0, "INFO"),
        ("0.15.0", False, {"STALEGRAPH_HOTFIX": "off"}, False, -1, None),
        ("0.20.2", True, {}, True, -1, None),
        ("0.34.0", False, {}, False, -1, "WARNING"),
        ("0.15.0", True, {}, True, -1, "WARNING"),
    ],
)
def test_the_entry_point_in_a_fresh_process(tmp_path, version, fixed, environment, stable, padding, level):
    folder = tmp_path / "vllm" / affected_module.SOURCE.parent
    folder.mkdir(parents=True)
    (folder / "flashmla.py").write_text(STAND_IN.replace("FIX", FIX if fixed else "pass"))
    dist_info = tmp_path / f"vllm-{version}.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STALEGRAPH_")}
    environment = {**clean, "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    *logged, stability, rows = done.stdout.splitlines()
    assert (stability, rows) == (f"stable {stable}", f"padding {padding}")
    # Each register() of an unknown release warns; everything else is said once.
    expected = {None: [], "INFO": ["INFO"], "WARNING": ["WARNING"] * 2}[level]
    assert [line.split(" ")[0] for line in logged] == expected


# ------------------------------------------------------------------------------------------- is it affected


AFFECTED_SOURCE = "class FlashMLAMetadataBuilder:\n    def _build_decode(self):\n        return self.plan()\n"
COPY = "self.cg_buf_tile_scheduler_metadata[:1].copy_(self.plan())\n        return"
FIXED_SOURCE = AFFECTED_SOURCE.replace("return", COPY)


@pytest.mark.parametrize(
    "version, source, affected, word",
    [
        ("0.15.0", AFFECTED_SOURCE, True, "has bug #33638"),
        ("0.18.1+cu129", AFFECTED_SOURCE, True, "has bug #33638"),
        ("0.14.1", FIXED_SOURCE, False, "padded block-table rows are -1"),
        ("0.19.1", FIXED_SOURCE, False, "padded block-table rows are -1"),
        ("0.20.2", FIXED_SOURCE, False, "in place"),
        ("0.15.0", FIXED_SOURCE, None, "by its version"),
        ("0.20.2", AFFECTED_SOURCE, None, "by its source"),
        ("0.34.0", FIXED_SOURCE, None, "outside the release map"),
        ("0.16.0rc1", AFFECTED_SOURCE, None, "outside the release map"),
        ("0.15.1.dev3+gabc", AFFECTED_SOURCE, None, "outside the release map"),
        ("0.15.0", "class Another: pass\n", None, "to read"),
        ("0.15.0", None, None, "to read"),
        (None, None, None, "not installed"),
    ],
)
def test_version_and_source_must_agree(monkeypatch, version, source, affected, word):
    monkeypatch.setattr(affected_module, "installed_version", lambda: version)
    monkeypatch.setattr(affected_module, "installed_source", lambda: source)
    found, why = affected_module.diagnose()
    assert found is affected
    assert word in why


def test_the_source_is_read_without_importing_vllm(monkeypatch, tmp_path):
    folder = tmp_path / "vllm" / affected_module.SOURCE.parent
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / affected_module.SOURCE.name).write_text(AFFECTED_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert affected_module.installed_source() == AFFECTED_SOURCE
    assert "vllm" not in sys.modules


def test_the_plugin_modules_import_neither_torch_nor_vllm():
    code = (
        "import stalegraph.vllm.hotfix, stalegraph.vllm.guard, sys; "
        "print([name for name in ('torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_both_plugins_are_registered():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    table = text.split('[project.entry-points."vllm.general_plugins"]')[1].split("[")[0]
    entries = dict(line.replace('"', "").split(" = ") for line in table.strip().splitlines())
    assert entries == {
        "stalegraph_hotfix": "stalegraph.vllm.hotfix:register",
        "stalegraph_guard": "stalegraph.vllm.guard:register",
    }
    for value in entries.values():
        module, _, name = value.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
