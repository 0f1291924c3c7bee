"""Stand-ins for the modules that the tests of vLLM and SGLang import, in the process that runs those tests.

A server that such a test starts is the deployment that runs already. Whatever else a test takes from their packages is
`Theirs`: modules that mention it can be imported, and a test that uses it fails with `NeedsTheirs`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ABSENT = ("vllm", "sglang", "tests.utils")  # packages of theirs that are never loaded from their sources
OPTIONAL = ("tblib", "openai_harmony", "lm_eval", "mistral_common", "granian", "pybase64", "zmq", "torchvision")
KEPT = "sglang.test.kits."  # tests that SGLang keeps in its package

running = False  # whether a test runs: modules are only imported else


class NeedsTheirs(Exception):
    """A test uses a part of the peer that is no HTTP surface."""


class Theirs:
    """An object of the peer's. It can be mentioned while modules are imported, and not be used while a test runs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _used(self) -> None:
        if running:
            raise NeedsTheirs(self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._used()
        return Theirs(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._used()
        decorated = arguments[0] if len(arguments) == 1 and not named else None
        return decorated if isinstance(decorated, types.FunctionType | type) else Theirs(f"{self._name}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, item: Any) -> Theirs:
        return self._part()

    def __or__(self, other: Any) -> Any:
        return self._part()

    __ror__ = __or__

    def _part(self) -> Theirs:
        self._used()
        return self

    def __iter__(self) -> Iterator[Any]:
        self._used()
        return iter(())

    def __bool__(self) -> bool:
        self._used()
        return False

    def __len__(self) -> int:
        self._used()
        return 0

    def __instancecheck__(self, instance: Any) -> bool:
        self._used()
        return False


class Deployment:
    """The deployment that runs, by the variables that its starter set."""

    def __init__(self) -> None:
        self.url = os.environ["PEER_TESTS_URL"]
        self.model = os.environ["PEER_TESTS_MODEL"]
        self.folder = os.environ["PEER_TESTS_FOLDER"]

    def tokenizer(self, *_: Any, **__: Any) -> Any:
        """That of the model, whatever model a test names."""
        import transformers

        return transformers.PreTrainedTokenizerFast.from_pretrained(self.folder)


class RemoteServer:
    """vLLM's ``RemoteOpenAIServer`` as far as its tests use it. Nothing is started, and options are not looked at."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, vllm_serve_args: Sequence[str] = (), **_: Any) -> None:
        self.url_root: str = Deployment().url
        host, _colon, port = self.url_root.rpartition("/")[2].partition(":")
        self.host, self.port = host, int(port)

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        """The address of a path."""
        return f"{self.url_root}/{'/'.join(parts)}"

    def get_client(self, **named: Any) -> Any:
        """OpenAI's client."""
        import openai

        return openai.OpenAI(**self._options("/v1", named))

    def get_async_client(self, **named: Any) -> Any:
        """OpenAI's client, for asyncio."""
        import openai

        return openai.AsyncOpenAI(**self._options("/v1", named))

    def get_client_anthropic(self, **named: Any) -> Any:
        """Anthropic's client."""
        import anthropic

        return anthropic.Anthropic(**self._options("", named))

    def get_async_client_anthropic(self, **named: Any) -> Any:
        """Anthropic's client, for asyncio."""
        import anthropic

        return anthropic.AsyncAnthropic(**self._options("", named))

    def _options(self, path: str, named: dict[str, Any]) -> dict[str, Any]:
        given = {"base_url": self.url_root + path, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600.0}
        return {**given, **named}


class _Hub:
    """Nothing is fetched: a name stands for the folder that it would have."""

    def snapshot_download(self, repo_id: str, **_: Any) -> str:
        return repo_id


class _Platform:
    """None that a test asks about."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_, **__: False


class _Launched:
    """What SGLang's tests take for the process of a server."""

    pid = 0


def _sglang_tests(deployment: Deployment) -> dict[str, Any]:
    return {
        "CustomTestCase": unittest.TestCase,
        "DEFAULT_URL_FOR_TEST": deployment.url,
        "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": 60,
        "popen_launch_server": lambda *_, **__: _Launched(),
        "is_in_amd_ci": lambda: False,
        "is_in_ci": lambda: True,
    }


def stand_ins(sources: Path) -> dict[str, dict[str, Any]]:
    """What modules of theirs have, by their names. sources: the checkout whose tests run."""
    deployment = Deployment()
    tokenizer = {"get_tokenizer": deployment.tokenizer}
    return {
        "tests.utils": {"RemoteOpenAIServer": RemoteServer, "VLLM_PATH": sources},
        "vllm.tokenizers": tokenizer,
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
        "sglang.srt.utils.hf_transformers_utils": tokenizer,
        "sglang.srt.utils": {"kill_process_tree": lambda *_, **__: None},
        "sglang.test.test_utils": _sglang_tests(deployment),
    }


class _StandIn(types.ModuleType):
    """A module of theirs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if self.__name__ == "sglang.test.test_utils" and name.startswith("DEFAULT_") and "MODEL" in name:
            return Deployment().model
        return Theirs(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the stand-ins where modules of theirs are imported."""

    def __init__(self, sources: Path) -> None:
        self._sources, self._known = sources, stand_ins(sources)
        self._missing = tuple(name for name in OPTIONAL if importlib.util.find_spec(name) is None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See MetaPathFinder."""
        names = ABSENT + self._missing
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in names):
            return None
        if fullname.startswith(KEPT):
            file = self._sources / "python" / f"{fullname.replace('.', '/')}.py"
            if file.exists():
                return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """See Loader."""
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """See Loader."""
        vars(module).update(self._known.get(module.__name__, {}))


def install(sources: Path) -> None:
    """Put the stand-ins before everything that could be imported."""
    sys.meta_path.insert(0, Finder(sources))
    import transformers

    deployment = Deployment()
    of_folder = transformers.AutoConfig.from_pretrained
    transformers.AutoTokenizer.from_pretrained = deployment.tokenizer
    transformers.AutoConfig.from_pretrained = lambda *_, **__: of_folder(deployment.folder)
