"""The whole deployment on Ray with the real model: two nodes of each kind, every client, bad input, a kill."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil
import pytest

from paceline.assembly.build import build_runner
from paceline.client import AsyncClient, Client, InvalidRequest, Overloaded, PacelineError
from paceline.config import NodeConfig
from paceline.request import Grammar, GrammarKind
from paceline.v1 import node_pb2, node_pb2_grpc
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_secret import NODE_METADATA
from tests.support.prompts import QUESTIONS, one_temperature_each, prompt_requests
from tests.support.server import Server, paceline, serve

pytestmark = [pytest.mark.e2e, pytest.mark.real_model, pytest.mark.timeout(400)]

MODEL = "smollm2-135m-instruct"
FORM = r"([a-f]{3}-){30}[a-f]{3}"  # what some answers must be
FORM_SEEDS = range(8)
References = dict[tuple[str, float], tuple[int, ...]]


@pytest.fixture(scope="module")
def server(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its options come from a file, the environment, which wins over the file, and the command line, which wins over
    both."""
    file = tmp_path_factory.mktemp("options") / "paceline.yaml"
    file.write_text("drafter: none\nnum_draft_tokens: 2\nkv_cache_tokens: 8192\nprefill_nodes: 2\ndecode_nodes: 1\n")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PACELINE_DRAFTER", "ngram")
        environment.setenv("PACELINE_NUM_DRAFT_TOKENS", "3")
        defaults = ("--threads-per-node", "0", "--share-weights", "on")
        with serve("--config", str(file), *defaults, "--decode-nodes", "2", "--num-draft-tokens", "4") as one:
            yield one


def test_options_come_from_the_file_the_environment_and_the_command_line(server: Server) -> None:
    with Client(server.grpc) as client:
        info = client.model_info()
    assert (info.drafter, info.num_draft_tokens) == ("ngram", 4)
    assert sorted(node.role for node in info.nodes) == ["decode", "decode", "prefill", "prefill"]


@pytest.fixture(scope="module")
def answers(smollm2_folder: Path) -> tuple[References, dict[int, tuple[int, ...]]]:
    """One-process answers of the same prompts, each greedy or sampled, 24 tokens; and of the first by FORM, by seed."""
    runner = build_runner(NodeConfig(model=str(smollm2_folder), drafter="none", threads=1, kv_cache_tokens=8192))
    every = prompt_requests(smollm2_folder, 24)
    requests, (_, first, *_) = one_temperature_each(every), every
    sampled = replace(first.params, grammar=Grammar(GrammarKind.REGEX, FORM))
    formed = [replace(first, request_id=f"form {seed}", params=replace(sampled, seed=seed)) for seed in FORM_SEEDS]
    found = [outcome.token_ids for outcome in run(runner, [*requests, *formed], batch=48)]
    keys = [(question, float(number % 2)) for number, question in enumerate(QUESTIONS)]
    return dict(zip(keys, found[: len(keys)], strict=True)), dict(zip(FORM_SEEDS, found[len(keys) :], strict=True))


@pytest.fixture
def references(answers: tuple[References, dict[int, tuple[int, ...]]]) -> References:
    """Answers without a form."""
    return answers[0]


def prompt_ids(folder: Path) -> dict[str, tuple[int, ...]]:
    requests = prompt_requests(folder, 24)
    return {q: requests[2 * i].prompt_token_ids for i, q in enumerate(QUESTIONS)}


def node_processes(server: Server) -> list[psutil.Process]:
    """Those of the four nodes."""
    nodes = [process for process in server.processes() if "".join(process.cmdline()).startswith("ray::NodeHost")]
    assert len(nodes) == 4
    return nodes


def test_nodes_come_before_nobody_and_behind_nobody(server: Server) -> None:
    """Ray's workers run at niceness 15 unless told otherwise: whatever else a host does would come before a token."""
    assert {process.nice() for process in node_processes(server)} == {psutil.Process(server.process.pid).nice()}


def test_ray_runs_what_places_actors_and_no_more(server: Server) -> None:
    """Each of the others is a Python process that imports Ray, at every start."""
    others = {process.name() for process in server.processes()[1:] if process not in node_processes(server)}
    assert others <= {"gcs_server", "raylet", "cat", "valkey-server", "redis-server"}


def test_routers_load_no_torch(server: Server) -> None:
    """It would be a second and 200 MB of each."""
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_nodes_have_their_weights_in_memory_together(server: Server) -> None:
    maps = [Path(f"/proc/{node.pid}/maps").read_text() for node in node_processes(server)]
    weights = [[line for line in text.splitlines() if "paceline-weights" in line] for text in maps]
    assert [[line.split()[1] for line in lines] for lines in weights] == [["r--s"]] * 4  # nobody can write to them
    assert len({line.split()[4] for lines in weights for line in lines}) == 1  # one file


