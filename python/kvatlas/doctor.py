"""``python -m kvatlas doctor``: what the agent finds in this image, and what to do where it does not fit.

Needs neither a GPU nor a running engine nor vLLM itself: what is missing is said. Where an engine with the agent runs
on this host (or in this pod), it is listened to like any index would. Nothing is changed and no port stays taken.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import re
import socket
import subprocess
import sys
from typing import Any, TextIO

from kvatlas import heartbeat

# The span of vLLM versions that the agent was proven on; hooks are found by attribute all the same.
KNOWN = ((0, 10, 2), (0, 33, 0))
GROUP = "vllm.general_plugins"
# Importing vLLM takes 10 s on a busy machine, and minutes on a cold network disk.
_LOOK_SECONDS = 300
_MARKER = "kvatlas-doctor:"

OK, LOOK, BAD = "ok", "look", "bad"
_COLOURS = {OK: "\x1b[32m", LOOK: "\x1b[33m", BAD: "\x1b[31m"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One thing that was looked at: ``ok``, ``look`` (it works, but see to it) or ``bad``, with what to do."""

    name: str
    mark: str
    said: str
    fix: str = ""


def main(as_json: bool = False, rank: int | None = None, out: TextIO = sys.stdout) -> int:
    """Prints one line a check; 1 when one is bad."""
    lines = examine(default_rank() if rank is None else rank)
    healthy = all(line.mark != BAD for line in lines)
    if as_json:
        json.dump({"ok": healthy, "checks": [dataclasses.asdict(line) for line in lines]}, out, indent=1)
        out.write("\n")
        return 0 if healthy else 1
    colour = out.isatty() and "NO_COLOR" not in os.environ
    for line in lines:
        mark = f"{line.mark.upper() if line.mark == BAD else line.mark:<4}"
        if colour:
            mark = f"{_COLOURS[line.mark]}{mark}\x1b[0m"
        out.write(f"{mark}  {line.name:<12} {line.said}{'  ->  ' + line.fix if line.fix else ''}\n")
    return 0 if healthy else 1


def default_rank() -> int:
    """The data-parallel rank that vLLM's own variable names, 0 without it."""
    told = os.environ.get("VLLM_DP_RANK", "")
    return int(told) if told.isdigit() else 0


def examine(rank: int) -> list[Line]:
    """All checks, in the order in which they are worth reading."""
    lines = [native(), entry_point(), vllm_plugins(), enabled()]
    lines += hooks()
    settings, bad = read_settings(rank)
    lines += bad
    if settings is not None:
        lines += [name(settings), seed(settings), secret()]
        heard, ports = sockets(settings)
        lines += ports + [agent(settings, heard), hearing(settings, heard)]
    return lines


def native() -> Line:
    """Python, and whether the native part loads in it."""
    libc = " ".join(platform.libc_ver()) or "an unknown C library"
    here = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}, {libc}"
    try:
        from kvatlas import _agent
    except ImportError as error:
        if not list(pathlib.Path(__file__).parent.glob("_agent.*so")):
            return Line("python", BAD, f"{here}: the package has no native part", "pip install the wheel; its Python files alone do nothing")
        fix = "install the wheel for this machine: it needs CPython 3.9 or newer (not free-threaded) and glibc"
        return Line("python", BAD, f"{here}: the native part does not load: {error}", fix)
    return Line("python", OK, f"{here}; kvatlas {_agent.__version__} loads")


def entry_point() -> Line:
    """Is the plugin among those that vLLM would load?"""
    import importlib.metadata as metadata

    points: Any = metadata.entry_points()
    if hasattr(points, "select"):
        found = [point.value for point in points.select(group=GROUP) if point.name == "kvatlas"]
    else:  # Python 3.9
        found = [point.value for point in points.get(GROUP, ()) if point.name == "kvatlas"]
    if not found:
        fix = "pip install the wheel into the environment of vLLM, as the user that runs it; a copied folder is not seen"
        return Line("entry point", BAD, f"vLLM does not see the plugin: no {GROUP} entry named kvatlas in {sys.prefix}", fix)
    return Line("entry point", OK, f"{GROUP}: kvatlas = {found[0]}")


