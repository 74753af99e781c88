"""``python -m kvatlas doctor``: each fault is made once, and its line and its fix are seen.

An image is a virtual environment without anything but the package, and a vLLM of a few lines where one is wanted: so
the doctor runs as it does in an image without a GPU.
"""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import venv

import kvatlas
import pytest
from world import Engine, Reader, request, scheduler

PACKAGE = pathlib.Path(kvatlas.__file__).parent

SCHEDULER = """
class Scheduler:
    def __init__(self): ...
    def add_request(self, request): ...
    def schedule(self): ...
    def update_from_output(self, scheduler_output, model_runner_output): ...
    def _free_request(self, request): ...
"""
MANAGER = """
class KVCacheManager:
    def get_computed_blocks(self, request): ...
"""
POOL = """
class BlockPool:
    def cache_full_blocks(self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id): ...
    def get_new_blocks(self, num_blocks): ...
    def reset_prefix_cache(self): ...
    def _maybe_evict_cached_block(self, block): ...
"""
LORA = "class LoRARequest:\n    id = 0\n"


class Image:
    """A virtual environment with the package."""

    def __init__(self, place: pathlib.Path) -> None:
        venv.create(place, with_pip=False, symlinks=True)
        self.python = str(place / "bin" / "python")
        (self.site,) = (place / "lib").glob("python*/site-packages")
        (self.site / "kvatlas").symlink_to(PACKAGE)
        self.installed = self.site / "kvatlas-0.1.0.dist-info"
        self.installed.mkdir()
        (self.installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kvatlas\nVersion: 0.1.0\n")
        (self.installed / "entry_points.txt").write_text("[vllm.general_plugins]\nkvatlas = kvatlas:register\n")
        self.vllm("0.32.0")

    def vllm(self, version: str, pool: str = POOL, lead: str = "") -> None:
        files = {
            "__init__": f"{lead}\n__version__ = {version!r}\n",
            "v1/__init__": "",
            "v1/core/__init__": "",
            "v1/core/block_pool": pool,
            "v1/core/kv_cache_manager": MANAGER,
            "v1/core/sched/__init__": "",
            "v1/core/sched/scheduler": SCHEDULER,
            "lora/__init__": "",
            "lora/request": LORA,
        }
        for name, text in files.items():
            path = self.site / "vllm" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def ask(self, *words: str, **environment: str) -> subprocess.CompletedProcess:
        clean = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "KVATLAS_ENGINE": "pod-7", "KVATLAS_SEED": "7"}
        ports = {"KVATLAS_BIND": f"tcp://127.0.0.1:{free()}", "KVATLAS_CONTROL": f"tcp://127.0.0.1:{free()}"}
        environment = {name: value for name, value in (clean | ports | environment).items() if value is not None}
        command = [self.python, "-m", "kvatlas", "doctor", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    def lines(self, *words: str, **environment: str) -> dict[str, dict]:
        done = self.ask("--json", *words, **environment)
        assert done.stdout, done.stderr
        told = json.loads(done.stdout)
        bad = [line["name"] for line in told["checks"] if line["mark"] == "bad"]
        assert (done.returncode, told["ok"]) == (int(bool(bad)), not bad), told
        assert all(line["fix"] for line in told["checks"] if line["mark"] != "ok"), told
        return {line["name"]: line for line in told["checks"]} | {"bad": bad}


@pytest.fixture()
def image(tmp_path):
    return Image(tmp_path / "image")


def free() -> int:
    """A port that is free, and the next one, too: that of rank 1."""
    while True:
        with socket.socket() as taken, socket.socket() as after:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                after.bind(("127.0.0.1", port + 1))
                return port


@contextlib.contextmanager
def listening():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(8)
        yield taken.getsockname()[1]


def test_an_image_in_order(image):
    seen = image.lines(KVATLAS_SECRET="")
    assert seen["bad"] == []
    assert {name for name, line in seen.items() if name != "bad" and line["mark"] != "ok"} == {"secret", "agent", "index"}
    assert "0.32.0" in seen["vllm"]["said"] and "BlockPool.cache_full_blocks" in seen["hooks"]["said"]
    assert seen["name"]["said"] == "pod-7.0, from KVATLAS_ENGINE"
    assert "{name: pod-7, " in seen["index"]["fix"]


def test_lines_for_people(image):
    done = image.ask(VLLM_PLUGINS="other")
    assert done.returncode == 1 and "\x1b" not in done.stdout
    (bad,) = [line for line in done.stdout.splitlines() if line.startswith("BAD")]
    assert bad.split()[1] == "VLLM_PLUGINS" and bad.endswith("->  VLLM_PLUGINS=other,kvatlas")


@pytest.mark.parametrize(
    ("environment", "line", "said", "fix"),
    [
        ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS", "does not name kvatlas", "VLLM_PLUGINS=kvatlas"),
        ({"VLLM_PLUGINS": "a, kvatlas"}, "VLLM_PLUGINS", "spaces", "VLLM_PLUGINS=a,kvatlas"),
        ({"KVATLAS_ENABLED": "off"}, "enabled", "turns the agent off", "unset KVATLAS_ENABLED"),
        ({"KVATLAS_SEED": "x"}, "settings", "KVATLAS_SEED", "correct or unset"),
        ({"KVATLAS_BIND": "5757"}, "settings", "KVATLAS_BIND", "correct or unset"),
        ({"KVATLAS_ENGINE": "localhost"}, "name", "every engine would have it", "metadata.name"),
        ({"KVATLAS_BIND": "tcp://127.0.0.1:6000", "KVATLAS_CONTROL": "tcp://127.0.0.1:6000"}, "ports", "both", "two ports"),
        ({"KVATLAS_BIND": "ipc:///nowhere/a.sock"}, "events", "cannot be written", "KVATLAS_BIND"),
        ({"KVATLAS_CONTROL": "tcp://192.0.2.77:5857"}, "control", "cannot be taken", "KVATLAS_CONTROL"),
    ],
)
def test_a_bad_setting(image, environment, line, said, fix):
    seen = image.lines(**environment)
    assert seen["bad"] == [line]
    assert said in seen[line]["said"] and fix in seen[line]["fix"]


@pytest.mark.parametrize(
    ("environment", "line", "said"),
    [
        ({"KVATLAS_SEED": ""}, "seed", "not set"),
        ({"KVATLAS_BIND": "tcp://127.0.0.1:0"}, "events", "no fleet list can know"),
        ({"KVATLAS_ENGINE": None, "HOSTNAME": "0123456789ab"}, "name", "from HOSTNAME: a container's id"),
    ],
)
def test_a_doubtful_setting(image, environment, line, said):
    seen = image.lines(**environment)
    assert seen["bad"] == [] and said in seen[line]["said"]


def test_ports_that_are_taken(image):
    with listening() as port:
        seen = image.lines("--rank", "1", KVATLAS_CONTROL=f"tcp://127.0.0.1:{port - 1}")
        assert seen["bad"] == ["control"]
        assert f":{port} (tcp://127.0.0.1:{port - 1} + rank 1)" in seen["control"]["said"]
        assert f"process {os.getpid()} " in seen["control"]["said"] and "free port" in seen["control"]["fix"]
        # Something that listens on the port of the events and is no agent.
        seen = image.lines(KVATLAS_BIND=f"tcp://127.0.0.1:{port}")
        assert seen["bad"] == ["events"] and "KVATLAS_BIND" in seen["events"]["fix"]


def test_an_index_to_dial(image):
    gone = free()
    seen = image.lines(KVATLAS_INDEX=f"tcp://127.0.0.1:{gone}")
    assert seen["bad"] == ["index"] and f"127.0.0.1:{gone}" in seen["index"]["said"] and "KVATLAS_INDEX" in seen["index"]["fix"]
    with listening() as port:
        seen = image.lines(KVATLAS_INDEX=f"tcp://127.0.0.1:{port}", KVATLAS_BIND=None, KVATLAS_CONTROL=None)
        assert seen["bad"] == [] and "no engine here is connected" in seen["index"]["said"]
        for role, variable in (("events", "KVATLAS_BIND"), ("control", "KVATLAS_CONTROL")):
            said = f"nowhere, since the agent dials KVATLAS_INDEX; {variable} would have it listen, too"
            assert seen[role]["said"] == said


def test_a_plugin_that_vllm_does_not_see(image):
    for path in image.installed.iterdir():
        path.unlink()
    image.installed.rmdir()
    seen = image.lines()
    assert seen["bad"] == ["entry point"] and "pip install" in seen["entry point"]["fix"]


def test_a_native_part_that_is_missing_or_does_not_load(image):
    (image.site / "kvatlas").unlink()
    (image.site / "kvatlas").mkdir()
    for path in PACKAGE.glob("*.py"):
        (image.site / "kvatlas" / path.name).symlink_to(path)
    seen = image.lines()
    assert "python" in seen["bad"] and "no native part" in seen["python"]["said"] and "wheel" in seen["python"]["fix"]
    (image.site / "kvatlas" / "_agent.abi3.so").write_bytes(b"for another machine")
    seen = image.lines()
    assert "python" in seen["bad"] and "does not load" in seen["python"]["said"] and "CPython 3.9" in seen["python"]["fix"]


def test_a_vllm_that_is_missing_or_strange(image):
    image.vllm("0.99.1")
    seen = image.lines()
    assert (seen["bad"], seen["vllm"]["mark"], seen["hooks"]["mark"]) == ([], "look", "ok")
    image.vllm("0.32.0", pool="class BlockPool: ...")
    seen = image.lines()
    assert seen["bad"] == ["hooks"]
    assert "BlockPool.cache_full_blocks" in seen["hooks"]["said"] and "newer kvatlas" in seen["hooks"]["fix"]
    image.vllm("0.32.0", lead="raise ImportError('libcuda.so.1 is missing')")
    seen = image.lines()
    assert seen["bad"] == [] and "libcuda.so.1 is missing" in seen["vllm"]["said"]
    image.vllm("0.32.0", pool="import a_package_that_is_missing")
    seen = image.lines()
    assert seen["bad"] == [] and "a_package_that_is_missing" in seen["hooks"]["said"]
    image.vllm("0.32.0", lead="import os; os.abort()")
    seen = image.lines()
    assert seen["bad"] == [] and "exit status" in seen["vllm"]["said"]
    (image.site / "vllm").rename(image.site / "elsewhere")
    seen = image.lines()
    assert seen["bad"] == ["vllm"] and "not installed" in seen["vllm"]["said"] and sys.prefix not in seen["vllm"]["fix"]


def test_p4_beside_an_engine_it_says_whether_an_index_hears_it(image, model):
    engine = Engine(scheduler(model, blocks=100), 1)
    agent = engine.scheduler._kvatlas
    mine = {"KVATLAS_BIND": agent.events, "KVATLAS_CONTROL": agent.control, "KVATLAS_ENGINE": "pytest"}
    engine.add(request("r", list(range(100)), max_tokens=1))
    engine.step()
    seen = image.lines(**mine)
    assert seen["bad"] == ["index"], "nobody listens"
    assert "fleet list" in seen["index"]["fix"] and agent.events in seen["index"]["fix"]
    assert "pytest.0 (base, vLLM 0.32.0" in seen["agent"]["said"] and "6 blocks published" in seen["agent"]["said"]
    assert seen["agent"]["mark"] == seen["events"]["mark"] == seen["control"]["mark"] == "ok"
    reader = Reader(agent)
    seen = image.lines(**mine)
    assert seen["bad"] == [] and "1 listening: 127.0.0.1" in seen["index"]["said"]
    assert image.lines(**mine | {"KVATLAS_ENGINE": "other"})["agent"]["mark"] == "look"
    with listening() as port:
        # An index that can be reached, and that the engine did not dial.
        seen = image.lines(**mine, KVATLAS_INDEX=f"tcp://127.0.0.1:{port}")
        assert seen["bad"] == ["index"] and "no connection" in seen["index"]["said"]
    agent.fault()
    reader.read(lambda r: r.state is not None and r.state["counters"]["faults"] == 1)
    seen = image.lines(**mine)
    assert seen["bad"] == ["agent"] and "1 faults caught" in seen["agent"]["said"] and "engine's log" in seen["agent"]["fix"]
    reader.close()
    agent.stop()
