"""The decode loop: prefill, one graph captured per batch size, one replay per token; the same code on sim and CUDA.

As vLLM does it: persistent input buffers, metadata built outside the capture from seq_lens of 1, the forward pass
captured, batches padded up to a captured size with rows of seq_len 0. What differs between runs is the builder, and
what becomes of the metadata that the capture saw.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

import torch

from stalegraph import schedule
from stalegraph.builders import FIELDS, Builder, make_builder
from stalegraph.errors import DeviceAssertError, IllegalAddressError, UsageError
from stalegraph.reciter import MAX_POSITIONS, Reciter, Said, check_prompt, expected, rotations

LIVES = ("kept", "taken", "lucky")
MODES = ("graph", "eager")
CAPTURE_SIZES = (1, 2, 4, 8)
MAX_BATCH = 1024
PLANNED = ("tile_scheduler_metadata", "num_splits")


@dataclass(frozen=True)
class StepAddresses:
    """Where a field lay when the graph was captured, and where this step's build put it."""

    step: int
    field: str
    captured: int
    built: int


@dataclass
class DecodeRun:
    """What one run did. Addresses and sizes in bytes; `accuracy` is the fraction of right bytes over all requests."""

    rung: str
    builder: str
    mode: str
    life: str
    prompt: bytes
    batch: int
    padded_batch: int
    tokens: int
    num_heads: int
    sm_count: int
    texts: list[bytes] = field(default_factory=list)
    expected: list[bytes] = field(default_factory=list)
    addresses: list[StepAddresses] = field(default_factory=list)
    build_counters: list[dict] = field(default_factory=list)  # on hardware launches and copies in the last one alone
    step_counters: list[dict] = field(default_factory=list)
    build_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    captured_addresses: dict[int, dict[str, int]] = field(default_factory=dict)
    history: list[dict] = field(default_factory=list)
    takers: list[dict] = field(default_factory=list)
    schedule_captured: dict | None = None
    schedule_needed: dict | None = None
    schedule_obeyed: dict | None = None
    stale_reads: list[dict] = field(default_factory=list)
    nodes: int = 0
    failure: dict | None = None

    @property
    def said(self) -> list[Said]:
        return [Said(text, want) for text, want in zip(self.texts, self.expected)]

    @property
    def accuracy(self) -> float:
        return sum(one.accuracy for one in self.said) / len(self.said)

    @property
    def first_wrong(self) -> list[int | None]:
        return [one.first_wrong for one in self.said]

    @property
    def accuracy_per_token(self) -> list[float]:
        """For each new token, the fraction of requests that had it right."""
        marks = [one.right + [False] * (self.tokens - len(one.right)) for one in self.said]
        return [sum(column) / len(column) for column in zip(*marks)]

    @property
    def stale_fields(self) -> list[str]:
        """Fields that some step built elsewhere than where the graph reads them."""
        moved = {at.field for at in self.addresses if at.built != at.captured}
        return [name for name in FIELDS if name in moved]

    def to_json(self) -> dict:
        """A JSON-able dict; bytes as lists of ints are written as hex strings."""
        record = asdict(self)
        record |= {"accuracy": self.accuracy, "first_wrong": self.first_wrong, "stale_fields": self.stale_fields}
        record["prompt"] = self.prompt.hex()
        record["texts"] = [text.hex() for text in self.texts]
        record["expected"] = [text.hex() for text in self.expected]
        return record


