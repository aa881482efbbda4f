"""A decoder written from FORMAT.md in plain Python, without torch and without the package: the naive twin."""

import hashlib
import json
import struct

import zstandard

MASK = (1 << 64) - 1
G, C = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
SIZE = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "U16": 2, "U8": 1}
CODE = {"I64": "q", "I32": "i", "I16": "h", "U16": "H", "U8": "B"}


def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def parse(data):
    (n,) = struct.unpack("<Q", data[:8])
    head, body = data[: 8 + n], data[8 + n :]
    header = json.loads(head[8:])
    meta = header.pop("__metadata__")
    assert hashlib.sha256(head.replace(meta["digest"].encode(), b"0" * 64)).hexdigest() == meta["digest"]
    padded = body + bytes(-len(body) % 8)
    total = sum(
        mix(((len(body) + i * G) & MASK) ^ (w * C & MASK))
        for i, (w,) in enumerate(struct.iter_unpack("<Q", padded))
    )
    assert f"{total & MASK:016x}" == meta["checksum"]
    entries = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        entries[name] = (entry["dtype"], body[begin:end])
    return meta, entries


def numbers(entry):
    dtype, data = entry
    return [x for (x,) in struct.iter_unpack("<" + CODE[dtype], data)]


def plane(entries, name):
    return zstandard.ZstdDecompressor().stream_reader(entries[name][1], read_across_frames=True).read()


def level(entries, prefix, width, count, encoding):
    if encoding == "packed":
        return numbers(entries[f"{prefix}{width}"])
    if width == 4:
        pairs = plane(entries, f"{prefix}4.0")
        return [x for byte in pairs for x in (byte & 15, byte >> 4)][:count]
    planes = [plane(entries, f"{prefix}{width}.{k}") for k in range(width // 8)]
    return [sum(p[i] << 8 * k for k, p in enumerate(planes)) for i in range(count)]


def ladder(entries, prefix, width, count, encoding):
    out = level(entries, prefix, width, count, encoding)
    assert len(out) == count
    if width == 64:
        return out
    escaped = [i for i, x in enumerate(out) if x == (1 << width) - 1]
    if escaped:
        beyond = ladder(entries, prefix, {4: 16, 8: 16, 16: 64}[width], len(escaped), encoding)
        for i, x in zip(escaped, beyond, strict=True):
            out[i] = x
    return out


def ordered(bits, width):
    """Bit pattern (unsigned) → integer in the order of the floats, and back from a signed one."""
    return bits if bits < 1 << (width - 1) else -1 - (bits - (1 << (width - 1)))


def pattern(key, width):
    return key if key >= 0 else (1 << (width - 1)) + (-1 - key)


def apply(tensors, bucket):
    """``tensors``: name → list of unsigned bit patterns, changed in place."""
    meta, entries = parse(bucket)
    groups = json.loads(meta["groups"])
    listed = json.loads(meta["tensors"])
    for item in listed:
        if "group" not in item:
            size = SIZE[item["dtype"]]
            data = entries[item["name"]][1]
            tensors[item["name"]] = [
                int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)
            ]
    for k, group in enumerate(groups):
        members = [item for item in listed if item.get("group") == k]
        width = 8 * SIZE[members[0]["dtype"]]
        parts = {name.split(":")[2]: entry for name, entry in entries.items() if name.startswith(f":{k}:")}
        count, encoding = group["count"], group["encoding"]
        if encoding == "raw":
            index = numbers(parts["index"])
        else:
            index, at = [], -1
            for gap in ladder(parts, "gap", group["gap"], count, encoding):
                at += gap + 1
                index.append(at)
        relative = group.get("value") == "ulp"
        if relative:
            value = [(x >> 1) ^ -(x & 1) for x in ladder(parts, "ulp", group["ulp"], count, encoding)]
        elif encoding == "entropy":
            value = level(parts, "value", width, count, encoding)
        else:
            value = [x & ((1 << width) - 1) for x in numbers(parts["value"])]
        places = [(item["name"], i) for item in members for i in range(numel(item["shape"]))]
        for i, x in zip(index, value, strict=True):
            name, place = places[i]
            if relative:
                key = ordered(tensors[name][place], width) + x
                half = 1 << (width - 1)
                x = pattern((key + half) % (2 * half) - half, width)
            tensors[name][place] = x


def numel(shape):
    out = 1
    for n in shape:
        out *= n
    return out
