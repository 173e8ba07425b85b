"""The ranks of the program `rl`: engines that generate with a cache, and trainers that update by GRPO.

All weights of the policy are one flat tensor, of which every weight is a view: one broadcast brings it to
the engines, and its gradient is reduced in one piece. Matrices are [d_in, d_out].
"""

from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from meshwise.model.architecture import Model
from meshwise.rl.passes import PackedBatch
from meshwise.runtime.programs.attention_kernels import Attend
from meshwise.runtime.programs.context import Context, generator_of
from meshwise.runtime.programs.functions import Rotate, turns
from meshwise.runtime.programs.tensor_parallel.block import BlockParts, block, shapes
from meshwise.runtime.programs.tensor_parallel.exchange import axis_of, start_gather, start_scatter

DTYPE = torch.bfloat16
Cache = list[tuple[Tensor, ...]]
"""Keys and values of each layer, [sequences, heads, tokens, width]."""


class Policy:
    """The policy on one rank; `flat` holds all its weights."""

    def __init__(self, model: Model, context: Context, seed: int) -> None:
        self.model, self.recorder = model, context.recorder
        layers, of_one = range(model.num_layers), shapes(model).items()
        blocks = {f"{layer}.{name}": shape for layer in layers for name, shape in of_one}
        last = {"norm": (model.hidden,), "logits": (model.hidden, model.vocab)}
        self.shapes: dict[str, tuple[int, ...]] = {"table": (model.vocab, model.hidden)} | blocks | last
        self.flat = context.empty(sum(map(prod, self.shapes.values())), dtype=DTYPE)
        for place, (name, weight) in enumerate(self.weights().items()):
            if "norm" in name:
                weight.fill_(1.0)
            else:
                std = weight.shape[0] ** -0.5
                weight.copy_(context.normal(*weight.shape, dtype=DTYPE, key=(seed, place), std=std))

    def weights(self) -> dict[str, Tensor]:
        """Views of the flat tensor."""
        parts = self.flat.split(list(map(prod, self.shapes.values())))
        return {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Token numbers [sequences, tokens] behind those in `cache` -> [sequences x tokens, hidden].

        Behind the last norm. Given a cache, its keys and values are extended; an empty one is filled.
        """
        model, weights = self.model, self.weights()
        past = cache[0][0].shape[2] if cache else 0
        places = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        angles = turns(places, model.head_dim, DTYPE)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = qkv.view(*tokens.shape, -1, model.head_dim).split(model.num_heads, dim=2)
            q, k = (Rotate.apply(one, *angles) for one in (q, k))
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            if cache is not None and past:
                pairs = zip(cache[layer], (k, v), strict=True)
                k, v = cache[layer] = tuple(torch.cat(both, dim=2) for both in pairs)
            elif cache is not None:
                cache.append((k.contiguous(), v.contiguous()))
            return Attend.apply(q, k, v, past == 0).reshape(len(qkv), -1)

        x = F.embedding(tokens.flatten(), weights["table"])
        for layer in range(model.num_layers):
            on = BlockParts(model=model, recorder=self.recorder, attend=partial(attend, layer))
            x = block(on, x, {name: weights[f"{layer}.{name}"] for name in shapes(model)})
        return on.norm(x, {"norm.weight": weights["norm"]}, "norm")

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary] in fp32."""
        return (hidden @ self.weights()["logits"]).float()

    def logprobs(self, samples: Tensor, prompt: int) -> Tensor:
        """Log-probabilities [samples, tokens of an answer] of the answers in `samples`."""
        logits = self.logits(self.hidden(samples)).view(*samples.shape, -1)
        chosen = F.cross_entropy(logits[:, :-1].flatten(0, 1), samples[:, 1:].flatten(), reduction="none")
        return -chosen.view(len(samples), -1)[:, prompt - 1 :]


class _PoolRank:
    """What ranks of both pools do: hand samples round, and bring the trainers' weights to the engines.

    `held`: bytes of what a rank holds between its passes.
    """

    def __init__(self, options: Any, model: Model, context: Context, packed: PackedBatch) -> None:
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
        self.held: dict[str, float] = {}

    def step(self, number: int) -> float:
        """One step; its mean reward."""
        own, share = self.generate(number), self.options.num_samples // self.options.rollout_ranks
        shape = share, self.options.length
        found = [self.context.empty(*shape, dtype=torch.int64) for _ in range(self.options.rollout_ranks)]
        if own is not None:
            found[self.context.rank] = own
        for engine, samples in enumerate(found):
            dist.broadcast(samples, engine, group=self.everyone)
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


class GrpoEngine(_PoolRank):
    """An engine of the rollout pool; it holds weights, and the cache of a batch at its end."""

    @torch.no_grad()
    def generate(self, number: int) -> Tensor:
        """Answers drawn from the policy to this engine's prompts."""
        options, context = self.options, self.context
        own = options.prompts // options.rollout_ranks
        with context.recorder.setup():
            place = (options.seed, number, context.rank)
            drawn = context.normal(own, options.prompt, dtype=torch.float32, key=place).abs()
            samples = ((drawn * 1e4).long() % options.vocab).repeat_interleave(options.samples, dim=0)
        tokens, cache = samples, Cache()
        for new in range(options.output):
            hidden = self.policy.hidden(tokens, cache).view(*tokens.shape, -1)[:, -1]
            logits = self.policy.logits(hidden)
            with context.recorder.setup():
                chance = None if context.is_fake else generator_of(context.device, *place, new)
                tokens = logits.softmax(dim=1).multinomial(1, generator=chance)
            samples = torch.cat((samples, tokens), dim=1)
            self.passes += 1
            self.tokens += len(tokens)
        cache_bytes = sum(one.nbytes for pair in cache for one in pair)
        self.held = {"engine weights": self.policy.flat.nbytes, "cache": cache_bytes}
        return samples


class GrpoTrainer(_PoolRank):
    """A data-parallel rank of the trainers; it updates its shard of the weights."""

    def __init__(self, options: Any, model: Model, context: Context, packed: PackedBatch) -> None:
        super().__init__(options, model, context, packed)
        self.dp = axis_of(self.pool)
        with context.recorder.setup():
            self.policy.flat.requires_grad_()
            self.master = self.policy.flat.detach().chunk(self.dp.size)[self.dp.index].float()
            self.gradients = torch.zeros_like(self.policy.flat, dtype=torch.float32)
            self.optimizer = torch.optim.Adam([self.master], lr=options.lr, foreach=False)

    def update(self, samples: Tensor, rewards: Tensor) -> None:
        """Log-probabilities before, then the optimizer steps, each over its own part of the samples."""
        options, groups = self.options, rewards.view(-1, self.options.samples)
        scale = groups.std(dim=1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(dim=1, keepdim=True)) / scale).flatten()
        shape = options.updates, self.dp.size, self.packed.bins, self.packed.samples
        own, weights = (each.view(*shape, -1)[:, self.dp.index] for each in (samples, advantages))
        with torch.no_grad():
            before = [[self._logprobs(bin) for bin in bins] for bins in own]
        for update in zip(own, weights, before, strict=True):
            for bin, weight, old in zip(*update, strict=True):
                ratio = (self._logprobs(bin) - old).exp()
                clipped = ratio.clamp(1.0 - options.clip, 1.0 + options.clip)
                loss = -torch.minimum(ratio * weight, clipped * weight).mean() / self.packed.bins
                loss.backward()
                self.tokens += bin.numel()
                assert self.policy.flat.grad is not None
                self.gradients += self.policy.flat.grad
                self.policy.flat.grad = None
            self._step()

    def _logprobs(self, samples: Tensor) -> Tensor:
        self.passes += 1
        return self.policy.logprobs(samples, self.options.prompt)

    def _step(self) -> None:
        """Sum the gradients over the trainers, update this rank's shard, and gather all shards."""
        phase = self.context.recorder.phase
        with phase("backward"):
            self.master.grad = start_scatter(self.gradients, self.dp)() / self.dp.size
        with phase("optimizer"):
            self.optimizer.step()
        with phase("forward"), torch.no_grad():
            self.policy.flat.copy_(start_gather(self.master.to(DTYPE), self.dp)())
        self.gradients.zero_()
        states: dict[str, Any] = self.optimizer.state[self.master]
        moments = sum(value.nbytes for name, value in states.items() if name != "step")
        self.held = {"weights": self.policy.flat.nbytes, "gradients": self.gradients.nbytes}
        self.held |= {"optimizer": self.master.nbytes + moments}