def vllm_plugins() -> Line:
    """Does ``VLLM_PLUGINS`` let the plugin load?"""
    told = os.environ.get("VLLM_PLUGINS")
    if told is None:
        return Line("VLLM_PLUGINS", OK, "not set, so vLLM loads all plugins")
    if "kvatlas" in told.split(","):
        return Line("VLLM_PLUGINS", OK, f"{told!r} names kvatlas")
    # Exactly what vLLM compares: no spaces are taken off.
    spaced = "kvatlas" in [word.strip() for word in told.split(",")]
    why = "has spaces around kvatlas, which vLLM takes as part of the name" if spaced else "does not name kvatlas"
    words = [word.strip() for word in told.split(",") if word.strip() not in ("", "kvatlas")]
    return Line("VLLM_PLUGINS", BAD, f"{told!r} {why}: vLLM will not load it", f"VLLM_PLUGINS={','.join([*words, 'kvatlas'])}")


def enabled() -> Line:
    """``KVATLAS_ENABLED``."""
    told = os.environ.get("KVATLAS_ENABLED", "")
    if told.strip().lower() in ("0", "false", "no", "off"):
        return Line("enabled", BAD, f"KVATLAS_ENABLED={told} turns the agent off", "unset KVATLAS_ENABLED")
    return Line("enabled", OK, "KVATLAS_ENABLED does not turn it off")


def hooks() -> list[Line]:
    """vLLM's version, and what of it the plugin could wrap. In a process of its own: importing vLLM may do anything."""
    environment = {name: value for name, value in os.environ.items() if name != "KVATLAS_ENABLED"}
    command = [sys.executable, "-c", "from kvatlas import doctor; doctor.look()"]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return [Line("vllm", LOOK, f"importing it took more than {_LOOK_SECONDS} s: hooks were not looked at", "run the doctor again")]
    told = [line[len(_MARKER) :] for line in ran.stdout.splitlines() if line.startswith(_MARKER)]
    if not told:
        last = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
        fix = "run the doctor where the engine runs; without vLLM's own libraries only the other lines count"
        return [Line("vllm", LOOK, f"it cannot be imported here, so hooks were not looked at: {last[:200]}", fix)]
    return _told(json.loads(told[-1]))


def _told(seen: dict[str, Any]) -> list[Line]:
    version = seen["version"]
    if not version:
        fix = f"install kvatlas into the environment that has vLLM; this is {sys.prefix}"
        return [Line("vllm", BAD, "vLLM is not installed in this Python", fix)]
    first, last = (".".join(map(str, known)) for known in KNOWN)
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    known = numbers is not None and KNOWN[0] <= tuple(map(int, numbers.groups())) <= KNOWN[1]
    lines = [Line("vllm", OK, f"{version}, among the versions proven ({first} to {last})")]
    if not known:
        fix = f"the hooks below decide; to be safe take a vLLM from {first} to {last}, or a newer kvatlas"
        lines = [Line("vllm", LOOK, f"{version} is not among the versions proven ({first} to {last})", fix)]
    said = "; ".join(seen["said"])
    if seen.get("error"):
        fix = "run the doctor where the engine runs; if it fails there too, the engine itself cannot start"
        return [*lines, Line("hooks", LOOK, f"vLLM's core cannot be imported here: {seen['error'][:300]}", fix)]
    if not seen["wrapped"]:
        fix = "take a newer kvatlas for this vLLM, or one of the versions proven"
        return [*lines, Line("hooks", BAD, f"the agent stays off: {said or 'nothing could be wrapped'}", fix)]
    told = f"{len(seen['wrapped'])} wrapped: {', '.join(seen['wrapped'])}"
    if said:
        return [*lines, Line("hooks", LOOK, f"{told}; {said}", "take a newer kvatlas for this vLLM; the agent goes on")]
    return [*lines, Line("hooks", OK, told)]


