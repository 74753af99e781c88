"""Only the process that schedules has a thread and sockets of ours: real `vllm serve` process trees are looked at.

An engine takes a minute or more to start, so these two run in the end-to-end stage (KVATLAS_E2E_PROCESSES=1).
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import kvatlas
import pytest
from kvatlas import doctor

ROOT = pathlib.Path(__file__).resolve().parents[2]
# As the demo's engines: on busy cores a start has taken four minutes.
START_SECONDS, END_SECONDS = 600, 120
REQUESTS = 8

started = pytest.mark.skipif("KVATLAS_E2E_PROCESSES" not in os.environ, reason="starts engines: set KVATLAS_E2E_PROCESSES=1")


def free() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model that can be served."""
    place = tmp_path_factory.mktemp("served")
    make = [sys.executable, ROOT / "tests/e2e/make_model.py", ROOT / "tests/golden/tokenizer", place]
    subprocess.run(make, check=True, capture_output=True, timeout=START_SECONDS)
    return place


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def threads(pid: int) -> list[str]:
    return [(task / "comm").read_text().strip() for task in pathlib.Path(f"/proc/{pid}/task").glob("*")]


def listening(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    rows = [row.split() for row in pathlib.Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ports = {row[9]: int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    found = set()
    for descriptor in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.add(ports.get(os.readlink(descriptor)[len("socket:[") : -1]))
    return found - {None}


def title(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


class Serve:
    """A `vllm serve`, and what its processes are."""

    def __init__(self, model: pathlib.Path, log: pathlib.Path, *options: str, **environment: str) -> None:
        self.http, self.events, self.control = free(), free(), free()
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "KVATLAS_ENGINE": "served",
            "KVATLAS_BIND": f"tcp://127.0.0.1:{self.events}",
            "KVATLAS_CONTROL": f"tcp://127.0.0.1:{self.control}",
        }
        self.environment = os.environ | settings | environment
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", str(self.http), "--enforce-eager", "--dtype", "bfloat16"]
        command += ["--max-model-len", "1024", "--max-num-seqs", "4", "--block-size", "32", "--num-gpu-blocks-override", "64"]
        with log.open("wb") as out:
            self.process = subprocess.Popen([*command, *options], env=self.environment, stdout=out, stderr=out)

    def ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.http}/health", timeout=10).close()
                return
            time.sleep(0.5)

    def complete(self, prompt: list[int]) -> dict:
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 4}).encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{self.http}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return json.load(answer)

    def doctor(self) -> dict[str, dict]:
        command = [sys.executable, "-m", "kvatlas", "doctor", "--json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300)
        return {line["name"]: line for line in json.loads(done.stdout)["checks"]}

    def end(self) -> None:
        """Ends the tree as a pod is ended; what does not go is killed."""
        everybody = tree(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_SECONDS)
        finally:
            for pid in everybody:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@started
@pytest.mark.parametrize(
    ("method", "servers", "plugins"), [("spawn", 2, "kvatlas"), ("fork", 1, None)], ids=["spawn-two-servers", "fork"]
)
def test_one_process_has_the_agent(served, tmp_path, method, servers, plugins):
    environment = {"VLLM_WORKER_MULTIPROCESSING_METHOD": method} | ({"VLLM_PLUGINS": plugins} if plugins else {})
    serve = Serve(served, tmp_path / "log", "--api-server-count", str(servers), **environment)
    try:
        serve.ready()
        prompt = list(range(300, 400))
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            answers = list(pool.map(serve.complete, [[at, *prompt] for at in range(100, 100 + REQUESTS)]))
        assert all(answer["choices"] for answer in answers)

        processes = {pid: (title(pid), threads(pid), listening(pid)) for pid in tree(serve.process.pid)}
        shown = "\n".join(f"{pid} {told} listens on {ports}" for pid, (told, _, ports) in processes.items())
        ours = [pid for pid, (_, names, _) in processes.items() if any(name.startswith("kvatlas") for name in names)]
        assert len(processes) >= 3 and len(ours) == 1, shown
        told, names, ports = processes[ours[0]]
        assert names.count("kvatlas") == 1 and {serve.events, serve.control} <= ports, shown
        assert "EngineCore" in told, shown
        for pid, (_, _, ports) in processes.items():
            assert pid in ours or not {serve.events, serve.control} & ports, shown
        assert sum(serve.http in ports for _, _, ports in processes.values()) >= servers, shown

        seen = serve.doctor()
        assert [name for name, line in seen.items() if line["mark"] == "bad"] == ["index"], seen
        assert "no index listens" in seen["index"]["said"]
        assert seen["agent"]["said"].startswith("served.0 (m, vLLM 0.32.0"), seen["agent"]
        assert f"process {ours[0]} " in seen["events"]["said"] and seen["events"]["mark"] == "ok", seen["events"]
        # 8 prompts of 101 tokens that differ in the first: 3 full blocks each.
        assert f" {REQUESTS * 3} blocks published" in seen["agent"]["said"], seen["agent"]
    finally:
        serve.end()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", serve.events))


@pytest.mark.parametrize(
    ("plugins", "loads"), [("kvatlas", True), ("other,kvatlas", True), ("other", False), ("", False), (None, True)]
)
def test_vllm_plugins_decides(monkeypatch, plugins, loads):
    from vllm.plugins import load_plugins_by_group

    if plugins is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    loaded = load_plugins_by_group("vllm.general_plugins")
    assert ("kvatlas" in loaded) == loads
    assert not loads or loaded["kvatlas"] is kvatlas.register
    assert doctor.vllm_plugins().mark == ("ok" if loads else "bad"), "the doctor knows what vLLM does"
