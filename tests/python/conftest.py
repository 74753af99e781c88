"""The agent listens on ports of its own choice here, and is loaded as vLLM loads it: by its entry point."""

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

for name in [name for name in os.environ if name.startswith("KVATLAS_") and not name.startswith("KVATLAS_E2E")]:
    del os.environ[name]
os.environ.update(
    KVATLAS_BIND="tcp://127.0.0.1:0",
    KVATLAS_CONTROL="tcp://127.0.0.1:0",
    KVATLAS_ENGINE="pytest",
    KVATLAS_SEED="77",
    KVATLAS_HEARTBEAT_MS="50",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def plugin():
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.core.block_pool import BlockPool

    assert getattr(BlockPool.cache_full_blocks, "_kvatlas", False), "the entry point did not load"


@pytest.fixture(autouse=True)
def readers():
    """A test that fails closes nothing; sockets that are left open would hold the end of the run up."""
    yield
    from world import Reader

    for reader in list(Reader.open):
        reader.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from world import model_directory

    return model_directory(tmp_path_factory.mktemp("model"))