class Engine:
    """Buffers, cache, model and graphs of one run on `device`; `run` drives it."""

    def __init__(self, device, builder, prompt, batch, tokens, num_heads, capture_sizes, pad_block, sanitize_padding):
        self.device, self.batch, self.tokens, self.pad_block = device, batch, tokens, pad_block
        self.prompts = rotations(prompt, batch)
        self.padded = next(size for size in capture_sizes if size >= batch)
        self.capture_sizes = sorted((size for size in capture_sizes if size <= self.padded), reverse=True)
        self.max_blocks = schedule.blocks_of(len(prompt) + tokens)
        where = device.torch_device
        rows = self.padded
        # The cache comes first, as an engine's largest block: the page before it belongs to nobody.
        pages = 1 + batch * self.max_blocks
        self.cache_bytes = torch.zeros((pages, schedule.BLOCK_SIZE, 1, 576), dtype=torch.uint8, device=where)
        self.cache = self.cache_bytes.view(torch.float8_e4m3fn)
        self.rows = self.cache_bytes.view(-1, 576)
        self.token_ids = torch.zeros((rows,), dtype=torch.int64, device=where)
        self.positions = torch.zeros((rows,), dtype=torch.int64, device=where)
        self.slots = torch.zeros((rows,), dtype=torch.int64, device=where)
        self.seq_lens = torch.ones((rows,), dtype=torch.int32, device=where)
        self.block_table = torch.zeros((rows, self.max_blocks), dtype=torch.int32, device=where)
        self.next_ids = torch.zeros((rows,), dtype=torch.int64, device=where)
        self.model = Reciter(len(prompt), num_heads, device=where)
        self.model.load()
        sizes = dict(
            num_heads=num_heads, max_batch=rows, max_blocks=self.max_blocks, sm_count=device.sm_count, device=where,
            sanitize_padding=sanitize_padding,
        )  # fmt: skip
        self.builder = make_builder(builder, **sizes) if isinstance(builder, str) else builder(**sizes)
        self.graphs = {}
        self.views: dict[int, tuple] = {}  # seq_lens and block_table of each captured size, the same tensors every step
        self.captured_addresses: dict[int, dict[str, int]] = {}
        self.captured_plan = None
        self.held = []  # what keeps blocks taken

    def forward(self, metadata, size: int) -> None:
        """One step for the first `size` rows: next token ids into `next_ids`."""
        hidden = self.model.hidden(self.token_ids[:size])
        positions = self.positions[:size]
        normed = self.model.normed(hidden)
        self.rows.index_copy_(0, self.slots[:size], self.model.keys(normed, positions).view(torch.uint8))
        attended = self.model.attention(self.model.queries(normed, positions), self.cache, metadata)
        self.next_ids[:size].copy_(self.model.logits(hidden, attended).argmax(1))

    def build(self, size: int, longest: int):
        if size not in self.views:
            self.views[size] = self.seq_lens[:size], self.block_table[:size]
        return self.builder.build(*self.views[size], longest)

    def capture(self, life: str) -> None:
        """One graph a size, largest first, sharing a pool; the metadata of each capture lives on as `life` says."""
        pool = None
        for size in self.capture_sizes:
            metadata = self.build(size, 1)
            self.builder.head(metadata)
            self.forward(metadata, size)  # warms up: a capture must not load kernels
            del metadata
            metadata = self.build(size, 1)
            self.captured_addresses[size] = {name: getattr(metadata, name).data_ptr() for name in FIELDS}
            if size == self.padded:
                self.captured_plan = self.plan_of(metadata)
                for name in PLANNED:
                    self.device.label(getattr(metadata, name), f"{name} at capture")
            graph = self.device.graph(pool=pool)
            with graph.capture():
                self.builder.head(metadata)
                self.forward(metadata, size)
            pool = graph.pool()
            self.graphs[size] = graph
            if life == "kept":
                self.held.append(metadata)
            del metadata

    def plan_of(self, metadata) -> dict:
        rows = self.device.to_host(metadata.tile_scheduler_metadata).tolist()
        return {"tile_scheduler_metadata": rows, "num_splits": self.device.to_host(metadata.num_splits).tolist()}

    def take_blocks(self, name: str, value: float) -> list[dict]:
        """Two float32 tensors as large as the planner's, held from now on: a sampler's, say. Where they came to lie."""
        takers = []
        where = self.device.torch_device
        sizes = {"tile_scheduler_metadata": self.builder.num_sm_parts * 8, "num_splits": self.padded + 1}
        for what, count in sizes.items():
            taken = torch.full((count,), value, dtype=torch.float32, device=where)
            self.device.label(taken, name)
            self.held.append(taken)
            address = taken.data_ptr()
            meets = any(places[what] == address for places in self.captured_addresses.values())
            takers.append({"name": name, "as_large_as": what, "address": address, "on_captured": meets,
                           "step": self.device.step})  # fmt: skip
        return takers

    def prefill(self) -> None:
        """Keys of all prompt tokens but the last, which the first decode step takes; padded rows get their sentinel."""
        where = self.device.torch_device
        pages = 1 + torch.arange(self.batch * self.max_blocks, dtype=torch.int32, device=where)
        self.block_table[: self.batch].copy_(pages.view(self.batch, self.max_blocks))
        self.block_table[self.batch :].fill_(self.pad_block)
        self.seq_lens[self.batch :].fill_(0)
        known = len(self.prompts[0]) - 1
        if known:
            positions = torch.arange(known, device=where)
            for request, prompt in enumerate(self.prompts):
                ids = torch.tensor(list(prompt[:-1]), dtype=torch.int64, device=where)
                first = schedule.BLOCK_SIZE * (1 + request * self.max_blocks)
                keys = self.model.keys(self.model.normed(self.model.hidden(ids)), positions)
                self.rows[first : first + known].copy_(keys.view(torch.uint8))

    def put(self, target: torch.Tensor, values: list[int]) -> None:
        """Host numbers into the head of a persistent buffer."""
        with self.device.host():
            host = torch.tensor(values, dtype=target.dtype)
        target[: len(values)].copy_(host)

    def set_inputs(self, last: list[int], step: int) -> None:
        """Token, position, length and cache slot of each live request for this step."""
        position = len(self.prompts[0]) - 1 + step
        self.put(self.token_ids, last)
        self.put(self.positions, [position] * self.batch)
        self.put(self.seq_lens, [position + 1] * self.batch)
        start = [schedule.BLOCK_SIZE * (1 + request * self.max_blocks) for request in range(self.batch)]
        self.put(self.slots, [first + position for first in start])


