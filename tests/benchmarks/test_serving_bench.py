"""``paceline bench serving`` and ``peers`` as commands: wrong input, whole runs against scripted and real servers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from benchmarks.command import bench
from benchmarks.common.processes import NotReady, running
from benchmarks.peers import install, servers
from benchmarks.peers.bench import PeersReport, Row, figures, grid
from benchmarks.peers.engines import over_http
from benchmarks.peers.servers import AUX_LAYERS, WEIGHTS, gguf_file, head_file, head_setting, peer_head
from benchmarks.peers.transformers_worker import Clock
from benchmarks.serving.arrivals import Arrival
from benchmarks.serving.bench import Load, run
from benchmarks.serving.client import Limits
from benchmarks.serving.deployments import Setting, by_url
from benchmarks.serving.measures import Objective
from benchmarks.serving.report import ServingReport
from benchmarks.serving.workload import Ask
from benchmarks.speculation.prompts import Prompt
from paceline.errors import ConfigError
from paceline.spec_decode.heads.shipped import shipped_heads
from tests.multihost.small_model import write_model

SCRIPTED = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def do_GET(self): self.answer(json.dumps({"data": [{"id": "scripted"}]}))
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        words = body["messages"][0]["content"].split()
        events = [{"choices": [{"delta": {"content": word}}]} for word in words]
        events.append({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": len(words)}})
        self.answer("".join(f"data: {json.dumps(event)}\\n\\n" for event in events) + "data: [DONE]\\n\\n")
    def answer(self, text):
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print("noise", flush=True)
print(f"up http://127.0.0.1:{server.server_port}", flush=True)
try:
    server.serve_forever()
except KeyboardInterrupt:
    pass
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(bench, [str(a) for a in arguments])


@contextmanager
def scripted() -> Iterator[str]:
    with running([sys.executable, "-c", SCRIPTED], ready="up ", timeout_s=60) as server:
        yield server.line.removeprefix("up ")


def load(**change: object) -> Load:
    questions = [Prompt(str(i), "qa", (f"question {i} about things",)) for i in range(8)]
    arrivals = {2.0: [Arrival(0.0, 4, 5), Arrival(0.1, 20, 5)], 4.0: [Arrival(0.0, 4, 5)]}
    values: dict[str, object] = {
        "model": "m",
        "arrivals": arrivals,
        "source": "Poisson",
        "questions": questions,
        "prompts": "kept texts",
        "count": lambda text: len(text.split()),
        "prompt_mix": "4,20",
        "output_mix": "5",
        "objective": Objective(60_000.0, 60_000.0),
        "limits": Limits(deadline_s=60.0),
    }
    return Load(**(values | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--layouts", "sideways"], "layouts"),
        (["--drafters", ","], "drafters"),
        (["--url", "127.0.0.1:8000"], "url"),
        (["--rates", "1,fast"], "rates"),
        (["--rates", "0"], "rates"),
        (["--prompt-tokens", "many"], "prompt_tokens"),
        (["--trace", "absent.csv"], "trace"),
        (["--prompts", "absent.jsonl"], "prompts"),
        (["--json", "absent/folder/x.json"], "json"),
        (["--peers", "unheard-of"], "peers"),
    ],
)
def test_what_is_wrong_is_said_before_the_work(options: list[str], key: str, smollm2_folder: Path) -> None:
    result = invoke("serving", "--model", smollm2_folder, *options)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.key == key


def test_a_server_that_runs_elsewhere_needs_no_name() -> None:
    assert by_url("http://127.0.0.1:8000/").name == "127.0.0.1:8000"
    assert by_url("theirs=http://h:1").name == "theirs"
    with pytest.raises(ConfigError):
        by_url("theirs=h:1")


def test_every_server_gets_every_rate_and_repetition_and_ends() -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    settings = [Setting("a", scripted, ours=True), Setting("b", scripted, ours=True), Setting("c", scripted)]
    seen: list[str] = []
    report = run(load(repeats=2), settings, lambda done, total, what: seen.append(f"{done}/{total}"))
    assert [(r.setting, r.rate, r.repeat) for r in report.runs] == [
        (name, rate, repeat) for name in "abc" for rate in (2.0, 4.0) for repeat in (0, 1)
    ]
    assert all(record.error == "" for r in report.runs for record in r.records)
    assert report.equal("b", 2.0) == (4, 4)
    assert report.holds
    assert report.runs[0].records != report.runs[1].records  # another repetition has other prompts
    assert seen[-1] == "18/18"
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before


def test_a_server_that_does_not_answer_is_named() -> None:
    with scripted() as url:
        pass
    with pytest.raises(ConfigError, match="does not answer"):
        run(load(), [by_url(url)], lambda *_: None)


def test_a_server_that_fails_to_start_shows_its_log() -> None:
    with (
        pytest.raises(NotReady, match=r"exit code 3\n.*no such model"),
        running([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"], ready="ready"),
    ):
        pass


def test_an_error_ends_the_server_and_what_it_started() -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    code += "print('ready', flush=True); time.sleep(600)"
    found: list[psutil.Process] = []

    def break_off() -> None:
        with running([sys.executable, "-c", code], ready="ready") as server:
            found.extend([psutil.Process(server.pid), *psutil.Process(server.pid).children()])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert len(found) == 2
    assert psutil.wait_procs(found, timeout=30.0)[1] == []


def test_sigterm_ends_the_run_and_its_server(tmp_path: Path) -> None:
    """As Ctrl-C does: the benchmark ends, and so does the server in its session."""
    code = "import sys, time; from benchmarks.common.processes import ended_by_signals, running\n"
    code += "with ended_by_signals(), running([sys.executable, '-c', "
    code += "\"import time; print('ready', flush=True); time.sleep(600)\"], ready='ready') as server:\n"
    code += "    print(server.pid, flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.terminate()
    assert process.wait(60) != 0
    process.stdout.close()
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_a_head_for_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: layers as our file counts them; layers in one of the two places; other weights."""
    monkeypatch.setattr(servers, "HOME", tmp_path)
    head = shipped_heads("smollm2-135m-instruct", "eagle3")
    assert head is not None
    for _ in range(2):  # the second time over the first
        given = peer_head(head, "models/smollm2-135m-instruct")
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (head, given))
    assert ours["eagle_config"][AUX_LAYERS] == [1, 14, 26]
    assert theirs[AUX_LAYERS] == theirs["eagle_config"][AUX_LAYERS] == [2, 15, 27]
    assert (given / WEIGHTS).read_bytes() == (head / WEIGHTS).read_bytes()
    assert given.parent == tmp_path
    assert head_setting("llama.cpp", Path("another")) is head_setting("vllm", Path("another")) is None


