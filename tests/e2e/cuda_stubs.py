"""Lets the CUDA build of torch, the only one that PyPI has for Linux, be imported where no CUDA is installed.

    python cuda_stubs.py

That build is linked against about 2 GB of NVIDIA libraries that a machine without a GPU never calls. For each one
that is missing, this builds a stub beside torch's own libraries: it exports the symbols that torch wants, with their
versions, and every function returns 100 (cudaErrorNoDevice), so torch finds no GPU and goes on. Does nothing for a
CPU build of torch. Needs a C compiler with its readelf.
"""

import collections
import os
import pathlib
import re
import subprocess
import sysconfig
import tempfile

NVIDIA_LIBRARY = re.compile(r"lib(cu|nv|nccl)\w*\.so")
NVIDIA_SYMBOL = re.compile(r"_?cu|nv|nccl|__cuda|CU|Nv")
# A row of `readelf --dyn-syms`: section index, name, and the version where there is one.
SYMBOL = re.compile(r"^\s*\d+:.* (\S+) ([^\s@()]+)(?:@{1,2}(\S+))?(?: \(\d+\))?$", re.MULTILINE)
NEEDED = re.compile(r"\(NEEDED\).*\[(.+?)\]")
VERSION_FILE = re.compile(r"File: (\S+)|Name: (\S+)\s+Flags")


def readelf(library: pathlib.Path, *what: str) -> str:
    command = ["readelf", "-W", *what, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def build(path: pathlib.Path, symbols: dict[str, str | None], versions: set[str]) -> None:
    """One stub library: `symbols` maps a name to its version, `versions` are all that the library must define."""
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory() as scratch:
        source = pathlib.Path(scratch, "stub.c")
        source.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in sorted(symbols)) or "int empty;\n")
        command = [compiler, "-w", "-fno-builtin", "-shared", "-fPIC", "-O1", "-o", str(path), str(source)]
        command.append(f"-Wl,-soname,{path.name}")
        if versions:
            script = pathlib.Path(scratch, "versions.map")
            with script.open("w") as out:
                for version in sorted(versions):
                    names = "".join(f" {name};" for name in sorted(symbols) if symbols[name] == version)
                    out.write(f"{version} {{{' global:' + names if names else ''} }};\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def main() -> None:
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    libraries = sorted((site / "torch" / "lib").glob("*.so"))
    present = {path.name for path in site.glob("nvidia/**/*.so*")} | {path.name for path in libraries}

    missing: set[str] = set()
    defined: set[str] = set()
    wanted: set[tuple[str, str | None]] = set()
    version_of: dict[str, set[str]] = collections.defaultdict(set)  # library -> versions that torch asks of it
    for library in libraries:
        missing |= {name for name in NEEDED.findall(readelf(library, "-d")) if NVIDIA_LIBRARY.match(name)} - present
        for section, name, version in SYMBOL.findall(readelf(library, "--dyn-syms")):
            if section == "UND":
                wanted.add((name, version or None))
            else:
                defined.add(name)
        file = None
        for found in VERSION_FILE.finditer(readelf(library, "-V")):
            if found[1]:
                file = found[1]
            elif file:
                version_of[file].add(found[2])
    wanted = {(name, version) for name, version in wanted if name not in defined}

    for soname in sorted(missing):
        versions = version_of[soname]
        symbols = {name: version for name, version in wanted if version in versions}
        if soname.startswith("libcudart."):
            # Symbols without a version may be found in any library: one stub exports them all.
            symbols |= {name: None for name, version in wanted if version is None and NVIDIA_SYMBOL.match(name)}
        path = libraries[0].parent / soname
        build(path, symbols, versions)
        print(f"stub {soname}: {len(symbols)} symbols")


if __name__ == "__main__":
    main()
