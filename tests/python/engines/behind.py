"""The real kvatlas-index behind the agent: what it answers for a prompt, and which sets it has."""

import http.client
import json
import pathlib
import socket
import subprocess
import tempfile
import time
from typing import Any

ENGINE = "differential.0"


class Index:
    def __init__(self, program: str, agent: Any, seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.port, grpc = _free_ports(2)
        entry = dict(name="differential", address="127.0.0.1:1", events=agent.events, control=agent.control)
        config = dict(http=f"127.0.0.1:{self.port}", grpc=f"127.0.0.1:{grpc}", seed=seed, fleet=[entry])
        path = pathlib.Path(self.folder.name) / "index.yaml"
        path.write_text(json.dumps(config))
        self.log = open(path.with_suffix(".log"), "w+")
        self.process = subprocess.Popen([program, "--config", str(path)], stdout=self.log, stderr=self.log)
        self.http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        self._until(lambda: self._row().get("state") == "in_step", "in step")

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(10)
        self.log.close()
        self.folder.cleanup()

    def _until(self, holds: Any, what: str) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                if holds():
                    return
            except OSError:
                self.http.close()  # not up yet
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.log.seek(0)
                raise AssertionError(f"the index is not {what}: {self.log.read()[-2000:]}")
            time.sleep(0.001)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        self.http.request(method, path, None if body is None else json.dumps(body))
        answer = self.http.getresponse()
        text = answer.read()
        return json.loads(text) if answer.status == 200 else {"state": text.decode()}

    def _row(self) -> dict:
        return self._ask("GET", f"/v1/engines/{ENGINE}")

    def reach(self, seq: int) -> None:
        """Waits until the index has applied everything up to this seq."""
        self._until(lambda: (self._row().get("seq") or 0) >= seq, f"at seq {seq}")

    def cached_tokens(self, request: Any) -> int:
        """What it predicts for this prompt."""
        adapter = request.lora_request.lora_name if request.lora_request else ""
        body = dict(model="base", adapter=adapter, salt=request.cache_salt or "", token_ids=list(request._all_token_ids))
        (row,) = self._ask("POST", "/v1/match", body)["engines"]
        return row["cached_tokens"]

    def members(self, kind: str) -> set[int]:
        return {int(fp) for fp in self._ask("GET", f"/v1/engines/{ENGINE}/blocks?kind={kind}")["blocks"]}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
