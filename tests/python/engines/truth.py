"""What the pool truly holds, by names of our own: from the engine's map of keys and the tokens of known requests."""

from typing import Any

import xxh
from engine import Case
from vllm.v1.core import kv_cache_utils

SEED = 77


class Names:
    """Engine digest -> fingerprint, for every request that was ever made, with a hashing of its own."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.unit = case.hash_block
        self.of_digest: dict[bytes, int] = {}
        self.parent: dict[int, int] = {}
        self.depth: dict[int, int] = {}
        self._memo: dict[tuple, int] = {}
        self._roots: dict[tuple[str, str], int] = {}
        self._blocks = sorted({group.block for group in case.groups})

    def root(self, salt: str | None, adapter: str, model: str = "base") -> int:
        key = (salt or "", adapter)
        if key not in self._roots:
            root = self._roots[key] = xxh.root(model, adapter, salt or "", SEED)
            self.depth[root] = 0
        return self._roots[key]

    def chain(self, request: Any) -> list[int]:
        """The fingerprints of a request, as many as it has tokens for."""
        adapter = request.lora_request.lora_name if request.lora_request else ""
        tokens, unit, ahead = request._all_token_ids, self.unit, self.case.ahead
        out: list[int] = request.__dict__.setdefault("_names", [])
        for at in range(len(out), max(0, len(tokens) - ahead) // unit):
            parent = out[-1] if out else self.root(request.cache_salt, adapter)
            piece = tuple(tokens[at * unit : (at + 1) * unit + ahead])
            fp = self._memo.get((parent, piece))
            if fp is None:
                fp = self._memo[parent, piece] = xxh.block(parent, list(piece))
                self.parent[fp], self.depth[fp] = parent, at + 1
            out.append(fp)
        return out

    def learn(self, request: Any) -> None:
        """Knows the engine's digests of all that this request has."""
        chain, hashes = self.chain(request), request.block_hashes
        assert len(hashes) == len(chain), f"{request.request_id}: {len(hashes)} hashes, {len(chain)} names"
        known = request.__dict__.get("_learned", 0)
        if known == len(chain):
            return
        request.__dict__["_learned"] = len(chain)
        for at in range(known, len(chain)):
            self.of_digest[bytes(hashes[at])] = chain[at]
        for block in self._blocks:
            if block > self.unit:
                view = kv_cache_utils.BlockHashListWithBlockSize(hashes, self.unit, block)
                for at in range(known * self.unit // block, len(chain) * self.unit // block):
                    self.of_digest[bytes(view[at])] = chain[(at + 1) * block // self.unit - 1]

    def up(self, fp: int, steps: int) -> int:
        for _ in range(steps):
            fp = self.parent[fp]
        return fp


def resident(pool: Any, names: Names) -> dict[int, set[int]]:
    """Fingerprints of what is in the engine's map, by group."""
    raw = pool.cached_block_hash_to_block
    raw = raw if isinstance(raw, dict) else raw._cache
    out: dict[int, set[int]] = {at: set() for at in range(len(names.case.groups))}
    for key, blocks in raw.items():
        if blocks:
            out[int.from_bytes(key[-4:], "big")].add(names.of_digest[bytes(key[:-4])])
    return out


def closed(held: set[int], block: int, names: Names) -> set[int]:
    """Those of them that end a block and whose blocks before are all there."""
    steps = block // names.unit
    good: dict[int, bool] = {}

    def reach(fp: int) -> bool:
        walk = [fp]
        while walk:
            at = walk[-1]
            before = names.up(at, steps)
            if at not in held:
                good[at] = False
            elif names.depth[before] == 0:
                good[at] = True
            elif before in good:
                good[at] = good[before]
            else:
                walk.append(before)
                continue
            walk.pop()
        return good[fp]

    return {fp for fp in held if names.depth[fp] % steps == 0 and reach(fp)}


def sets(pool: Any, names: Names, fine: bool) -> list[tuple[set[int], set[int]]]:
    """For each spec its set, and its entries that end inside a block (full attention in fine mode)."""
    by_group = resident(pool, names)
    out = []
    for spec, groups in names.case.specs():
        held = set.intersection(*(by_group[group] for group in groups))
        steps = spec.block // names.unit
        inside = {fp for fp in held if names.depth[fp] % steps}
        whole = held - inside
        if spec.kind == "full":
            out.append((closed(held, spec.block, names), inside if fine else set()))
        else:
            out.append((held if fine and spec.kind == "mamba" else whole, set()))
    return out
