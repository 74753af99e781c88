"""Follows an agent as an index does, by its sockets, set by set; checks what every receiver relies on."""

import time
from typing import Any

import msgspec
import xxh
import zmq

CLOSED = ("gpu", "any")
KINDS = (*CLOSED, *(f"s{n}" for n in range(1, 8)))
_sums: dict[int, int] = {}


def digest(members: set[int]) -> dict:
    total = 0
    for fp in members:
        value = _sums.get(fp)
        if value is None:
            value = _sums[fp] = xxh.xxh3_128_of_u64(fp)
        total += value
    total &= (1 << 128) - 1
    return {"count": len(members), "sum": [total >> 64, total & xxh.M]}


class Reader:
    def __init__(self, agent: Any) -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt(zmq.SUBSCRIBE, b"kvatlas/1/")
        self.events.setsockopt(zmq.RCVHWM, 0)
        self.events.connect(agent.events.replace("0.0.0.0", "127.0.0.1"))
        self.control = self.context.socket(zmq.DEALER)
        self.control.connect(agent.control.replace("0.0.0.0", "127.0.0.1"))
        self.next: int | None = None
        self.state: dict | None = None
        self.started: dict[str, dict] = {}
        self.finished: set[str] = set()
        self.clears = self.digests = 0
        assert self.events.poll(10_000), "no heartbeat within 10 s"
        self.snapshot()
        self.read(lambda: self.state is not None)

    def close(self) -> None:
        self.events.close(0)
        self.control.close(0)
        self.context.term()

    def ask(self, request: Any) -> Any:
        self.control.send_multipart([b"", msgspec.msgpack.encode(request)])
        assert self.control.poll(10_000), f"no answer to {request}"
        return msgspec.msgpack.decode(self.control.recv_multipart()[1])

    def snapshot(self) -> None:
        """Begins anew from a snapshot."""
        self._forget(None)
        first = self.ask({"snapshot": {"cut": None, "piece": 0}})["snapshot"]
        pieces = [first]
        for at in range(1, first["pieces"]):
            pieces.append(self.ask({"snapshot": {"cut": first["cut"], "piece": at}})["snapshot"])
        for piece in pieces:
            for chain in piece["chains"]:
                self._store(chain)
        self._check(dict(first["digests"]))
        self.next = first["next"]

    def read(self, until: Any, seconds: float = 20) -> None:
        """Applies messages until `until()` holds after one of them."""
        deadline = time.monotonic() + seconds
        while True:
            assert self.events.poll(max(0, (deadline - time.monotonic()) * 1000)), f"not within {seconds} s: {self.state}"
            _, seq, payload = self.events.recv_multipart()
            self._apply(int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload))
            if self.next is not None and until():
                return

    def _apply(self, seq: int, batch: dict) -> None:
        if self.next is None or seq < self.next:
            return  # before the snapshot
        assert seq == self.next, f"seq {seq} after {self.next - 1}"
        self.next = seq + 1
        for op in batch["o"]:
            ((kind, body),) = op.items()
            if kind == "store":
                self._store(body)
            elif kind == "remove":
                self._remove(body)
            elif kind == "clear":
                self.clears += 1
                self._forget(body.get("k"))
            elif kind == "state":
                self.state = body
                self.digests += 1
                self._check({told["kind"]: told["digest"] for told in body["digests"]})
            else:
                assert kind == "life", kind
                ((event, life),) = body.items()
                if event == "started":
                    self.started[life["id"]] = life
                elif event == "finished":
                    self.finished.add(life["id"])

    def _check(self, told: dict[str, dict]) -> None:
        for kind in KINDS:
            own = digest(self.sets[kind])
            assert told.get(kind, own if not own["count"] else None) == own, f"digest of {kind} at seq {self.next}"

    def _forget(self, kind: str | None) -> None:
        if kind is None:
            self.sets: dict[str, set[int]] = {kind: set() for kind in KINDS}
            self.parent: dict[str, dict[int, int]] = {kind: {} for kind in CLOSED}
            self.children: dict[str, dict[int, int]] = {kind: {} for kind in CLOSED}
            return
        self.sets[kind] = set()
        if kind in CLOSED:
            self.parent[kind], self.children[kind] = {}, {}

    @staticmethod
    def _list(body: dict) -> list[int]:
        data = body["f"]
        return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]

    def _store(self, body: dict) -> None:
        kind, parent = body["k"], 0
        if isinstance(body["p"], dict):
            ((which, parent),) = body["p"].items()
            if which == "root":
                parent = parent["fp"]
            else:
                assert parent in self.sets[kind], f"{kind}: a child was stored before its parent"
        else:
            assert kind not in CLOSED, f"{kind} is closed, and a chain of it is loose"
        for fp in self._list(body):
            assert fp not in self.sets[kind], f"{kind}: stored twice"
            self.sets[kind].add(fp)
            if kind in CLOSED:
                self.parent[kind][fp] = parent
                self.children[kind][parent] = self.children[kind].get(parent, 0) + 1
                parent = fp

    def _remove(self, body: dict) -> None:
        kind = body["k"]
        for fp in self._list(body):
            self.sets[kind].remove(fp)
            if kind in CLOSED:
                assert not self.children[kind].get(fp), f"{kind}: a parent was removed before its child"
                self.children[kind][self.parent[kind].pop(fp)] -= 1