def test_generate_prints_json(server: Server) -> None:
    command = [paceline(), "generate", QUESTIONS[0], "--server", server.grpc, "--chat", "--json"]
    options = ["--max-tokens", "24", "--temperature", "0", "--seed", "3"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=True)
    (answer,) = json.loads(done.stdout)["choices"]
    assert answer["text"].startswith("The capital of France is Paris.")
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 24
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 44
    assert set(answer["speculation"]) >= {"rounds", "draft_tokens", "accepted_tokens", "acceptance_length"}
    assert answer["speculation"]["rounds"] + answer["speculation"]["accepted_tokens"] == 23
    assert 0 < answer["timing"]["ttft_s"] < answer["timing"]["e2e_s"]
    assert answer["nodes"]["prefill"].startswith("prefill-")
    assert answer["nodes"]["decode"].startswith("decode-")


def test_bytes_equal_the_formula(server: Server, smollm2_folder: Path) -> None:
    """H4 on the real model: 30 layers x 2 x 3 heads x 64 x 2 bytes a token."""
    with Client(server.grpc) as client:
        done = client.generate(prompt_ids(smollm2_folder)[QUESTIONS[4]], max_tokens=4, temperature=0.0)
    completion = done.choices[0].completion
    assert completion.handoff.target_kv == completion.usage.prompt_tokens * 30 * 2 * 3 * 64 * 2
    assert completion.handoff.draft_kv == completion.handoff.hidden == 0


@needs_kernels
async def test_text_equals_one_process(server: Server, smollm2_folder: Path, references: References) -> None:
    ids = prompt_ids(smollm2_folder)
    limit = asyncio.Semaphore(12)
    async with AsyncClient(server.grpc) as client:

        async def ask(question: str, temperature: float) -> tuple[int, ...]:
            seed = 100 + QUESTIONS.index(question)
            async with limit:
                done = await client.generate(ids[question], max_tokens=24, temperature=temperature, seed=seed)
            return done.choices[0].token_ids

        answers = await asyncio.gather(*(ask(*key) for key in references))
    assert dict(zip(references, answers, strict=True)) == references


async def all_pages_back(client: AsyncClient) -> None:
    """Every node: nothing held, books whole."""
    async with asyncio.timeout(20):  # a lease may have run out for a moment
        while len((info := await client.model_info()).nodes) < 4:
            await asyncio.sleep(0.1)
    assert sorted(n.id for n in info.nodes) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    for node in info.nodes:
        async with grpc.aio.insecure_channel(node.address) as channel, asyncio.timeout(20):
            make: Any = node_pb2_grpc.DecodeNodeStub if node.role == "decode" else node_pb2_grpc.PrefillNodeStub
            stub = make(channel)
            while True:
                status = await stub.Status(node_pb2.StatusRequest(), metadata=NODE_METADATA)
                if status.held == 0 and status.node.running == 0 and status.node.free_pages == status.node.total_pages:
                    break
                await asyncio.sleep(0.1)
            assert status.integrity == ""
            assert status.bit_exact


BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": [7] * 9000}),
    ("prompt", {"prompt": [5, 10**6]}),
    ("model", {"prompt": "x", "model": "another"}),
    ("temperature", {"prompt": "x", "temperature": float("nan")}),
    ("top_p", {"prompt": "x", "top_p": 2.0}),
    ("max_tokens", {"prompt": "x", "max_tokens": -1}),
    ("n", {"prompt": "x", "n": 129}),
    ("stop", {"prompt": "x", "stop": ["a"] * 40}),
    ("logit_bias", {"prompt": "x", "logit_bias": {10**6: 1.0}}),
]


@pytest.mark.parametrize(("field", "arguments"), BAD_REQUESTS)
def test_bad_input_names_the_field(server: Server, field: str, arguments: dict[str, Any]) -> None:
    given = dict(arguments)
    with Client(server.grpc) as client:
        with pytest.raises(InvalidRequest) as caught:
            client.generate(given.pop("prompt"), **given)
        assert field in caught.value.field
        assert client.generate("Hello", max_tokens=2, temperature=0.0).text
    body = {"model": MODEL, "max_tokens": 4} | arguments
    raw = json.dumps(body)  # NaN goes as the literal NaN
    reply = httpx.post(f"http://{server.http}/v1/completions", content=raw, timeout=30)
    assert reply.status_code in (400, 404)
    assert field in json.dumps(reply.json()["error"])


def test_oversized_and_malformed(server: Server) -> None:
    with Client(server.grpc) as client:
        with pytest.raises(PacelineError):
            client.generate("x" * 100_000_000, max_tokens=1)
        assert client.generate("Hello", max_tokens=1, temperature=0.0).text
    url = f"http://{server.http}/v1/completions"
    assert httpx.post(url, content=b"\xff\xfe{", timeout=30).status_code == 400
    assert httpx.post(url, content=b" " * 10_000_000, timeout=30).status_code == 413
    assert httpx.post(url, json={"model": MODEL, "prompt": "Hello", "max_tokens": 1}, timeout=30).status_code == 200


