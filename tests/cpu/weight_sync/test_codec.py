"""Encodings: exact round trips, against a decoder written from FORMAT.md, and hardness against any bytes."""

import importlib.util
import json
import math
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron import weight_sync as ws
from megatron.weight_sync import codec, container, payload
from megatron.weight_sync.fingerprints import bits_of

spec = importlib.util.spec_from_file_location("plain_decoder", Path(__file__).with_name("plain_decoder.py"))
plain = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plain)

FULL = os.environ.get("TEST_FULL") == "1"


def fuzz(examples):
    """Fixed examples in the usual run, many random ones in the full one."""
    return settings(max_examples=examples * (50 if FULL else 1), deadline=None, derandomize=not FULL)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def changes(numel, density, dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    index = (torch.rand(numel, generator=gen) < density).nonzero().view(-1)
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    old = torch.randint(torch.iinfo(width).min, torch.iinfo(width).max, (len(index),), generator=gen).to(
        width
    )
    near = torch.randint(-40, 40, (len(index),), generator=gen).to(width)
    new = torch.where(torch.rand(len(index), generator=gen) < 0.9, codec.ulp_apply(old, near), old.flip(0))
    return index, new, old


@pytest.mark.parametrize("density", [0.0005, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("encoding", codec.ENCODINGS)
@pytest.mark.parametrize("start", [8, 16])
def test_round_trip(encoding, dtype, density, start):
    numel = 90001
    index, new, old = changes(numel, density, dtype, seed=round(density * 1000) + start)
    for distance in (None, codec.ulp_between(old, new)):
        parts, head = codec.encode_group(index, new, distance, numel, start, (encoding,))
        head = json.loads(json.dumps(head))
        got, value, relative = codec.decode_group(head, dict(parts), numel, dtype.itemsize, numel)
        assert torch.equal(got, index) and got.dtype == torch.int64
        assert relative == (encoding == "entropy" and distance is not None)
        assert (
            torch.equal(codec.ulp_apply(old, value) if relative else value, new) and value.dtype == new.dtype
        )


@pytest.mark.parametrize("width", [torch.int16, torch.int32], ids=str)
def test_ulp_distances(width):
    """Neighbouring floats are one apart, across zero too; any bits to any bits, and back."""
    dtype = {torch.int16: torch.bfloat16, torch.int32: torch.float32}[width]
    if width == torch.int16:
        every = torch.arange(-(1 << 15), 1 << 15).to(width)
    else:
        every = torch.randint(
            -(1 << 31), (1 << 31) - 1, (1 << 16,), generator=torch.Generator().manual_seed(1)
        ).to(width)
    other = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(2))]
    assert torch.equal(codec.ulp_apply(every, codec.ulp_between(every, other)), other)
    tiny = torch.tensor([1, 0, -(1 << (8 * width.itemsize - 1)), 1 - (1 << (8 * width.itemsize - 1))]).to(
        width
    )
    assert codec.ulp_between(tiny[:-1], tiny[1:]).tolist() == [-1, -1, -1]
    value = every.view(dtype)[every.view(dtype).isfinite()].float().sort().values
    key = codec._monotone(value.to(dtype).view(width))
    rises = value[1:] > value[:-1]
    assert rises.sum() > 60_000 and bool((key[1:] > key[:-1])[rises].all())


def test_the_smallest_encoding_wins():
    index, new, old = changes(200_000, 0.01, torch.bfloat16, 3)
    sizes = {}
    for encodings in (("raw",), ("raw", "packed"), ("raw", "packed", "entropy")):
        parts, head = codec.encode_group(index, new, codec.ulp_between(old, new), 200_000, 8, encodings)
        sizes[head["encoding"]] = sum(t.numel() * t.element_size() for t in parts.values()) / len(index)
    assert sizes["raw"] == 6 and sizes["packed"] <= 3.2 and sizes["entropy"] < 2.5, sizes


@pytest.mark.parametrize(("density", "bound"), [(0.1, 1.10), (0.01, 1.10), (0.001, 1.10)])
def test_entropy_is_near_the_empirical_entropy(density, bound):
    """Gaps of a uniform draw and steps as bf16 training makes them: mostly one unit, either way."""
    rng = np.random.default_rng(5)
    gap = rng.geometric(density, 300_000)
    step = np.where(rng.random(len(gap)) < 0.9, 1, 1 + rng.geometric(0.4, len(gap)))
    step = step * rng.choice([-1, 1], len(gap))
    index = torch.from_numpy(gap.cumsum() - 1)
    distance = torch.from_numpy(step).to(torch.int16)
    (gaps,) = codec.gap_counts([index])
    start, _ = codec.plan_tensor(index, distance, distance, gaps, codec.ENCODINGS, int(index[-1]) + 1)
    parts, head = codec.encode_group(index, distance, distance, int(index[-1]) + 1, start, ("entropy",))
    got, value, _ = codec.decode_group(head, dict(parts), int(index[-1]) + 1, 2, 1 << 40)
    assert torch.equal(got, index) and torch.equal(value, distance)
    size = sum(t.numel() for t in parts.values()) * 8 / len(gap)
    limit = sum(
        -(p * np.log2(p)).sum() for p in (np.unique(x, return_counts=True)[1] / len(gap) for x in (gap, step))
    )
    assert 0.98 <= size / limit <= bound, (size, limit, size / limit)


def test_indices_beyond_2_31():
    """A stand-in: the group says it has 2**33 elements, the changes are few."""
    numel = (1 << 33) + 7
    index = torch.tensor([0, 5, (1 << 31) - 1, 1 << 31, (1 << 32) + 3, numel - 1])
    value = torch.arange(6).to(torch.int16)
    for encoding in codec.ENCODINGS:
        for start in (8, 16):
            parts, head = codec.encode_group(index, value, None, numel, start, (encoding,))
            got, bits, _ = codec.decode_group(head, dict(parts), numel, 2, 1 << 40)
            assert torch.equal(got, index) and torch.equal(bits, value)


@pytest.mark.parametrize("encodings", [("raw",), ("packed",), ("entropy",), codec.ENCODINGS], ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_plain_decoder_reads_every_payload(encodings, exact):
    """FORMAT.md is enough to read a payload: several tensors per group, several groups, distances and
    bits."""
    gen = torch.Generator().manual_seed(11)
    shapes = {"a": (13, 7), "b": (0,), "c": (), "d": (301,), "e": (40, 9), "f": (5,)}
    dtypes = dict(
        zip(
            shapes,
            [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float16],
            strict=True,
        )
    )
    old = {n: torch.randn(s, generator=gen).to(dtypes[n]) for n, s in shapes.items()}
    new = {n: t.clone() for n, t in old.items()}
    sender = ws.Sender("m", lineage=3, encodings=encodings, exact_base=exact)
    dense = sender.begin()
    for name, tensor in old.items():
        dense.add_dense(name, tensor)
    first = dense.finish(ws.fingerprint(old)).to_bytes()
    held = {}
    for data in first[:-1]:
        plain.apply(held, data)
    update = sender.begin()
    for name, tensor in new.items():
        flat = tensor.view(-1)
        hit = (torch.rand(len(flat), generator=gen) < 0.2).nonzero().view(-1)
        flat[hit] = torch.where(hit % 3 == 0, -flat[hit], flat[hit] * 1.02)
        update.add_delta(name, hit, flat[hit], tensor.shape, full=tensor, old=old[name].view(-1)[hit])
    for data in update.finish(ws.fingerprint(new)).to_bytes()[:-1]:
        plain.apply(held, data)
    for name, tensor in new.items():
        width = 8 * tensor.element_size()
        assert held[name] == [int(x) % (1 << width) for x in bits_of(tensor).view(-1)], name


# ---- any bytes ---------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["count", "encoding", "gap", "codec", "value", "ulp"])
heads = st.dictionaries(
    keys,
    st.sampled_from([0, 1, 3, 4, 8, 16, 64, 1 << 70, -1, "raw", "packed", "entropy", "zstd", "bits", "ulp"])
    | json_values,
)
names = st.sampled_from(
    [
        "index",
        "value",
        "gap8",
        "gap16",
        "gap64",
        "gap8.0",
        "gap16.0",
        "gap16.1",
        "value16.0",
        "value16.1",
        "ulp4.0",
        "ulp8.0",
        "ulp16.0",
        "ulp16.1",
    ]
)
arrays = st.tuples(
    st.sampled_from([torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64]),
    st.binary(max_size=40),
).map(
    lambda pair: torch.frombuffer(bytearray(pair[1] + bytes(8))[: (len(pair[1]) // 8 + 1) * 8], dtype=pair[0])
)


@fuzz(300)
@given(
    head=heads, parts=st.dictionaries(names, arrays, max_size=5), numel=st.sampled_from([0, 3, 100, 1 << 40])
)
def test_decoder_answers_any_group(head, parts, numel):
    try:
        index, value, _ = codec.decode_group(head, parts, numel, 2, 1000)
    except ws.WeightSyncError:
        return
    assert len(index) == len(value) and (index >= 0).all() and (index < numel).all()
    assert len(index.unique()) == len(index)


def valid_group():
    index, new, old = changes(5000, 0.05, torch.bfloat16, 9)
    return [
        codec.encode_group(index, new, codec.ulp_between(old, new), 5000, start, (encoding,))
        for encoding in codec.ENCODINGS
        for start in (8, 16)
    ]


@fuzz(300)
@given(st.data())
def test_decoder_answers_damaged_groups(data):
    """Well-formed parts with bytes changed, cut or swapped, as if the digest had been made after the
    damage."""
    parts, head = data.draw(st.sampled_from(valid_group()))
    parts = {name: tensor.clone() for name, tensor in parts.items()}
    name = data.draw(st.sampled_from(sorted(parts)))
    raw = parts[name].view(torch.uint8)
    how = data.draw(st.sampled_from(["flip", "cut", "drop", "swap", "count"]))
    if how == "flip" and len(raw):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        parts[name] = parts[name][: data.draw(st.integers(0, len(parts[name])))]
    elif how == "drop":
        del parts[name]
    elif how == "swap":
        other = data.draw(st.sampled_from(sorted(parts)))
        parts[name], parts[other] = parts[other], parts[name]
    else:
        head = {**head, "count": data.draw(st.integers(0, 6000))}
    try:
        index, value, _ = codec.decode_group(head, parts, 5000, 2, 5000)
    except ws.WeightSyncError:
        return
    assert len(index) == len(value) and (not len(index) or (index[0] >= 0 and index[-1] < 5000))
    assert bool((index[1:] > index[:-1]).all())


@fuzz(300)
@given(st.binary(max_size=300) | json_values.map(lambda v: wrap(json.dumps(v).encode())))
def test_reader_answers_any_bytes(data):
    with pytest.raises(ws.WeightSyncError):
        container.read(data)


def wrap(header, body=b""):
    return len(header).to_bytes(8, "little") + header + body


metadata = st.fixed_dictionaries(
    {
        "format": st.just(payload.FORMAT),
        "kind": st.just("bucket"),
        "lineage": st.just("1"),
        "version": st.just("2"),
    },
    optional={
        "tensors": json_values.map(json.dumps)
        | st.lists(
            st.fixed_dictionaries(
                {
                    "name": st.sampled_from(["a", "b", ""]),
                    "dtype": st.sampled_from(["BF16", "F32", "X"]),
                    "shape": st.lists(st.integers(0, 4) | st.just(1 << 62), max_size=3),
                },
                optional={"group": st.integers(-1, 2)},
            ),
            max_size=3,
        ).map(json.dumps),
        "groups": st.lists(heads, max_size=3).map(json.dumps) | json_values.map(json.dumps),
    },
)
entries = st.dictionaries(
    st.sampled_from(["a", "b", ":0:gap8", ":0:value", ":1:index", ":x:y", "::"]), arrays, max_size=4
)


@fuzz(300)
@given(metadata, entries, st.sampled_from([None, (1, 1)]))
def test_reader_answers_any_bucket_with_a_valid_digest(meta, parts, base):
    data, digest = container.write(parts, meta)
    manifest = payload.Manifest("m", 1, 2, base, (digest,), {"a": 0, "b": 0}, 0)
    try:
        records = payload.read_bucket(data, manifest)
    except ws.WeightSyncError:
        return
    for record in records:
        assert record.index is None or bool((record.index < record.numel).all())


@fuzz(200)
@given(
    st.dictionaries(
        st.sampled_from(["base", "buckets", "names", "fingerprint", "version", "lineage", "model_id"]),
        st.text(max_size=6) | json_values.map(json.dumps) | st.sampled_from(["1-1", "2-1", "9", "-", "²"]),
    ),
    st.dictionaries(st.sampled_from(["sums", "other"]), arrays, max_size=2),
)
def test_reader_answers_any_manifest_with_a_valid_digest(meta, parts):
    data, _ = container.write(parts, {"format": payload.FORMAT, "kind": "manifest", **meta})
    try:
        payload.read_manifest(data)
    except ws.WeightSyncError:
        pass


def test_no_allocation_beyond_the_payload():
    """A few bytes that claim 2**40 changes, or a frame that claims 2**40 bytes, are refused before any memory
    is taken; a limit on the address space would turn a mistake into MemoryError."""
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 24))
    plane = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
    head = {"encoding": "entropy", "codec": "zstd", "gap": 8, "value": "bits", "count": 1 << 40}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ws.CorruptPayload, match="cannot have"):
        codec.decode_group(head, {"gap8.0": plane}, 1 << 50, 2, 1000)
    with pytest.raises(ws.CorruptPayload, match="does not hold 5 bytes"):
        codec.decode_group({**head, "count": 5}, {"gap8.0": plane}, 100, 2, 100)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10  # kilobytes


def test_a_frame_of_another_size_is_never_decompressed(monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    plane = torch.frombuffer(bytearray(zstandard.compress(bytes(100))), dtype=torch.uint8)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", None)
    head = {"encoding": "entropy", "codec": "zstd", "gap": 8, "value": "bits", "count": 5}
    with pytest.raises(ws.CorruptPayload, match="does not hold 5 bytes"):
        codec.decode_group(head, {"gap8.0": plane}, 100, 2, 100)


def frames(data, size, stated=True):
    """Zstandard frames of ``size`` bytes of content each, end to end."""
    zstandard = pytest.importorskip("zstandard")
    compressor = zstandard.ZstdCompressor(write_content_size=stated)
    cut = [compressor.compress(data[k : k + size]) for k in range(0, len(data), size)]
    return torch.frombuffer(bytearray(b"".join(cut)), dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 3, 5, 7, 16, 17])
def test_a_plane_of_several_frames(size):
    gaps, low, high = bytes(range(17)), bytes(range(17, 34)), bytes(range(100, 117))
    head = {"encoding": "entropy", "codec": "zstd", "gap": 8, "value": "bits", "count": 17}
    parts = {"gap8.0": frames(gaps, size), "value16.0": frames(low, 17), "value16.1": frames(high, size)}
    index, bits, relative = codec.decode_group(head, parts, 1000, 2, 1000)
    assert index.tolist() == [sum(range(k + 1)) + k for k in range(17)] and not relative
    assert bits.tolist() == [a + 256 * b for a, b in zip(low, high, strict=True)]


@pytest.mark.parametrize(
    "plane",
    [
        lambda: frames(bytes(18), 5),
        lambda: frames(bytes(16), 5),
        lambda: frames(bytes(17), 17)[:-1],
        lambda: frames(bytes(17), 5)[:-3],
        lambda: torch.cat([frames(bytes(17), 17), frames(bytes(1 << 24), 1 << 24)]),
        lambda: frames(bytes(17), 17, stated=False),
        lambda: torch.cat([frames(bytes(17), 9), torch.full((4,), 7, dtype=torch.uint8)]),
    ],
    ids=["longer", "shorter", "cut", "cut-later", "bomb-behind", "unstated", "trailing"],
)
def test_frames_that_do_not_make_the_plane(plane):
    head = {"encoding": "entropy", "codec": "zstd", "gap": 8, "value": "bits", "count": 17}
    parts = {"gap8.0": plane(), "value16.0": frames(bytes(17), 17), "value16.1": frames(bytes(17), 17)}
    with pytest.raises(ws.CorruptPayload, match=r"gap8\.0"):
        codec.decode_group(head, parts, 1000, 2, 1000)


class NvcompStandIn:
    """What gpu_zstd uses of nvCOMP's Python module, on the CPU."""

    class BitstreamKind:
        RAW = object()

    __version__ = "stand-in"
    stated = True

    @staticmethod
    def as_arrays(buffer, offsets, sizes, stream):
        assert buffer.data_ptr() % 16 == 0 and stream == 7 and all(k % 16 == 0 for k in offsets)
        return [buffer[a : a + n] for a, n in zip(offsets, sizes, strict=True)]

    class Codec:
        def __init__(self, algorithm, bitstream_kind, cuda_stream):
            assert (algorithm, bitstream_kind, cuda_stream) == ("zstd", NvcompStandIn.BitstreamKind.RAW, 7)

        def encode(self, batch):
            return [frames(x.numpy().tobytes(), len(x), NvcompStandIn.stated) for x in batch]


@pytest.mark.parametrize("n", [1, 1 << 17, (1 << 17) + 1, 400_001])
def test_frames_by_nvcomp(n):
    zstandard = pytest.importorskip("zstandard")
    from megatron.weight_sync import gpu_zstd

    torch.manual_seed(n)
    plane = torch.randint(0, 5, (n + 3,), dtype=torch.uint8)[3:]  # at an odd address
    made = gpu_zstd.compress(plane, NvcompStandIn, 7).numpy().tobytes()
    assert zstandard.frame_content_size(made) == min(n, 1 << 17)
    read = zstandard.ZstdDecompressor().stream_reader(made, read_across_frames=True).read()
    assert read == plane.numpy().tobytes()


def test_frames_without_a_stated_size_are_refused(monkeypatch):
    pytest.importorskip("zstandard")
    from megatron.weight_sync import gpu_zstd

    monkeypatch.setattr(NvcompStandIn, "stated", False)
    with pytest.raises(RuntimeError, match=r"nvCOMP stand-in does not state .* leave 'entropy' out"):
        gpu_zstd.compress(torch.zeros(64, dtype=torch.uint8), NvcompStandIn, 7)


@pytest.mark.parametrize("index", [[-1, 3], [2, 10], [3, 3], [4, 2], [1 << 30, 5]], ids=str)
def test_raw_indices_that_do_not_fit(index):
    parts = {"index": torch.tensor(index, dtype=torch.int32), "value": torch.zeros(2, dtype=torch.int16)}
    with pytest.raises(ws.CorruptPayload, match=r"outside|rise"):
        codec.decode_group({"encoding": "raw", "count": 2}, parts, 10, 2, 10)


@pytest.mark.parametrize("gap", [[10], [0, 9], [1 << 62, 5], [(1 << 63) - 1, 1], [5, -7]], ids=str)
def test_gaps_that_do_not_fit(gap):
    """Sums that would wrap around, too."""
    wide = torch.tensor(gap)
    parts = {
        "gap16": torch.full((len(gap),), -1, dtype=torch.int16).view(torch.uint16),
        "gap64": wide,
        "value": torch.zeros(len(gap), dtype=torch.int16),
    }
    with pytest.raises(ws.CorruptPayload, match=r"outside|negative"):
        codec.decode_group({"encoding": "packed", "count": len(gap), "gap": 16}, parts, 10, 2, 10)


def test_entropy_without_zstandard_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(RuntimeError, match="pip install zstandard"):
        ws.Sender("m", encodings=("entropy",))
    with pytest.raises(ws.UnsupportedLayout, match="pip install zstandard"):
        codec.decode_group(
            {"encoding": "entropy", "codec": "zstd", "gap": 8, "count": 1, "value": "bits"}, {}, 9, 2, 9
        )


def test_sizes_are_computed_in_integers():
    with pytest.raises(ws.CorruptPayload):
        container.check_shape([1 << 61])
    assert container.check_shape([3, 0, 1 << 40]) == (3, 0, 1 << 40) and math.prod((3, 0)) == 0