def _counts(value, low: int, high: int) -> bool:
    """Whether `value` is an integer from `low` to `high`, both included; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _check(builder, prompt, batch, tokens, mode, life, capture_sizes, pad_block, sanitize_padding, theft_step):
    check_prompt(prompt)
    if not _counts(tokens, 1, MAX_POSITIONS - len(prompt)):
        raise UsageError(f"tokens is {tokens!r}; allowed: 1 to {MAX_POSITIONS - len(prompt)} after {len(prompt)} bytes")
    if mode not in MODES:
        raise UsageError(f"mode is {mode!r}; allowed: {', '.join(MODES)}")
    if life not in LIVES:
        raise UsageError(f"life is {life!r}; allowed: {', '.join(LIVES)}")
    if pad_block not in (-1, 0):
        raise UsageError(f"pad_block is {pad_block!r}; allowed: -1 (vLLM through 0.19.1) or 0 (from 0.20.0)")
    if not _counts(batch, 1, MAX_BATCH):
        raise UsageError(f"batch is {batch!r}; allowed: 1 to {MAX_BATCH}")
    if not isinstance(builder, str) and not callable(builder):
        raise UsageError(f"builder is {builder!r}; allowed: a name or a class")
    if sanitize_padding not in (None, True, False):
        raise UsageError(f"sanitize_padding is {sanitize_padding!r}; allowed: True, False, None (builder's own)")
    if theft_step is not None and not _counts(theft_step, 0, tokens - 1):
        raise UsageError(f"theft_step is {theft_step!r}; allowed: 0 to {tokens - 1}, a step of this run")
    iterable = isinstance(capture_sizes, (tuple, list))
    if not iterable or not capture_sizes or not all(_counts(size, 1, MAX_BATCH) for size in capture_sizes):
        raise UsageError(f"capture_sizes is {capture_sizes!r}; allowed: a tuple of batch sizes from 1 to {MAX_BATCH}")
    sizes = sorted(set(capture_sizes))
    while sizes[-1] < batch:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def run(
    device,
    *,
    builder="regressed",
    prompt: bytes,
    batch: int = 1,
    tokens: int = 250,
    mode: str = "graph",
    life: str = "taken",
    num_heads: int = 16,
    capture_sizes=CAPTURE_SIZES,
    pad_block: int = -1,
    sanitize_padding: bool | None = None,
    theft_step: int | None = None,
) -> DecodeRun:
    """Recite `tokens` bytes after `prompt` for `batch` requests on an entered device, and record what happened.

    `builder` is a name of `builders.BUILDERS` or a class with Builder's constructor. `life` says what becomes of the
    metadata that captures saw: "kept" (alive, so replays obey the plan for length 1: each request's first block and no
    other), "taken" (freed, its blocks taken by other tensors at once), or "lucky" (freed, and each step's fresh
    metadata lands on it until `theft_step`, by default a third of the way, when other tensors take the blocks). Sizes
    beyond the largest capture size are doubled up to. A crash of the device ends the run and is recorded in `failure`;
    bad input raises UsageError.
    """
    sizes = _check(
        builder, prompt, batch, tokens, mode, life, capture_sizes, pad_block, sanitize_padding, theft_step
    )  # fmt: skip
    theft_step = max(1, tokens // 3) if theft_step is None else theft_step
    engine = Engine(device, builder, bytes(prompt), batch, tokens, num_heads, sizes, pad_block, sanitize_padding)
    size = engine.padded if mode == "graph" else batch
    record = DecodeRun(
        rung="sim" if device.torch_device.type == "cpu" else "flashmla",
        builder=builder if isinstance(builder, str) else builder.name,
        mode=mode, life=life, prompt=bytes(prompt), batch=batch, padded_batch=size, tokens=tokens,
        num_heads=num_heads, sm_count=device.sm_count, expected=[expected(one, tokens) for one in engine.prompts],
    )  # fmt: skip
    try:
        if mode == "graph":
            engine.capture(life)
            record.captured_addresses = engine.captured_addresses
            record.schedule_captured = engine.captured_plan
            record.nodes = len(engine.graphs[size].nodes)
        engine.prefill()
        if mode == "graph" and life == "taken":
            record.takers += engine.take_blocks("sampler state", 1.0)
        texts = [bytearray() for _ in range(batch)]
        record.texts = texts
        _decode(engine, record, size, life, theft_step)
    except (IllegalAddressError, DeviceAssertError) as error:
        record.failure = {"kind": type(error).__name__, "message": str(error), "step": device.step}
    except RuntimeError as error:
        if "CUDA error" not in str(error):
            raise
        record.failure = {"kind": type(error).__name__, "message": str(error).splitlines()[0], "step": device.step}
    record.texts = [bytes(text) for text in record.texts]
    _note_memory(engine, record)
    if record.build_counters and record.failure is None and record.build_counters[-1]["launches"] is None:
        # Hardware does not count launches, so one more build is captured and its nodes are counted.
        record.build_counters[-1] |= device.counted(lambda: engine.build(size, len(prompt) + tokens))
    return record


def _decode(engine, record, size, life, theft_step) -> None:
    device, graph_mode = engine.device, record.mode == "graph"
    captured = engine.captured_addresses.get(size)
    last = [prompt[-1] for prompt in engine.prompts]
    metadata = None
    for step in range(record.tokens):
        device.step = step
        started, before = time.perf_counter(), device.counters.snapshot()
        engine.set_inputs(last, step)
        del metadata  # the block of the step before is free again when this step builds
        if graph_mode and life == "lucky" and step == theft_step:
            record.takers += engine.take_blocks("logprobs", -0.5)
        built_at, built_before = time.perf_counter(), device.counters.snapshot()
        metadata = engine.build(size, len(engine.prompts[0]) + step)
        record.build_seconds.append(time.perf_counter() - built_at)
        record.build_counters.append(asdict(device.counters - built_before))
        if graph_mode:
            for name in FIELDS:
                built = getattr(metadata, name).data_ptr()
                record.addresses.append(StepAddresses(step, name, captured[name], built))
            engine.graphs[size].replay()
        else:
            engine.builder.head(metadata)
            engine.forward(metadata, size)
        last = device.to_host(engine.next_ids[: engine.batch]).tolist()
        for text, byte in zip(record.texts, last):
            text.append(byte)
        record.step_seconds.append(time.perf_counter() - started)
        record.step_counters.append(asdict(device.counters - before))
        if graph_mode and step == record.tokens - 1:
            record.schedule_obeyed = _plan_at(device, captured, record.schedule_captured)
            lens = [len(engine.prompts[0]) + step] * engine.batch + [0] * (size - engine.batch)
            rows, splits = schedule.plan(lens, engine.builder.num_sm_parts)
            needed = {"tile_scheduler_metadata": rows.tolist(), "num_splits": splits.tolist()}
            record.schedule_needed = {"seq_lens": lens} | needed


def _plan_at(device, captured, shape) -> dict | None:
    """What lies at the captured addresses now, read as a plan; None where the device cannot read raw addresses."""
    memory = getattr(device, "memory", None)
    if memory is None:
        return None
    found = {}
    for name in PLANNED:
        like = torch.tensor(shape[name])
        raw = memory.read(captured[name], 4 * like.numel())
        found[name] = device.to_host(raw).view(torch.int32).view(like.shape).tolist()
    return found


def _note_memory(engine, record) -> None:
    """The life of the blocks that the captured schedule lay in, and the stale reads, where the device keeps them."""
    blocks = {places[name] for places in engine.captured_addresses.values() for name in PLANNED}
    for event in getattr(engine.device, "history", None) or ():
        if event.address in blocks:
            record.history.append(asdict(event))
    for read in getattr(engine.device, "stale_reads", None) or ():
        record.stale_reads.append(asdict(read))
