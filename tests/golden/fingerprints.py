"""Writes fingerprints.json: what every implementation of proto/src/block.rs and digest.rs must give.

    python tests/golden/fingerprints.py

From an implementation of XXH64 of its own (tests/python/xxh.py); with the package `xxhash` installed, that one is
checked against it first. Numbers are hexadecimal text, since JSON readers lose bits of large integers.
"""

import json
import pathlib
import random
import struct
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))
import xxh  # noqa: E402


def hexed(number: int) -> str:
    return f"{number:016x}"


def main() -> None:
    rnd = random.Random(1)
    try:
        import xxhash

        for _ in range(1000):
            data, seed = rnd.randbytes(rnd.randrange(200)), rnd.getrandbits(64)
            assert xxh.xxh64(data, seed) == xxhash.xxh64_intdigest(data, seed)
            assert xxh.xxh3_128_of_u64(seed) == xxhash.xxh3_128_intdigest(struct.pack("<Q", seed))
    except ImportError:
        print("xxhash is not installed: not cross-checked")
    chains = []
    for seed, model, adapter, salt, size, tokens in [
        (0, "m", "", "", 1, [0]),
        (0, "m", "", "", 16, list(range(40))),
        (1, "Qwen/Qwen3-8B", "", "", 16, [rnd.randrange(150_000) for _ in range(100)]),
        (2**64 - 1, "Qwen/Qwen3-8B", "sql-lora", "", 32, [rnd.randrange(150_000) for _ in range(96)]),
        (7, "Qwen/Qwen3-8B", "", "tenant-a", 16, [rnd.randrange(150_000) for _ in range(32)]),
        (7, "Qwen/Qwen3-8B", "sql-lora", "tenant-ä", 128, [rnd.randrange(2**32) for _ in range(300)]),
        (7, "", "", "", 512, [2**32 - 1] * 1024),
    ]:
        root = xxh.root(model, adapter, salt, seed)
        chains.append(
            {
                "seed": hexed(seed),
                "model": model,
                "adapter": adapter,
                "salt": salt,
                "block_size": size,
                "tokens": tokens,
                "root": hexed(root),
                "fingerprints": [hexed(fp) for fp in xxh.chain(root, size, tokens)],
            }
        )
    extras = []
    for items in [[("img-1", 4)], [("img-1", -12), ("img-2", 9)], [("é" * 300, 0)]]:
        tokens = [rnd.randrange(150_000) for _ in range(16)]
        extras.append(
            {"parent": hexed(99), "tokens": tokens, "extras": items, "fingerprint": hexed(xxh.block(99, tokens, items))}
        )
    digests = []
    for count in (0, 1, 2, 100):
        members = [rnd.getrandbits(64) or 1 for _ in range(count)]
        digest = xxh.digest(members)
        digests.append(
            {"members": [hexed(fp) for fp in members], "count": count, "sum": [hexed(half) for half in digest["sum"]]}
        )
    out = {"chains": chains, "extras": extras, "digests": digests}
    (HERE / "fingerprints.json").write_text(json.dumps(out, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
