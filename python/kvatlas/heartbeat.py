"""Hears one heartbeat of an agent, with Python's standard library alone: as much of ZeroMQ's wire protocol (ZMTP 3.0)
and of MessagePack as that needs. For the doctor; everything else reads streams with real clients."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any, Iterator

# As proto/src/event.rs has them.
TOPIC = b"kvatlas/1/"
MAX_PAYLOAD_BYTES = 16 << 20
# A batch nests about eight deep.
_MAX_DEPTH = 32

_GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4


class NotAnAgent(Exception):
    """What listens there does not speak as an agent does."""


def hear(address: str, seconds: float = 5.0) -> dict[str, Any]:
    """The next heartbeat of the agent that publishes on ``address`` (``tcp://host:port`` or ``ipc://path``).

    ``OSError`` when nothing listens there, :class:`NotAnAgent` when it is something else or says nothing in time.
    """
    deadline = time.monotonic() + seconds
    with _connect(address, seconds) as peer:
        try:
            peer.sendall(_GREETING)
            theirs = _exactly(peer, 64, deadline)
            if theirs[0] != 0xFF or theirs[10] < 3:
                raise NotAnAgent("it does not speak ZeroMQ's protocol")
            peer.sendall(_frame(_COMMAND, b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"SUB"))
            peer.sendall(_frame(0, b"\x01" + TOPIC))
            for topic, payload in _messages(peer, deadline):
                for op in decode(payload).get("o", ()) if topic.startswith(TOPIC) else ():
                    if "state" in op:
                        state: dict[str, Any] = op["state"]
                        return state
        except (socket.timeout, ConnectionError, EOFError):
            raise NotAnAgent(f"no heartbeat within {seconds:g} s") from None
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error):
            raise NotAnAgent("what it says is no heartbeat") from None
    raise NotAnAgent("no heartbeat")


def _connect(address: str, seconds: float) -> socket.socket:
    if address.startswith("ipc://"):
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(seconds)
        peer.connect(address[len("ipc://") :])
        return peer
    host, _, port = address[len("tcp://") :].rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    return socket.create_connection((host, int(port)), timeout=seconds)


def _exactly(peer: socket.socket, length: int, deadline: float) -> bytes:
    out = bytearray()
    while len(out) < length:
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        piece = peer.recv(min(length - len(out), 1 << 16))
        if not piece:
            raise EOFError
        out += piece
    return bytes(out)


def _frame(flags: int, body: bytes) -> bytes:
    return bytes([flags, len(body)]) + body


def _messages(peer: socket.socket, deadline: float) -> Iterator[tuple[bytes, bytes]]:
    """Topic and payload of each message of three frames."""
    frames: list[bytes] = []
    while time.monotonic() < deadline:
        flags = _exactly(peer, 1, deadline)[0]
        length = int.from_bytes(_exactly(peer, 8 if flags & _LONG else 1, deadline), "big")
        if length > MAX_PAYLOAD_BYTES or len(frames) > 8:
            raise ValueError("a frame beyond the limits")
        body = _exactly(peer, length, deadline)
        if flags & _COMMAND:
            continue
        frames.append(body)
        if not flags & _MORE:
            if len(frames) == 3:
                yield frames[0], frames[2]
            frames = []


def decode(data: bytes) -> Any:
    """One MessagePack value. ``ValueError`` when it is none, or nests too deep."""
    value, end = _value(data, 0, 0)
    if end != len(data):
        raise ValueError("bytes after the value")
    return value


# First byte -> how a number is read, and for texts, byte strings, arrays and maps how their length is.
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_LENGTHS = {
    0xC4: ("bin", ">B"), 0xC5: ("bin", ">H"), 0xC6: ("bin", ">I"), 0xD9: ("str", ">B"), 0xDA: ("str", ">H"),
    0xDB: ("str", ">I"), 0xDC: ("array", ">H"), 0xDD: ("array", ">I"), 0xDE: ("map", ">H"), 0xDF: ("map", ">I"),
}  # fmt: skip


def _value(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 256, at
    if first in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[first], at
    if first in _NUMBERS:
        form = _NUMBERS[first]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if first < 0x90:
        kind, length = "map", first & 0x0F
    elif first < 0xA0:
        kind, length = "array", first & 0x0F
    elif first < 0xC0:
        kind, length = "str", first & 0x1F
    elif first in _LENGTHS:
        kind, form = _LENGTHS[first]
        length = struct.unpack_from(form, data, at)[0]
        at += struct.calcsize(form)
    else:
        raise ValueError(f"the byte {first:#x} starts nothing that is known")
    if length > len(data) - at:
        raise ValueError("cut short")  # each element has a byte at least: a claimed length reserves nothing
    if kind in ("bin", "str"):
        body = data[at : at + length]
        return (body if kind == "bin" else body.decode()), at + length
    if kind == "array":
        items = []
        for _ in range(length):
            item, at = _value(data, at, depth + 1)
            items.append(item)
        return items, at
    table = {}
    for _ in range(length):
        key, at = _value(data, at, depth + 1)
        table[key], at = _value(data, at, depth + 1)
    return table, at
