"""How the runs of aiconfigurator's gap analyses were made, where their rows do not say so.

Their engines were started, and measured, by what its generator writes (github.com/ai-dynamo/aiconfigurator,
`generator/config/backend_templates`, read at git ad0e3e5e3): TensorRT-LLM captures powers of two and pads no
batch; the client sends a hundred prompts in turn (AIPerf's `--num-dataset-entries`), begins with two requests
of each client that it does not measure, and vLLM finds in its cache what it has computed.
"""

from __future__ import annotations

from dataclasses import replace

from meshwise.serve.engine import Engine
from meshwise.serve.requests import Requests

PROMPTS = 100


def launched(engine: Engine) -> Engine:
    """`engine` as the generator starts it."""
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