def test_official_openai_client(server: Server) -> None:
    client = openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == [MODEL]
    messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16)
    text = chat.choices[0].message.content
    assert text is not None
    assert text.startswith("The capital of France is Paris.")
    stream = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == text
    two = client.completions.create(model=MODEL, prompt="Once upon a time", n=2, seed=5, max_tokens=12, logprobs=2)
    again = client.completions.create(model=MODEL, prompt="Once upon a time", n=2, seed=5, max_tokens=12)
    assert [c.text for c in two.choices] == [c.text for c in again.choices]
    assert two.choices[0].text != two.choices[1].text
    assert two.choices[0].logprobs is not None
    assert len(two.choices[0].logprobs.token_logprobs or []) == 12
    stopped = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=40, stop=["Paris"]
    )
    assert stopped.choices[0].message.content == "The capital of France is "
    assert stopped.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", top_p=2)
    assert caught.value.param == "top_p"


def test_reflection_and_health(server: Server) -> None:
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(server.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "paceline.v1.Inference" in database.get_services()
        service = DescriptorPool(database).FindServiceByName("paceline.v1.Inference")
        assert {"Generate", "GenerateStream", "Tokenize", "ModelInfo"} <= {m.name for m in service.methods}
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(service="paceline.v1.Inference"))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    assert httpx.get(f"http://{server.http}/health", timeout=10).status_code == 200
    assert "paceline_requests_total" in httpx.get(f"http://{server.http}/metrics", timeout=10).text


@needs_kernels
async def test_a_killed_decode_node_is_replaced_and_its_streams_go_on(
    server: Server, smollm2_folder: Path, answers: tuple[References, dict[int, tuple[int, ...]]]
) -> None:
    """smg #2382. kill -9 of a decode node under streams, some of which follow a grammar: each stream ends with the same
    tokens as undisturbed."""
    ids = prompt_ids(smollm2_folder)
    references, formed = answers
    async with AsyncClient(server.grpc) as client:
        started = asyncio.Event()

        async def ask(key: tuple[str, float], **options: Any) -> tuple[int, ...]:
            tokens: list[int] = []
            asked = {"seed": 100 + QUESTIONS.index(key[0])} | options
            async for chunk in client.stream(ids[key[0]], max_tokens=24, temperature=key[1], **asked):
                assert chunk.first_index == len(tokens) or not chunk.token_ids
                tokens += chunk.token_ids
                if len(tokens) > 3:
                    started.set()
            return tuple(tokens)

        bound = [ask((QUESTIONS[0], 1.0), seed=seed, regex=FORM) for seed in formed]
        asking = asyncio.gather(*(ask(key) for key in references), *bound)
        await started.wait()
        victims = [p for p in server.processes() if _is_actor(p)]
        assert len(victims) >= 4, [p.cmdline() for p in server.processes()]
        address = next(n.address for n in (await client.model_info()).nodes if n.id == "decode-0")
        victim = _listener(victims, int(address.rpartition(":")[2]))
        victim.kill()
        done = await asyncio.wait_for(asking, 120)
        assert dict(zip(references, done, strict=False)) == references
        assert dict(zip(formed, done[len(references) :], strict=True)) == formed
        async with asyncio.timeout(60):
            while True:
                nodes = {n.id: n.address for n in (await client.model_info()).nodes}
                if nodes.get("decode-0", address) != address:
                    break
                await asyncio.sleep(0.2)
        await all_pages_back(client)


def _is_actor(process: psutil.Process) -> bool:
    try:
        return "NodeHost" in " ".join(process.cmdline()) or "NodeHost" in process.name()
    except psutil.NoSuchProcess:
        return False


def _listener(processes: list[psutil.Process], port: int) -> psutil.Process:
    for process in processes:
        if any(c.laddr and c.laddr.port == port and c.status == "LISTEN" for c in process.net_connections("tcp")):
            return process
    raise AssertionError(f"nobody listens on {port}")


def test_overload_says_when_to_come_back(server: Server) -> None:
    """A request that could never fit is refused at once; the server lives on."""
    with Client(server.grpc) as client:
        with pytest.raises((InvalidRequest, Overloaded)):
            client.generate([5] * 8190, max_tokens=8000)
        assert client.generate("Hello", max_tokens=1, temperature=0.0).text


def test_unknown_options_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: smollm2-135m-instruct\nprefil_nodes: 2\n")
    done = subprocess.run([paceline(), "serve", "--config", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "prefil_nodes" in done.stderr.replace("-", "_")
