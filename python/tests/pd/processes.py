"""Real `vllm serve` processes on CPUs, and vLLM's own proxies in front of them, unmodified.

They run a tiny model with the stand-ins of tests.vllm.kernels, which a plugin installs in every
process of an engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.agent import eventually
from tests.vllm.engine import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Sequence

UPSTREAM = Path(sys.executable).parents[1] / "upstream"  # scripts/env vllm-serve
START_S = 240.0  # for an engine to answer, beside others that start
ANSWER_S = 120.0  # for a request
END_S = 60.0
PLUGIN = "[vllm.general_plugins]\nstandins = tests.pd.nursery:install\n"


def write_plugin(folder: Path) -> None:
    """Write what makes vLLM's processes install the stand-ins, for PYTHONPATH."""
    info = folder / "standins-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: standins\nVersion: 1\n")
    (info / "entry_points.txt").write_text(PLUGIN)


def write_tokenizer(model: Path) -> None:
    """Write a tokenizer with one token for each byte, after ten tokens that no text has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {f"<{i}>": i for i in range(10)} | {letter: 10 + i for i, letter in enumerate(letters)}
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), VOCABULARY)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """A process that answers HTTP on a port of loopback. Its output is in ``log``."""

    def __init__(self, pid: int, port: int, log: Path, health: str) -> None:
        self.pid, self.port, self.log = pid, port, log
        self._health = health

    def running(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state != "Z"

    def wait(self) -> None:
        """Wait until it answers."""
        try:
            eventually(self._answers, f"an answer of {self.log.stem}", START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; it said: {self.log.read_text()[-4000:]}") from None

    def _answers(self) -> bool:
        assert self.running(), "it ended"
        try:
            self.get(self._health, 5)
        except urllib.error.HTTPError as error:
            return error.code != 503
        except OSError:
            return False
        return True

    def get(self, path: str, timeout_s: float = ANSWER_S) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout_s) as answer:
            text: str = answer.read().decode()
            return text

    def post(self, path: str, body: Any, timeout_s: float = ANSWER_S) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)

    def complete(self, prompt: list[int], tokens: int = 8, timeout_s: float = ANSWER_S, **more: Any) -> list[int]:
        """Return the tokens that it generates after a prompt."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more,
        }  # fmt: skip
        said: list[int] = self.post("/v1/completions", body, timeout_s)["choices"][0]["token_ids"]
        return said

    def complete_all(self, prompts: Sequence[list[int]], at_once: int, tokens: int = 8, **more: Any) -> list[list[int]]:
        """Return the tokens after each prompt, for some requests at once."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, tokens, **more), prompts))

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        eventually(lambda: not self.running(), f"the end of {self.log.stem}", END_S)


class Nursery:
    """Forks engines (tests.pd.nursery)."""

    def __init__(self, folder: Path) -> None:
        write_plugin(folder / "plugin")
        environment = os.environ | {
            "PYTHONPATH": f"{folder / 'plugin'}:{os.environ.get('PYTHONPATH', '')}", "VLLM_TARGET_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pd.nursery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip

    def start(self, arguments: Sequence[str], log: Path) -> int:
        """Start `vllm` with these arguments, and return the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(arguments), str(log)]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("="):
                return int(line[1:])
        raise AssertionError(f"the nursery ended with {self._process.wait(END_S)}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(END_S)


class Engine(Server):
    """`vllm serve` of the tiny model."""

    def __init__(
        self, nursery: Nursery, model: Path, log: Path, transfer: dict[str, Any] | None, port: int = 0
    ) -> None:  # fmt: skip
        port = port or free_port()
        arguments = [
            "serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype",
            "float32", "--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(8 << 20),
            "--block-size", "32", "--max-num-seqs", "16",
        ]  # fmt: skip
        if transfer is not None:
            arguments += ["--kv-transfer-config", json.dumps(transfer)]
        super().__init__(nursery.start(arguments, log), port, log, "/health")

    def counter(self, name: str, **labels: str) -> int:
        """Return the sum of a counter's values with these labels."""
        return sum(
            int(float(value))
            for given, value in re.findall(rf"^{re.escape(name)}{{(.*)}} (\S+)$", self.get("/metrics"), re.MULTILINE)
            if all(f'{key}="{wanted}"' in given for key, wanted in labels.items())
        )

    def counts(self) -> dict[str, int]:
        """Return the connector's counters that are not zero."""
        found = re.findall(r"^vllm:kvagent_(\w+)_total{.*} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return {name: int(float(value)) for name, value in found if float(value)}

    def computed(self) -> int:
        """Return how many prompt tokens it has computed itself."""
        return self.counter("vllm:prompt_tokens_by_source_total", source="local_compute")


class Proxy(Server):
    """One of vLLM's proxies, by the name of its file."""

    def __init__(self, script: str, folder: Path, health: str, *arguments: str) -> None:
        port = free_port()
        log = folder / f"{Path(script).stem}-{port}.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(UPSTREAM / script), "--port", str(port), *arguments], stdout=out, stderr=out,
                start_new_session=True, env=os.environ | {"OPENAI_API_KEY": "none", "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        super().__init__(self._process.pid, port, log, health)
        self.wait()

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait(END_S)


def toy_proxy(folder: Path, prefill: Sequence[Engine], decode: Sequence[Engine]) -> Proxy:
    """Start the proxy that asks the decode engine after the prefill engine has answered."""
    return Proxy(
        "toy_proxy_server.py", folder, "/healthcheck",
        "--prefiller-hosts", *["127.0.0.1"] * len(prefill), "--prefiller-ports", *[str(one.port) for one in prefill],
        "--decoder-hosts", *["127.0.0.1"] * len(decode), "--decoder-ports", *[str(one.port) for one in decode],
    )  # fmt: skip


def push_proxy(folder: Path, prefill: Engine, engine_id: str, decode: Sequence[Engine], peer: str = "") -> Proxy:
    """Start the proxy that asks both at once, and knows the prefill engine's identifier and
    address.
    """
    host, port = peer.rsplit(":", 1) if peer else ("127.0.0.1", "1")
    return Proxy(
        "disagg_proxy_pushconnector_demo.py", folder, "/status", "--model", "tiny", "--prefill",
        f"127.0.0.1:{prefill.port}", "--decode", *[f"127.0.0.1:{one.port}" for one in decode],
        "--prefill-engine-id", engine_id, "--prefill-kv-host", host, "--prefill-side-channel-port", port,
    )  # fmt: skip


def mooncake_proxy(folder: Path, prefill: Sequence[tuple[Engine, int]], decode: Sequence[Engine]) -> Proxy:
    """Start the proxy of Mooncake's connector, which asks both at once.

    ``prefill``: engines and the port at which /query names each.
    """
    arguments = [a for one, query in prefill for a in ("--prefill", f"http://127.0.0.1:{one.port}", str(query))]
    arguments += [a for one in decode for a in ("--decode", f"http://127.0.0.1:{one.port}")]
    started = Proxy("mooncake_connector_proxy.py", folder, "/v1/completions", *arguments)
    ready = "All prefiller instances are ready."
    eventually(lambda: ready in started.log.read_text(), "a proxy that knows its engines", START_S)
    return started
