"""What is installed: one wheel for every Python from 3.9 on, without dependencies, whose stub tells the truth."""

import ast
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys

import kvatlas
import pytest
from kvatlas import _agent

PACKAGE = pathlib.Path(kvatlas.__file__).parent
ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_one_wheel_without_dependencies():
    installed = importlib.metadata.distribution("kvatlas")
    assert installed.version == _agent.__version__ == kvatlas.__version__
    assert installed.metadata["Requires-Python"] == ">=3.9"
    assert not installed.requires
    assert [(point.group, point.name, point.value) for point in installed.entry_points] == [
        ("vllm.general_plugins", "kvatlas", "kvatlas:register")
    ]
    tags = [line.split()[1] for line in (installed.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:")]
    assert len(tags) == 1 and tags[0].startswith("cp39-abi3-"), tags
    (native,) = PACKAGE.glob("*.so*")
    assert (native.name, pathlib.Path(_agent.__file__)) == ("_agent.abi3.so", native)
    kinds = {path.suffix for path in PACKAGE.iterdir() if path.is_file() and path.name != "py.typed"}
    assert kinds == {".py", ".pyi", ".so"}
    print(f"{native.name}: {native.stat().st_size / 2**20:.1f} MiB")


def test_every_file_is_python_3_9():
    files = list(PACKAGE.glob("*.py"))
    assert len(files) >= 6
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        # Annotations such as `str | None` are not evaluated then.
        assert [alias.name for node in imports for alias in node.names] == ["annotations"], path.name


def old_python() -> "str | None":
    """A Python 3.9 of this machine."""
    tools = pathlib.Path(os.environ.get("PYENV_ROOT") or pathlib.Path.home() / ".pyenv", "versions")
    for found in [shutil.which("python3.9"), *map(str, sorted(tools.glob("3.9*/bin/python3.9")))]:
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


def test_a_real_python_3_9_loads_it():
    python = old_python()
    if python is None:
        pytest.skip("no Python 3.9 on this machine")
    modules = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__"))
    code = "import sys, importlib; print([importlib.import_module('kvatlas.' + m).__name__ for m in sys.argv[1:]], sys.version)"
    said = run(python, "-c", code, *modules, "_agent", PYTHONPATH=str(PACKAGE.parent))
    assert "'kvatlas._agent'] 3.9." in said


def test_the_stub_is_true(tmp_path):
    allowed = tmp_path / "allowed"
    allowed.write_text("kvatlas._agent.__all__\n")  # PyO3 makes one
    run(sys.executable, "-m", "mypy.stubtest", "kvatlas._agent", "--allowlist", str(allowed))


def test_types_are_strict(tmp_path):
    run(sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), str(ROOT / "python" / "kvatlas"))