def look() -> None:
    """Wraps vLLM in this process, which then ends, and prints what was wrapped. No scheduler is made, so nothing starts."""
    import importlib.util
    import logging

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage().splitlines()[0])

    said: list[str] = []
    seen: dict[str, Any] = {"version": "", "wrapped": [], "said": said}
    if importlib.util.find_spec("vllm") is not None:
        import vllm

        seen["version"] = str(getattr(vllm, "__version__", "")) or "unknown"
        logger = logging.getLogger("vllm.plugins.kvatlas")
        logger.addHandler(Keep(logging.WARNING))
        logger.propagate = False
        try:
            for module in ("block_pool", "kv_cache_manager", "sched.scheduler"):
                importlib.import_module(f"vllm.v1.core.{module}")
        except ModuleNotFoundError as error:
            # A module of vLLM's that is gone is for the plugin to judge; one of another package means a broken image.
            if not (error.name or "").startswith("vllm.v1"):
                seen["error"] = str(error)
        except Exception as error:
            seen["error"] = f"{type(error).__name__}: {error}"
        if "error" not in seen:
            from kvatlas import plugin

            plugin.register()
            seen["wrapped"] = _wrapped()
    print(_MARKER + json.dumps(seen), flush=True)


def _wrapped() -> list[str]:
    found = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.v1.") and module is not None:
            for cls in [value for value in vars(module).values() if isinstance(value, type)]:
                methods = [key for key, value in vars(cls).items() if getattr(value, "_kvatlas", False) is True]
                found |= {f"{cls.__name__}.{method}" for method in methods}
    return sorted(found)


def read_settings(rank: int) -> tuple[dict[str, Any] | None, list[Line]]:
    """The settings as the agent itself reads them."""
    try:
        from kvatlas._agent import settings
    except ImportError:
        return None, []  # said by the first line
    off = os.environ.pop("KVATLAS_ENABLED", None)  # said by its own line; the rest is looked at all the same
    try:
        read: dict[str, Any] | None = settings(rank)
    except ValueError as error:
        return None, [Line("settings", BAD, f"the agent stays off: {error}", "correct or unset that variable")]
    finally:
        if off is not None:
            os.environ["KVATLAS_ENABLED"] = off
    return read, []


def name(settings: dict[str, Any]) -> Line:
    """The engine's name and where it comes from."""
    told = [name for name in ("KVATLAS_ENGINE", "HOSTNAME") if os.environ.get(name, "").strip()]
    said = f"{settings['engine']}, from {told[0] if told else 'the host name'}"
    kubernetes = "set KVATLAS_ENGINE to the pod's name (Kubernetes: fieldRef metadata.name)"
    if settings["engine"].rpartition(".")[0] in ("localhost", "engine"):
        return Line("name", BAD, f"{said}: every engine would have it", kubernetes)
    if told[:1] != ["KVATLAS_ENGINE"] and re.fullmatch(r"[0-9a-f]{12}\.\d+", settings["engine"]):
        return Line("name", LOOK, f"{said}: a container's id, another one at each start", kubernetes)
    return Line("name", OK, said)


def seed(settings: dict[str, Any]) -> Line:
    """``KVATLAS_SEED``."""
    if settings["seeded"]:
        return Line("seed", OK, "KVATLAS_SEED is set; index and picker must have the same")
    fix = "set KVATLAS_SEED to one random number, the same for all engines, index and picker"
    return Line("seed", LOOK, "KVATLAS_SEED is not set: who sees fingerprints can test guesses of prompts", fix)


def secret() -> Line:
    """``KVATLAS_SECRET``. Its value is never shown."""
    if os.environ.get("KVATLAS_SECRET", "").strip():
        return Line("secret", OK, "KVATLAS_SECRET is set; the index must have the same")
    fix = "set KVATLAS_SECRET here and at the index, or let a network policy keep others from these ports"
    return Line("secret", LOOK, "KVATLAS_SECRET is not set: who reaches the ports can read the stream", fix)


