"""The Python sources of one vLLM, without its dependencies and its binaries, into a folder.

    python fetch.py PACKAGE VERSION FOLDER

pip downloads the wheel and checks its hash. It is the wheel of one platform whatever this machine is: the sources are
the same in all.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

WHEEL = ["--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp"]
WHEEL += [word for tag in ("2_17", "2_28", "2_31", "2_35") for word in ("--platform", f"manylinux_{tag}_x86_64")]


def fetch(package: str, version: str, folder: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        place = pathlib.Path(scratch)
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", *WHEEL]
        subprocess.run([*command, "--dest", scratch, f"{package}=={version}"], check=True)
        (wheel,) = place.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            sources = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith((".py", ".json"))]
            archive.extractall(place / "tree", sources)
        if folder.exists():
            shutil.rmtree(folder)
        (place / "tree").rename(folder)


if __name__ == "__main__":
    package, version, folder = sys.argv[1:]
    pathlib.Path(folder).parent.mkdir(parents=True, exist_ok=True)
    fetch(package, version, pathlib.Path(folder))
