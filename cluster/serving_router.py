"""A router with all that it needs: its view of nodes and cached prefixes, journal, grammars, quotas, gRPC and HTTP.

``paceline serve`` has one beside its nodes. ``paceline router`` is one alone, in front of another process's nodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.access.keys import read_keys
from cluster.nodes.listening import check_addresses, check_free, raise_open_files, split_address, warn_of_clear_keys
from cluster.parts import Parts
from cluster.state.connection import check_url
from cluster.state.published import Served
from cluster.state.registry import NodeDirectory
from cluster.state.registry_types import Registry
from paceline.config import ServeConfig
from paceline.long_lived import settle
from paceline.results import TextSource
from paceline.rpc.audit import Audit
from paceline.rpc.grants import Grants
from paceline.rpc.identity import Identity, Secret
from paceline.rpc.tls import TlsFolder

if TYPE_CHECKING:
    from cluster.access.access import Access
    from cluster.frontdoor.http_server import HttpServer
    from cluster.frontdoor.service import GrpcServer
    from cluster.routing.metrics import Metrics
    from cluster.routing.router import Router
    from paceline.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DOUBT_S = 1.5  # a node whose lease ran out is used on for so long, in which it is asked


class ServingRouter:
    """Life: ``prepare`` -> ``watch`` -> ``open``. Its parts end with ``parts``."""

    def __init__(self, config: ServeConfig, parts: Parts, secret: Secret) -> None:
        """Raises ConfigError naming ``tls_dir``."""
        self.config, self._parts = config, parts
        self.identity = Identity("router", secret.call_token, TlsFolder.of(config.tls_dir))
        self.grants = Grants(secret.ticket_key)
        self._journal_key = secret.journal_key
        self.grpc_address = ""
        self.http_address = ""
        self.trouble = ""  # what is wrong though requests are served

    async def prepare(self) -> None:
        """Import what the front door is made of, and read the tokenizer. Raises ConfigError."""
        await asyncio.get_running_loop().run_in_executor(None, import_front_door)
        from paceline.models.hub import resolve_model
        from paceline.text.tokenizer import Tokenizer

        self._folder: Path = await asyncio.to_thread(resolve_model, self.config.model)
        self._tokenizer: Tokenizer = Tokenizer.from_folder(self._folder, self.config.chat_template)

    @property
    def text_digest(self) -> str:
        """Names what this router makes tokens of text with, and text of tokens."""
        known = hashlib.sha256((self._folder / "tokenizer.json").read_bytes())
        known.update((self._tokenizer.template.source or "").encode())
        return known.hexdigest()[:32]

    async def watch(self, registry: Registry) -> None:
        """See the nodes."""
        self.registry = registry
        token = self.identity.token
        self.directory = NodeDirectory(registry.url, registry.lease_ttl_s, registry.namespace, DOUBT_S, token)
        await self.directory.start()
        self._parts.at_end("directory", self.directory.close)

    async def open(self, served: Served) -> None:
        """Serve. served: what the nodes have said. Raises ConfigError for an address that cannot be had."""
        from cluster.access.access import open_access

        self.served = served
        raise_open_files()
        metrics = self.metrics = self._metrics()
        access = open_access(self.config, self.registry, metrics)
        if access is not None:
            access.start()
            self._parts.at_end("access", access.close)
        self.router = await self._router(metrics, access)
        self._parts.at_end("router", self.router.close)
        self._share_quarantine()
        await self._serve(metrics, access)
        settle()

    def _metrics(self) -> Metrics:
        from cluster.routing.metrics import Metrics

        metrics = Metrics()
        metrics.watch_nodes(self.directory.nodes)
        metrics.watch_registry(lambda: self.directory.stale_for_s)
        if self.config.vllm_metrics:
            from cluster.routing.vllm_metrics import VllmMetrics

            metrics.registry.register(VllmMetrics(metrics, self.config.served_names[0], self.directory.nodes))
        return metrics

    async def _router(self, metrics: Metrics, access: Access | None) -> Router:
        from cluster.routing.node_calls import NodeCalls
        from cluster.routing.router import Router
        from cluster.state.cache_events import CacheWatcher
        from cluster.state.journal import open_journal
        from paceline.grammar.check import GrammarChecker

        config, registry, served, at_end = self.config, self.registry, self.served, self._parts.at_end
        watcher = CacheWatcher(registry.url, self.directory.nodes, registry.lease_ttl_s, registry.namespace)
        await watcher.start()
        at_end("cached prefixes", watcher.close)
        journal = open_journal(config, registry.url, self._journal_key, metrics.registry)
        if journal is not None:
            at_end("journal", journal.close)
        grammars = GrammarChecker(self._folder, served.vocab_size)
        at_end("grammars", grammars.close)
        return Router(
            self.directory,
            self._tokenizer,
            config,
            config.served_names[0],
            served.max_model_len,
            served.vocab_size,
            metrics=metrics,
            source=self._source(),
            journal=journal,
            prefixes=watcher.index,
            grammars=grammars,
            calls=NodeCalls(identity=self.identity, grants=self.grants),
            quotas=access.quotas if access is not None else None,
        )

    def _share_quarantine(self) -> None:
        from cluster.state.evidence import Evidence
        from cluster.state.sealing import Seal

        quarantine, registry = self.router.quarantine, self.registry
        evidence = Evidence(registry.url, Seal(self._journal_key), quarantine.hear, registry.namespace)
        quarantine.tell = evidence.tell
        evidence.start()
        self._parts.at_end("evidence", evidence.close)

    def _source(self) -> TextSource:
        served, digests = self.served, (node.fingerprint_digest for node in self.directory.nodes())
        return TextSource(served.bit_exact, system_fingerprint(self.config, digests), served.weights, served.kernels)

    async def _serve(self, metrics: Metrics, access: Access | None) -> None:
        from cluster.access.access import handshakes_refused
        from cluster.frontdoor.held_bodies import HeldBodies
        from cluster.frontdoor.http import HttpOptions, create_app, serve_http
        from cluster.frontdoor.service import serve_grpc

        config, parts = self.config, self._parts
        self.access = access
        host, port = split_address(config.http)
        tls = self.public_tls
        warn_of_clear_keys(config, clients_tls=tls is not None, parts_tls=self.identity.tls is not None)
        if tls is None and self.identity.tls is not None:
            log.warning("%s has no server.pem: clients are served without TLS", self.identity.tls.path)
        bodies = HeldBodies()
        options = HttpOptions(
            config.cors_origins,
            self._source().fingerprint,
            config.acceptance == "sample",
            access,
            config.open_metrics,
            lambda: self.trouble,
            bodies,
        )
        self.handshakes: Callable[[str], Callable[[str], None]] = partial(  # see handshakes_refused
            handshakes_refused, metrics, Audit() if access is None else access.audit
        )
        http = await serve_http(create_app(self.router, metrics, options), host, port, tls, self.handshakes("HTTPS"))
        parts.at_end("http", http.stop)
        failed = self.handshakes("gRPC")
        server = await serve_grpc(self.router, config.grpc, access, tls=tls, on_failed=failed, bodies=bodies)
        parts.at_end("the front door", lambda: self._drain(http, server))
        self.http_address = f"{host}:{http.port}"
        self.grpc_address = f"{split_address(config.grpc)[0]}:{server.port}"

    async def _drain(self, http: HttpServer, server: GrpcServer) -> None:
        """Take nothing new, and let what runs end, over gRPC and HTTP alike."""
        self.router.drain()
        await asyncio.gather(http.stop(self._parts.grace_s), server.stop(self._parts.grace_s))

    @property
    def public_tls(self) -> TlsFolder | None:
        """What clients are served with; None: in the clear."""
        tls = self.identity.tls
        return tls if tls is not None and tls.is_public else None


async def check_front(config: ServeConfig) -> None:
    """Raise ConfigError for addresses, keys and a Redis that cannot be used, before anything starts."""
    check_addresses(config)
    if config.redis:
        check_url("redis", config.redis)
    await asyncio.to_thread(check_free, config)  # a host name may have to be looked up
    if config.api_keys:
        await asyncio.to_thread(read_keys, Path(config.api_keys))


def system_fingerprint(config: ServeConfig, node_digests: Iterable[str]) -> str:
    """Names what the text depends on besides the request. node_digests: of what the nodes' pairing compares, which is
    model, weights, number format and kernels among others; nodes that come later pair with them."""
    parts = json.dumps([config.model, config.acceptance, config.draft_sampling, sorted(set(node_digests))])
    return f"fp_{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def import_front_door() -> None:
    """What imports fastapi, jinja and more: a second of work."""
    for name in ("cluster.frontdoor.http", "cluster.frontdoor.service", "cluster.routing.router"):
        import_module(name)