def sockets(settings: dict[str, Any]) -> tuple[dict[str, Any] | None, list[Line]]:
    """Both addresses, free or taken; and the heartbeat of the agent that has them, if one has."""
    heard = None
    lines = []
    if settings["events"] and settings["events"] == settings["control"] and not settings["events"].endswith(":0"):
        lines.append(Line("ports", BAD, f"KVATLAS_BIND and KVATLAS_CONTROL are both {settings['events']}", "give them two ports"))
    for role, variable in (("events", "KVATLAS_BIND"), ("control", "KVATLAS_CONTROL")):
        address = settings[role]
        if not address:
            lines.append(Line(role, OK, f"nowhere, since the agent dials KVATLAS_INDEX; {variable} would have it listen, too"))
            continue
        where = f"{address} ({os.environ.get(variable, '').strip() or 'the default'} + rank {settings['rank']})"
        problem = _cannot_listen(address)
        if address.endswith(":0"):
            if settings["index"]:
                lines.append(Line(role, OK, f"{where}: a free port is taken at start, and told to the index"))
            else:
                fix = f"give {variable} a port, or set KVATLAS_INDEX"
                lines.append(Line(role, LOOK, f"{where}: a free port is taken at start, which no fleet list can know", fix))
        elif not problem:
            lines.append(Line(role, OK, f"{where} is free"))
        else:
            holder = f" by {_holder(address)}" if _holder(address) else ""
            if role == "events":
                heard = _hear(address)
            if heard is not None:
                lines.append(Line(role, OK, f"{where} is an agent's{holder}"))
            else:
                lines.append(Line(role, BAD, f"{where} cannot be taken{holder}: {problem}", _move(variable, address)))
    return heard, lines


def _move(variable: str, address: str) -> str:
    if address.startswith("ipc://"):
        return f"set {variable} to a path that the engine's user may write"
    return f"set {variable} to a free port, such as tcp://*:{'6757' if variable == 'KVATLAS_BIND' else '6857'}, and say so in the fleet list"


def _hear(address: str) -> dict[str, Any] | None:
    try:
        return heartbeat.hear(address)
    except (OSError, heartbeat.NotAnAgent):
        return None


def _cannot_listen(address: str) -> str:
    """Why the address cannot be listened on; "" when it can. Binds as the agent does, and lets go at once."""
    try:
        if address.startswith("ipc://"):
            path = pathlib.Path(address[len("ipc://") :])
            if path.is_socket():
                with socket.socket(socket.AF_UNIX) as peer:
                    if peer.connect_ex(str(path)) == 0:
                        return "somebody listens there"
            elif path.exists():
                return "a file that is no socket is there"
            return "" if os.access(path.parent, os.W_OK) else f"{path.parent} cannot be written"
        host, _, port = address[len("tcp://") :].rpartition(":")
        host = host.strip("[]")
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, int(port)))
            listener.listen(1)
        return ""
    except OSError as error:
        return error.strerror or str(error)


