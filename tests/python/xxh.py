"""XXH64 and the digest's XXH3-128, written from their specification: what the Rust code is checked against.

Slow, plain, and without a dependency. https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import struct
from collections.abc import Iterable

M = (1 << 64) - 1
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def rotl(x: int, r: int) -> int:
    return ((x << r) | (x >> (64 - r))) & M


def _round(acc: int, lane: int) -> int:
    return rotl((acc + lane * P2) & M, 31) * P1 & M


def xxh64(data: bytes, seed: int) -> int:
    at = 0
    if len(data) >= 32:
        acc = [(seed + P1 + P2) & M, (seed + P2) & M, seed, (seed - P1) & M]
        while at + 32 <= len(data):
            for i, lane in enumerate(struct.unpack_from("<4Q", data, at)):
                acc[i] = _round(acc[i], lane)
            at += 32
        h = (rotl(acc[0], 1) + rotl(acc[1], 7) + rotl(acc[2], 12) + rotl(acc[3], 18)) & M
        for one in acc:
            h = ((h ^ _round(0, one)) * P1 + P4) & M
    else:
        h = (seed + P5) & M
    h = (h + len(data)) & M
    while at + 8 <= len(data):
        h = (rotl(h ^ _round(0, struct.unpack_from("<Q", data, at)[0]), 27) * P1 + P4) & M
        at += 8
    if at + 4 <= len(data):
        h = (rotl(h ^ (struct.unpack_from("<I", data, at)[0] * P1 & M), 23) * P2 + P3) & M
        at += 4
    for byte in data[at:]:
        h = rotl(h ^ (byte * P5 & M), 11) * P1 & M
    h = (h ^ (h >> 33)) * P2 & M
    h = (h ^ (h >> 29)) * P3 & M
    return h ^ (h >> 32)


def _name(h: int) -> int:
    return h or 1  # 0 is reserved


def root(model: str, adapter: str, salt: str, seed: int) -> int:
    parts = [part.encode() for part in (model, adapter, salt)]
    return _name(xxh64(b"".join(struct.pack("<I", len(part)) + part for part in parts), seed))


def block(parent: int, tokens: list[int], extras: Iterable[tuple[str, int]] = ()) -> int:
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    for identifier, offset in extras:
        text = identifier.encode()
        data += struct.pack("<I", len(text)) + text + struct.pack("<q", offset)
    return _name(xxh64(data, parent))


def chain(parent: int, size: int, tokens: list[int]) -> list[int]:
    out = []
    for at in range(0, len(tokens) - size + 1, size):
        parent = block(parent, tokens[at : at + size])
        out.append(parent)
    return out


# XXH3-128 of exactly 8 bytes (the path for 4 to 8 bytes), seed 0: secret bytes 16..32 of the default secret.
_SECRET_16_32 = (0xDB979083E96DD4DE, 0x1F67B3B7A4A44072)


def xxh3_128_of_u64(value: int) -> int:
    low, high = value & 0xFFFFFFFF, value >> 32
    keyed = (low + (high << 32)) & M
    keyed ^= _SECRET_16_32[0] ^ _SECRET_16_32[1]
    product = keyed * ((P1 + (8 << 2)) & M)
    lo, hi = product & M, product >> 64
    hi = (hi + (lo << 1)) & M
    lo ^= hi >> 3
    lo = (lo ^ (lo >> 35)) * 0x9FB21C651E98DF25 & M
    lo ^= lo >> 28
    hi = (hi ^ (hi >> 37)) * 0x165667919E3779F9 & M
    hi ^= hi >> 32
    return hi << 64 | lo


def digest(members: Iterable[int]) -> dict:
    members = list(members)
    total = sum(map(xxh3_128_of_u64, members)) & ((1 << 128) - 1)
    return {"count": len(members), "sum": [total >> 64, total & M]}