def test_a_head_for_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its converter gets layers by their inputs and the model's folder, and its server the file that it wrote.

    Mutants: the head's own folder for the converter; a file that is there stays; a server without the head.
    """
    ran: list[list[str]] = []

    def step(*command: str, environment: dict[str, str] | None = None) -> None:
        ran.append([*command])
        if "--outfile" in command:
            Path(command[command.index("--outfile") + 1]).write_text("converted")

    @contextmanager
    def server(command: list[str], *, ready: object) -> Iterator[None]:
        ran.append(command)
        yield

    monkeypatch.setattr(servers, "HOME", tmp_path)
    monkeypatch.setattr(servers, "running", server)
    monkeypatch.setattr(install, "run", step)
    monkeypatch.setattr(install, "resolve_model", lambda model: tmp_path / "target")
    model = Path("smollm2-135m-instruct")
    setting = head_setting("llama.cpp", model)
    assert setting is not None
    with pytest.raises(ConfigError, match=r"eagle3-bf16\.gguf is not there: run"), setting.start():
        pass
    head_file(model.name).write_text("of an older head")
    install.convert_head(tmp_path, model.name)
    assert head_file(model.name).read_text() == "converted"
    assert json.loads((Path(ran[-1][2]) / "config.json").read_text())[AUX_LAYERS] == [2, 15, 27]
    assert ran[-1][-2:] == ["--target-model-dir", str(tmp_path / "target")]
    with setting.start():
        pass
    asked = " ".join(ran[-1])
    assert f"-m {gguf_file(model.name)} " in asked
    assert f"-md {head_file(model.name)} --spec-type draft-eagle3 --spec-draft-n-max 4" in asked


def test_peers_figures() -> None:
    """Two answers: 9 tokens in 1 s and 4 in 0.5 s after the first; one of a single piece has no rate."""
    told = figures([([0.5, 1.0, 1.5], 10), ([0.2, 0.7], 5), ([0.3], 1)], [([0.9], 1), ([0.5], 1), ([0.7], 1)])
    assert (round(told.tokens_per_s, 6), told.tokens, told.ttft_ms) == (round(13 / 1.5, 6), 13, 700.0)


def test_a_peer_that_is_missing_has_a_row_that_says_so(tmp_path: Path) -> None:
    told = figures([([0.5, 1.5], 11)], [([0.25], 1)])
    rows = (Row("paceline", told, told, "draft heads"), Row("vllm", None, None, "", "it is not there"))
    report = PeersReport("m", 2, "kept texts", 6, 64, 1024, rows)
    path = tmp_path / "peers.json"
    path.write_text(report.to_json())
    assert PeersReport.read(path) == report
    table = grid(report)
    assert table.rows == (("paceline", "10.0", "10.0", "draft heads", "250"), ("vllm", "-", "-", "-", "-"))
    assert "vllm: it is not there" in table.notes


def test_groups_are_asked_of_a_server_side_by_side() -> None:
    """As ``bench widths`` does: each answer has a piece for each word."""
    groups = [[Ask(0, 0.0, "one two", 9, 2, 0)], [Ask(i, 0.0, "a b c", 7, 3, 0) for i in range(8)]]
    with scripted() as url:
        timings = over_http(by_url(url))(groups)
    assert [[(one.prompt_tokens, one.tokens, len(one.stamps)) for one in group] for group in timings] == [
        [(9, 2, 2)],
        [(7, 3, 3)] * 8,
    ]


def test_the_transformers_clock_counts_no_prompt() -> None:
    class Value:
        def __init__(self, size: int) -> None:
            self.size = size

        def numel(self) -> int:
            return self.size

    clock = Clock()
    for size in (50, 1, 3):
        clock.put(Value(size))
    assert (clock.tokens, len(clock.stamps)) == (4, 2)


@pytest.mark.e2e
@pytest.mark.timeout(200)
def test_a_deployment_is_measured(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.md"
    model = write_model(tmp_path / "tiny")
    options: list[object] = ["--model", model, "--layouts", "one node", "--drafters", "ngram"]
    options += ["--requests", 3, "--rate", 20, "--prompt-tokens", "64", "--output-tokens", 8, "--warm-up", 1]
    options += ["--serve-options", "--kv-cache-tokens 4096", "--json", out, "--markdown", page]
    result = invoke("serving", *options)
    assert result.exit_code == 0, result.output
    report = ServingReport.read(out)
    (one,) = report.runs
    assert [(r.error, 1 <= r.output_tokens <= 8) for r in one.records] == [("", True)] * 3
    assert all(r.ttft_ms and 50 < r.prompt_tokens <= 64 for r in one.records)  # our count is the server's
    assert "| one node, ngram |" in page.read_text()
    assert json.loads(out.read_text())["settings"]["arrivals"] == "Poisson"
