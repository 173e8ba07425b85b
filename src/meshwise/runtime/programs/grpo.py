"""The ranks of the program `rl`: engines that generate with a cache, and trainers that update by GRPO.

All weights of the policy are one flat tensor, of which every weight is a view: one broadcast brings it to
the engines, and its gradient is reduced in one piece. Matrices are [d_in, d_out].
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from meshwise.model.architecture import Model
from meshwise.rl.packing import PackedBatch
from meshwise.runtime.programs.attention_kernels import Attend
from meshwise.runtime.programs.context import Context
from meshwise.runtime.programs.functions import SwiGLU
from meshwise.runtime.programs.norm import Norm
from meshwise.runtime.programs.rl_options import RlOptions
from meshwise.runtime.programs.rotary import Rotate, turns
from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, gather, scatter

DTYPE = torch.bfloat16
Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [sequences, heads, tokens, width]."""


class Policy:
    """The policy on one rank; `flat` holds all its weights."""

    def __init__(self, model: Model, context: Context, seed: int) -> None:
        self.model = model
        self.shapes = dict(_shapes(model))
        sizes = [prod(shape) for shape in self.shapes.values()]
        self.flat = context.empty(sum(sizes), dtype=DTYPE)
        self.sizes = sizes
        for place, (name, weight) in enumerate(self.weights().items()):
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.copy_(
                    context.normal(*weight.shape, dtype=DTYPE, key=(seed, place), std=weight.shape[0] ** -0.5)
                )

    def weights(self) -> dict[str, Tensor]:
        """Views of the flat tensor."""
        parts = self.flat.split(self.sizes)
        return {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Token numbers [sequences, tokens] behind those in `cache` -> [sequences x tokens, hidden].

        Behind the last norm. Given a cache, its keys and values are extended; an empty one is filled.
        """
        model, weights = self.model, self.weights()
        num, seq = tokens.shape
        past = cache[0][0].shape[2] if cache else 0
        places = torch.arange(past, past + seq, device=tokens.device)
        cos, sin = turns(places, model.head_dim, DTYPE)
        x = F.embedding(tokens.flatten(), weights["table"])
        for layer in range(model.num_layers):
            of = {
                name.removeprefix(f"{layer}."): one
                for name, one in weights.items()
                if name.startswith(f"{layer}.")
            }
            normed = _norm(x, of["norm1"])
            q, k, v = (
                part.view(num, seq, model.num_heads, model.head_dim)
                for part in (normed @ of["qkv"]).split(model.hidden, dim=1)
            )
            q, k, v = (
                one.transpose(1, 2) for one in (Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin), v)
            )
            if cache is not None:
                if past:
                    k, v = (torch.cat(both, dim=2) for both in zip(cache[layer], (k, v), strict=True))
                    cache[layer] = k, v
                else:
                    cache.append((k.contiguous(), v.contiguous()))
            mixed = Attend.apply(q, k, v, past == 0)
            x = x + mixed.reshape(num * seq, -1) @ of["out_proj"]
            up, gate = (_norm(x, of["norm2"]) @ of["fc1"]).chunk(2, dim=1)
            x = x + SwiGLU.apply(gate, up) @ of["fc2"]
        return _norm(x, weights["norm"])

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary] in fp32."""
        return (hidden @ self.weights()["logits"]).float()

    def logprobs(self, samples: Tensor, prompt: int) -> Tensor:
        """Log-probabilities [samples, tokens of an answer] of the answers in `samples`."""
        logits = self.logits(self.hidden(samples)).view(*samples.shape, -1)
        chosen = F.cross_entropy(logits[:, :-1].flatten(0, 1), samples[:, 1:].flatten(), reduction="none")
        return -chosen.view(len(samples), -1)[:, prompt - 1 :]


def _shapes(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = model.hidden, model.ffn_hidden
    yield "table", (model.vocab, hidden)
    for layer in range(model.num_layers):
        yield f"{layer}.norm1", (hidden,)
        yield f"{layer}.qkv", (hidden, 3 * hidden)
        yield f"{layer}.out_proj", (hidden, hidden)
        yield f"{layer}.norm2", (hidden,)
        yield f"{layer}.fc1", (hidden, 2 * ffn)
        yield f"{layer}.fc2", (ffn, hidden)
    yield "norm", (hidden,)
    yield "logits", (hidden, model.vocab)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return Norm.apply(x, weight, None, False, x.shape[-1], None)


class _PoolRank:
    """What ranks of both pools do: hand samples round, and bring the trainers' weights to the engines."""

    def __init__(self, options: RlOptions, model: Model, context: Context, packed: PackedBatch) -> None:
        self.options, self.context, self.packed = options, context, packed
        engines = options.rollout_ranks
        with context.recorder.setup():
            self.policy = Policy(model, context, options.seed)
            context.recorder.weights(self.policy.flat)
        # torch names groups by their number: every rank makes three
        self.everyone = context.group("rollouts", range(context.world_size))
        self.is_synced = context.rank <= engines
        self.sync = context.group("sync", range(engines + 1) if self.is_synced else [context.rank])
        trains = context.rank >= engines
        self.pool = context.group("dp", range(engines, context.world_size) if trains else range(engines))
        self.tokens = self.passes = 0

    def step(self, number: int) -> float:
        """One step; its mean reward."""
        own, share = self.generate(number), self.options.num_samples // self.options.rollout_ranks
        found = []
        for engine in range(self.options.rollout_ranks):
            samples = own if engine == self.context.rank else None
            if samples is None:
                samples = self.context.empty(share, self.options.length, dtype=torch.int64)
            dist.broadcast(samples, engine, group=self.everyone)
            found.append(samples)
        samples = torch.cat(found)
        answers = samples[:, self.options.prompt :]
        rewards = (answers % 2 == 0).float().mean(dim=1)
        self.update(samples, rewards)
        if self.is_synced:
            dist.broadcast(self.policy.flat.detach(), self.options.rollout_ranks, group=self.sync)
        return 0.0 if self.context.is_fake else float(rewards.mean())

    def generate(self, number: int) -> Tensor | None:
        """The samples of an engine [samples, tokens]."""
        return None

    def update(self, samples: Tensor, rewards: Tensor) -> None:
        """Train on the samples."""

    def held_bytes(self) -> dict[str, float]:
        """What the rank holds between its passes."""
        raise NotImplementedError


class GrpoEngine(_PoolRank):
    """An engine of the rollout pool."""

    cache_bytes = 0

    @torch.no_grad()
    def generate(self, number: int) -> Tensor:
        """Answers drawn from the policy (by Gumbel noise on its logits) to this engine's prompts."""
        options, context = self.options, self.context
        own = options.prompts // options.rollout_ranks
        with context.recorder.setup():
            place = (options.seed, number, context.rank)
            prompts = _numbers(context, (own, options.prompt), place, options.vocab)
            samples = prompts.repeat_interleave(options.samples, dim=0)
        tokens, cache = samples, Cache()
        for new in range(options.output):
            hidden = self.policy.hidden(tokens, cache).view(*tokens.shape, -1)[:, -1]
            logits = self.policy.logits(hidden)
            with context.recorder.setup():
                noise = (
                    context.normal(*logits.shape, dtype=torch.float32, key=(*place, new))
                    .abs()
                    .clamp(min=1e-9)
                )
                uniform = torch.erf(noise * 0.5**0.5).clamp(1e-6, 1 - 1e-6)
                tokens = (logits - (-uniform.log()).log()).argmax(dim=1, keepdim=True)
            samples = torch.cat((samples, tokens), dim=1)
            self.passes += 1
            self.tokens += len(tokens)
        self.cache_bytes = sum(one.nbytes for pair in cache for one in pair)
        return samples

    def held_bytes(self) -> dict[str, float]:
        """Weights, and the cache of a batch at its end."""
        return {"engine weights": self.policy.flat.nbytes, "cache": self.cache_bytes}


class GrpoTrainer(_PoolRank):
    """A data-parallel rank of the trainers; it updates its shard of the weights."""

    def __init__(self, options: RlOptions, model: Model, context: Context, packed: PackedBatch) -> None:
        super().__init__(options, model, context, packed)
        engines = options.rollout_ranks
        self.dp = MeshAxis(self.pool, context.world_size - engines, context.rank - engines)
        with context.recorder.setup():
            self.policy.flat.requires_grad_()
            self.master = self._shard(self.policy.flat.detach()).float()
            self.gradients = torch.zeros_like(self.policy.flat, dtype=torch.float32)
            self.optimizer = torch.optim.Adam([self.master], lr=options.lr, foreach=False)

    def update(self, samples: Tensor, rewards: Tensor) -> None:
        """Log-probabilities before, then the optimizer steps, each over its own part of the samples."""
        options, groups = self.options, rewards.view(-1, self.options.samples)
        scale = groups.std(dim=1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(dim=1, keepdim=True)) / scale).flatten()
        bins = self._bins()
        with torch.no_grad():
            before = [self._logprobs(samples[bin]) for bin in bins]
        for update in range(options.updates):
            own = slice(update * self.packed.bins, (update + 1) * self.packed.bins)
            for bin, old in zip(bins[own], before[own], strict=True):
                ratio = (self._logprobs(samples[bin]) - old).exp()
                clipped = ratio.clamp(1.0 - options.clip, 1.0 + options.clip)
                weight = advantages[bin].unsqueeze(1)
                loss = -torch.minimum(ratio * weight, clipped * weight).mean() / self.packed.bins
                loss.backward()
                self.tokens += samples[bin].numel()
                assert self.policy.flat.grad is not None
                self.gradients += self.policy.flat.grad
                self.policy.flat.grad = None
            self._step()

    def _bins(self) -> list[slice]:
        """The samples of each bin of this rank, of all updates."""
        size, own = self.packed.samples, self.packed.bins
        starts = [
            ((update * self.dp.size + self.dp.index) * own + number) * size
            for update in range(self.options.updates)
            for number in range(own)
        ]
        return [slice(start, start + size) for start in starts]

    def _logprobs(self, samples: Tensor) -> Tensor:
        self.passes += 1
        return self.policy.logprobs(samples, self.options.prompt)

    def _step(self) -> None:
        """Sum the gradients over the trainers, update this rank's shard, and gather all shards."""
        phase = self.context.recorder.phase
        with phase("backward"):
            self.master.grad = scatter(self.gradients, self.dp) / self.dp.size
        with phase("optimizer"):
            self.optimizer.step()
        with phase("forward"), torch.no_grad():
            self.policy.flat.copy_(gather(self.master.to(DTYPE), self.dp))
        self.gradients.zero_()

    def _shard(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.dp.size)[self.dp.index]

    def held_bytes(self) -> dict[str, float]:
        """Weights, gradients, and the optimizer's copy and moments of a shard."""
        states: dict[str, Any] = self.optimizer.state[self.master]
        moments = sum(value.nbytes for name, value in states.items() if name != "step")
        return {
            "weights": self.policy.flat.nbytes,
            "gradients": self.gradients.nbytes,
            "optimizer": self.master.nbytes + moments,
        }


def _numbers(context: Context, shape: tuple[int, ...], key: tuple[int, ...], below: int) -> Tensor:
    """Whole numbers that depend on `key` alone."""
    drawn = context.normal(*shape, dtype=torch.float32, key=key).abs()
    return (drawn * 1e4).long() % below
