"""``paceline verify`` on tiny deployments in this process: equal ones, one with other weights, a plain process, a file
of recorded answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from cluster.commands.verify import verify
from cluster.frontdoor.service import serve_grpc
from cluster.routing.router import Router
from cluster.state.registry_types import NodeRecord
from paceline.assembly.build import build_runner
from paceline.config import NodeConfig, ServeConfig
from paceline.models.llama_shapes import model_shapes
from paceline.results import TextSource
from paceline.text.tokenizer import Tokenizer
from tests.support.node_pair import Pair, pair
from tests.support.tiny_chat import CHAT_VOCAB, write_chat_tokenizer
from tests.support.tiny_model import tiny_spec, tiny_weights

CONTEXT = 512
ASKED = [
    {"prompt": "over and over and over and", "max_tokens": 24, "temperature": 0},
    {"prompt": "a stop", "max_tokens": 40, "temperature": 1.0, "stop": ["e", "Q"]},
    {"prompt": [9, 8, 7, 9, 8, 7], "max_tokens": 16, "top_logprobs": 2, "logit_bias": {"70": 4}, "n": 2},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "prompt_logprobs": 1, "frequency_penalty": 0.5},
    {"prompt": "yes or no: ", "choice": ["yes", "no"], "max_tokens": 8},
    {"prompt": "nothing", "max_tokens": 0},
]


def write_model(folder: Path, seed: int) -> Path:
    """A checkpoint of the tiny model. Returns the folder."""
    write_chat_tokenizer(folder)
    spec = tiny_spec(CHAT_VOCAB)
    weights = tiny_weights(spec, torch.float32, seed)
    save_file({name: weights.take(name) for name in model_shapes(spec)}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": True,
        "eos_token_id": 257,
        "bos_token_id": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class _Registry:
    def __init__(self, nodes: Pair) -> None:
        self._nodes = nodes

    def nodes(self) -> list[NodeRecord]:
        infos = self._nodes.prefill_node.shell.load(), self._nodes.decode_node.shell.load()
        return [
            NodeRecord(i.id, i.role, 1, i.address, free_pages=i.free_pages, total_pages=i.total_pages) for i in infos
        ]


@asynccontextmanager
async def deployed(folder: Path, drafter: str) -> AsyncIterator[str]:
    """Router and two nodes of the model in ``folder``; the address of its gRPC."""
    options = {"model": str(folder), "dtype": "fp32", "kv_cache_tokens": 4096, "num_draft_tokens": 3, "threads": 1}
    config = NodeConfig.model_validate(options | {"drafter": drafter, "max_model_len": CONTEXT, "head_check": False})
    runners = [build_runner(config) for _ in range(2)]
    async with pair(config, *runners) as nodes:
        identity = runners[0].identity
        source = TextSource(True, f"fp_{identity.weights[:8]}", identity.weights, identity.kernels)
        serve = ServeConfig(model=str(folder), dtype="fp32", drafter=drafter, num_draft_tokens=3)
        tokenizer = Tokenizer.from_folder(folder)
        router = Router(_Registry(nodes), tokenizer, serve, serve.model, CONTEXT, CHAT_VOCAB, source=source)
        server = await serve_grpc(router, "127.0.0.1:0")
        try:
            yield f"127.0.0.1:{server.port}"
        finally:
            await server.stop(0)
            await router.close()
            await nodes.all_released()


async def run(*arguments: object) -> Result:
    """The command, on a thread: the servers are on this loop."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(verify)
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, [str(argument) for argument in arguments]))


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "asked.jsonl"
    file.write_text("\n".join(json.dumps(fields) for fields in ASKED))
    return file


async def test_equal_deployments_a_plain_process_and_recorded_answers(tmp_path: Path, asked: Path) -> None:
    folder, kept = write_model(tmp_path / "tiny", 0), tmp_path / "kept.jsonl"
    async with deployed(folder, "ngram") as one, deployed(folder, "suffix") as two:
        sides = ("--at", one, "--against", two, "--against-plain", folder)
        done = await run("--requests", asked, *sides, "--record", kept)
        assert done.exit_code == 0, done.output
        assert f"6 of 6 answers are equal to those of {two}" in done.output
        assert "6 of 6 answers are equal to those of the plain process" in done.output
        assert "log-probabilities of equal" not in done.output
        again = await run("--requests", kept, "--at", two, "--json")
        assert again.exit_code == 0, again.output
        report = json.loads(again.stdout)
        assert report["against"][0] | {"name": ""} == {
            "name": "",
            "compared": 6,
            "equal": 6,
            "largest_logprob_gap": 0.0,
            "differences": [],
        }
        digests = {(side["weights"], side["fingerprint"]) for side in report["sides"]}
        assert len(digests) == 1
        assert all(digests.pop())
        own = await run("--at", one, "--record", kept)  # the built-in set
        assert (own.exit_code, "answers were recorded" in own.output) == (0, True), own.output
        assert len(kept.read_text().splitlines()) > 40


async def test_other_weights_are_found_at_the_first_token_that_differs(tmp_path: Path, asked: Path) -> None:
    right, other = write_model(tmp_path / "a" / "tiny", 0), write_model(tmp_path / "b" / "tiny", 1)
    async with deployed(right, "ngram") as one, deployed(other, "ngram") as two:
        done = await run("--requests", asked, "--at", one, "--against", two)
        assert done.exit_code == 1, done.output
        assert "request 1 ('over and over and over and', temperature 0), choice 0: differs at token " in done.output
        assert "the distributions differ, by " in done.output
        report = json.loads((await run("--requests", asked, "--at", one, "--against", two, "--json")).stdout)
        (against,) = report["against"]
        first = against["differences"][0]
        assert first["tokens"][0] != first["tokens"][1]
        assert first["repeats"] == [True, True]
        for told, token in zip(first["logprobs"], first["tokens"], strict=True):
            assert told["best"][0] == [token, told["logprob"]]  # greedy
        assert report["sides"][0]["weights"] != report["sides"][1]["weights"]


async def test_no_verdict_is_another_exit_code_than_a_difference(tmp_path: Path, asked: Path) -> None:
    folder, odd = write_model(tmp_path / "tiny", 0), tmp_path / "odd.jsonl"
    unlike = tmp_path / "unlike"
    folder.rename(unlike)
    async with deployed(unlike, "none") as at:
        for arguments, told in (
            (["--requests", asked, "--against", "127.0.0.1:1"], "127.0.0.1:1 does not answer"),
            (["--requests", asked], "nothing to compare with"),
            (["--requests", tmp_path / "none", "--against", at], "No such file"),
            (["--requests", odd, "--against", at], "line 1: unknown option 'temprature'"),
        ):
            odd.write_text('{"prompt": "x", "temprature": 1}')
            done = await run("--at", at, "--timeout", 5, *arguments)
            assert (done.exit_code, told in done.output) == (2, True), done.output
        odd.write_text('{"prompt": "x", "drafter": "lookahead"}')
        refused = await run("--at", at, "--against", at, "--requests", odd)
        assert (refused.exit_code, "refuses request 1" in refused.output) == (2, True), refused.output
        async with deployed(write_model(tmp_path / "tiny", 0), "none") as named:
            other = await run("--at", at, "--against", named, "--requests", asked)
            assert (other.exit_code, "model is unlike at" in other.output) == (2, True), other.output
