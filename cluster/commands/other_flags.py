"""What the flags of vLLM and SGLang are called here, for who types one of theirs.

docs/coming_from_vllm.md has them with notes; a test holds both equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

OURS: Mapping[str, str] = {
    "--model-path": "--model",
    "--revision": "--model OWNER/NAME@COMMIT",
    "--host": "--http HOST:PORT",
    "--port": "--http HOST:PORT",
    "--grpc-mode": "--grpc",
    "--context-length": "--max-model-len",
    "--gpu-memory-utilization": "--kv-cache-tokens",
    "--kv-cache-dtype": "--kv-dtype",
    "--kv-cache-memory-bytes": "--kv-cache-tokens",
    "--mem-fraction-static": "--kv-cache-tokens",
    "--num-gpu-blocks-override": "--kv-cache-tokens",
    "--max-total-tokens": "--kv-cache-tokens",
    "--block-size": "--page-size",
    "--enable-prefix-caching": "--prefix-cache",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--disable-radix-cache": "--no-prefix-cache",
    "--max-num-seqs": "--max-running",
    "--max-running-requests": "--max-running",
    "--max-num-batched-tokens": "--prefill-chunk-tokens",
    "--enable-chunked-prefill": "--prefill-chunk-tokens",
    "--chunked-prefill-size": "--prefill-chunk-tokens",
    "--max-num-queued-reqs": "--max-queued",
    "--max-queued-requests": "--max-queued",
    "--speculative-config": "--drafter",
    "--spec-method": "--drafter",
    "--speculative-algorithm": "--drafter",
    "--spec-model": "--drafter-path",
    "--speculative-draft-model-path": "--drafter-path",
    "--spec-tokens": "--num-draft-tokens",
    "--speculative-num-steps": "--num-draft-tokens",
    "--speculative-eagle-topk": "--tree-width",
    "--speculative-num-draft-tokens": "--tree-nodes",
    "--kv-transfer-config": "--prefill-nodes and --decode-nodes",
    "--disaggregation-mode": "--prefill-nodes and --decode-nodes",
    "--disaggregation-transfer-backend": "--transport",
    "--data-parallel-size": "--decode-nodes",
    "-dp": "--decode-nodes",
    "--dp-size": "--decode-nodes",
    "--distributed-executor-backend": "--ray-address",
    "--nnodes": "--ray-address",
    "--dist-init-addr": "--ray-address",
    "--attention-backend": "--attention",
    "--enforce-eager": "--no-cuda-graphs",
    "--disable-cuda-graph": "--no-cuda-graphs",
    "--stream-interval": "--stream-interval-ms",
    "--uvicorn-log-level": "--log-level",
    "--enable-log-requests": "--log-level",
    "--log-requests": "--log-level",
    "--allowed-origins": "--http-cors-origins",
    "--ssl-keyfile": "--tls-dir",
    "--ssl-certfile": "--tls-dir",
    "--api-key": "--api-keys FILE",
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--enable-expert-parallel": "--tp",
    "--tp-size": "--tp",
    "--ep-size": "--tp",
    "--enable-dp-attention": "--attention-dp",
    "--shutdown-timeout": "--drain-timeout-s",
}
ABSENT: Mapping[str, str] = {
    "--scheduling-policy": "tenants take turns",
    "--schedule-policy": "tenants take turns",
    "--seed": "a seed belongs to a request",
    "--random-seed": "a seed belongs to a request",
    "--enable-metrics": "/metrics is always served",
    "--api-server-count": "further routers join with `paceline router`",
    "--quantization": "the checkpoint says it; --quantize rounds one that is not quantised",
    "--enable-auto-tool-choice": "it is always on",
    "--tokenizer": "the tokenizer is that of the model's folder",
    "--tokenizer-path": "the tokenizer is that of the model's folder",
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--load-format": "the files say it",
    "--download-dir": "the variables HF_HOME and PACELINE_HOME name the folders",
    "--hf-token": "the variable HF_TOKEN holds it",
    "--hf-overrides": "config.json counts",
    "--json-model-override-args": "config.json counts",
    "--generation-config": "sampling defaults of a checkpoint are not read",
    "--sampling-defaults": "sampling defaults of a checkpoint are not read",
    "--default-chat-template-kwargs": "chat_template_kwargs belongs to a request",
    "--structured-outputs-config": "llguidance is the only grammar library",
    "--grammar-backend": "llguidance is the only grammar library",
    "--max-logprobs": "it is always 20",
    "--compilation-config": "torch.compile is not used",
    "--enable-torch-compile": "torch.compile is not used",
    "--pipeline-parallel-size": "there is no pipeline parallelism",
    "-pp": "there is no pipeline parallelism",
    "--pp-size": "there is no pipeline parallelism",
    "--cpu-offload-gb": "nothing is offloaded",
    "--kv-offloading-size": "nothing is offloaded",
    "--hicache-size": "nothing is offloaded",
    "--enable-lora": "there is no LoRA",
    "--lora-paths": "there is no LoRA",
    "--limit-mm-per-prompt": "text alone is served",
    "--otlp-traces-endpoint": "`paceline trace` writes a request's timeline",
    "--enable-trace": "`paceline trace` writes a request's timeline",
}


def told_of_theirs(words: Sequence[str], taken: Collection[str]) -> str:
    """What to say of the first of ``words`` that is a flag of theirs; empty where none is. taken: the command's own
    flags, which are never theirs."""
    for word in words:
        flag = word.partition("=")[0]
        if flag not in taken and (told := called_here(flag)):
            return f"No such option: {flag}. {told}"
    return ""


def called_here(flag: str) -> str:
    """A sentence on a flag of theirs; empty for any other."""
    if flag in OURS:
        return f"It is {OURS[flag]} here, see docs/coming_from_vllm.md."
    if flag in ABSENT:
        return f"There is none here: {ABSENT[flag]}. See docs/coming_from_vllm.md."
    return ""