def _connections() -> list[tuple[int, str, int, str, str]]:
    """This network namespace's TCP: local port, peer's address, peer's port, state, inode. Empty where it is not told."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = pathlib.Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            (peer, _, port), state = words[2].partition(":"), words[3]
            raw = b"".join(bytes.fromhex(peer[at : at + 8])[::-1] for at in range(0, len(peer), 8))
            host = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
            local = int(words[1].rpartition(":")[2], 16)
            found.append((local, host.replace("::ffff:", ""), int(port, 16), state, words[9]))
    return found


def _holder(address: str) -> str:
    """Which process listens on a port, as far as this user may know."""
    port = _port(address)
    inodes = {inode for local, _, _, state, inode in _connections() if local == port and state == "0A"}
    for entry in pathlib.Path("/proc").glob("[0-9]*") if inodes else ():
        try:
            links = {os.readlink(fd) for fd in (entry / "fd").iterdir()}
            if links & {f"socket:[{inode}]" for inode in inodes}:
                return f"process {entry.name} ({(entry / 'comm').read_text().strip()})"
        except OSError:
            continue
    return ""


def _port(address: str) -> int:
    port = address.rpartition(":")[2]
    return int(port) if port.isdigit() else 0


def agent(settings: dict[str, Any], heard: dict[str, Any] | None) -> Line:
    """What the agent that runs here says of itself."""
    if not settings["events"]:
        return Line("agent", OK, "it listens nowhere, so it is asked by the index alone: see /v1/engines there")
    if heard is None:
        return Line("agent", LOOK, "no engine with the agent runs here now", "start the engine, then run the doctor beside it")
    who = "{name}.{rank}".format(**heard["engine"]) if isinstance(heard.get("engine"), dict) else str(heard.get("engine"))
    counters = heard.get("counters", {})
    blocks = sum(one["digest"]["count"] for one in heard.get("digests", ()) if isinstance(one.get("digest"), dict))
    said = f"{who} ({', '.join(heard.get('models', ()))}, vLLM {heard.get('engine_version')}, kvatlas {heard.get('agent')}): "
    said += f"{heard.get('steps')} steps, {blocks} blocks published"
    if str(heard.get("rule")).lower() == "unknown":
        fix = "see the agent's warning in the engine's log for why; until then its requests are routed by load alone"
        return Line("agent", BAD, f"{said}; how far hits reach is not known, so it is credited nothing", fix)
    if counters.get("faults"):
        fix = "look for 'kvatlas: its hook of' in the engine's log and report it; the engine itself is unharmed"
        return Line("agent", BAD, f"{said}; {counters['faults']} faults caught", fix)
    if who != settings["engine"]:
        return Line("agent", LOOK, f"{said}; here the name would be {settings['engine']}", "run the doctor with the engine's own environment")
    if heard.get("unnamed"):
        return Line("agent", LOOK, f"{said}; {heard['unnamed']} cached blocks have no name yet", "none: requests that use them name them")
    return Line("agent", OK, said)


def hearing(settings: dict[str, Any], heard: dict[str, Any] | None) -> Line:
    """Does an index hear it?"""
    connections = [peer for peer in _connections() if peer[3] == "01"]
    if settings["index"]:
        lost = [error for error in map(_unreachable, settings["index"]) if error]
        if lost:
            fix = "is it started, and does a network policy let this pod reach it? KVATLAS_INDEX=tcp://host:port, several with commas"
            return Line("index", BAD, f"KVATLAS_INDEX cannot be reached: {'; '.join(lost)}", fix)
        dialled = {_port(address) for address in settings["index"]} & {port for _, _, port, _, _ in connections}
        if heard is not None and not dialled:
            return Line("index", BAD, "KVATLAS_INDEX can be reached, but the engine has no connection to it", "see the agent's lines in the engine's log")
        told = f"{', '.join(settings['index'])} can be reached"
        if not dialled:
            return Line("index", LOOK, f"{told}; no engine here is connected now", "start the engine, then run the doctor beside it")
        return Line("index", OK, f"{told}, and the engine is connected")
    if heard is None:
        return Line("index", LOOK, "KVATLAS_INDEX is not set, and no agent runs here to ask", _entry(settings))
    if settings["events"].startswith("ipc://"):
        return Line("index", LOOK, "who reads a Unix socket cannot be seen from here", "ask the index: /v1/engines")
    readers = [host for local, host, _, _, _ in connections if local == _port(settings["events"])]
    if not readers:
        return Line("index", BAD, "no index listens to this engine", _entry(settings))
    return Line("index", OK, f"{len(readers)} listening: {', '.join(sorted(set(readers)))}")


def _entry(settings: dict[str, Any]) -> str:
    host = _own_address()
    events, control = (re.sub(r"//(0\.0\.0\.0|\[::\]):", f"//{host}:", settings[role]) for role in ("events", "control"))
    engine, _, _ = settings["engine"].rpartition(".")
    return f"put it into the index's fleet list: {{name: {engine}, address: {host}:8000, events: {events}, control: {control}}}"


def _own_address() -> str:
    # The address that a packet to elsewhere would carry. Nothing is sent: a datagram socket only chooses its route.
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as chooser:
            chooser.connect(("192.0.2.1", 9))
            return str(chooser.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _unreachable(index: str) -> str:
    host, _, port = re.sub(r"^\w+://", "", index).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        return f"{index} ({error})"
    return ""


