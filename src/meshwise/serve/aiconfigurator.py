"""How the runs of aiconfigurator's gap analyses were made, where their rows do not say so.

Their engines were started, and measured, by what its generator writes (github.com/ai-dynamo/aiconfigurator,
`generator/config` and `generator/rule_plugin/benchmark`, read at git ad0e3e5e3): a pass takes 1,500 tokens
more than a prompt, with vLLM and TensorRT-LLM beside those of the batch; TensorRT-LLM captures powers of two
and pads no batch. The client sends a hundred prompts in turn (AIPerf's `--num-dataset-entries`), all of one
length, begins with two requests of each client that it does not measure, and vLLM finds in its cache what it
has computed.
"""

from __future__ import annotations

from dataclasses import replace

from meshwise.serve.engine import Engine
from meshwise.serve.requests import Requests

PROMPTS = 100

MORE_TOKENS = 1500


def launched(engine: Engine, prompt: int, batch: int) -> Engine:
    """`engine` as the generator starts it for prompts of `prompt` tokens and `batch` sequences."""
    if engine.name == "sglang":
        return engine.having(max_tokens=min(prompt + MORE_TOKENS, engine.max_tokens))
    engine = engine.having(max_tokens=batch + prompt + MORE_TOKENS)
    if engine.name != "trtllm":
        return engine
    return replace(engine, graph_sizes=tuple(2**i for i in range(9)), pads_batches=False)


def repeated(requests: Requests) -> Requests:
    """`requests` with the first hundred prompts over and over, which warming up has left in caches."""
    num = len(requests.prompt)
    prompt, output = (
        tuple(tokens[i % PROMPTS] for i in range(num)) for tokens in (requests.prompt, requests.output)
    )
    blocks = tuple((i % PROMPTS,) for i in range(num))
    kept = tuple(range(min(2 * requests.concurrency, PROMPTS)))
    return replace(requests, prompt=prompt, output=output, blocks=blocks, block_tokens=max(prompt), kept=kept)
