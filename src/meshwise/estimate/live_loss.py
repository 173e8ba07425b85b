"""The mean loss of a decoder's logits, as tensors that are nothing but their bytes.

Logits are whole, or cut by tp over the vocabulary. In chunks of tokens (`runtime.programs.chunked_loss`) the
backward of each follows its forward: what is kept is the gradient of what enters, and that of the matrix.
"""

from __future__ import annotations

from meshwise.estimate.live_linear import Linears, Weight
from meshwise.estimate.live_tensors import Graph, Leaf, Storage, Tensor
from meshwise.program.cut import Cut


class Losses:
    """Of the logits that `linears` make."""

    def __init__(self, cut: Cut, graph: Graph, linears: Linears) -> None:
        self.graph, self.linears, self.is_cut = graph, linears, bool(cut.tp > 1)
        self.new, self.play, self.num_chunks = graph.memory.new, graph.memory.play, cut.loss_chunks
        self.number, self.wide = cut.precision.stat_bytes, cut.precision.stat_bytes / cut.precision.act_bytes

    def one(self) -> Storage:
        """A number."""
        return self.new(self.number)

    def share(self, loss: Tensor) -> Tensor:
        """A loss over their number."""
        return self.graph.op(self.one(), lambda _: (self.one(),), loss)

    def sum(self, loss: Tensor, further: Tensor) -> Tensor:
        """Of two."""
        return self.graph.op(self.one(), lambda grad: (grad, grad), loss, further)

    def mean(self, logits: Tensor, tokens: float) -> Tensor:
        """Of logits of so many tokens."""
        scores = self.graph.cast(logits, logits.size * self.wide)
        return self._split(scores, tokens) if self.is_cut else self._whole(scores)

    def in_chunks(self, table: Weight, x: Tensor, logits: float, tokens: float) -> Tensor:
        """The same of `x`, whose logits take so many bytes, and times its gradient what the chunks find."""
        number, size, of_matrix = self.num_chunks, x.size, None
        of_x, losses = self.new(size), []
        for _ in range(number):
            part = Tensor(x.storage, Leaf(self.graph.memory), 0, size / number)
            loss, found = self._of_chunk(table, part, logits / number, tokens / number)
            of_matrix = of_matrix or found
            losses.append(loss)
            del part, loss, found
        stacked = self.new(number * self.number)
        mean = self.one()
        del stacked, losses
        saved = (of_x,) if of_matrix is None else (of_x, of_matrix)

        def back(_: Storage, *found: Storage) -> tuple[Storage, ...]:
            return tuple(self.new(each.size) for each in found)

        return self.graph.op(mean, back, x, *([table] if of_matrix else []), saved=saved)

    def _of_chunk(
        self, table: Weight, x: Tensor, logits: float, tokens: float
    ) -> tuple[Storage, Storage | None]:
        """Its share of the loss, and the gradient of the matrix."""
        before = self.graph.taken()
        matrix = table.alone()
        loss = self.share(self.mean(self.linears.layer({"table": matrix}, "table", x, logits), tokens))
        nodes, self.graph.nodes = self.graph.taken(), before
        grad = self.one()
        nodes[-1].take(grad, 0)
        self.graph.backward(nodes)
        return loss.storage, matrix.grad

    def _whole(self, logits: Tensor) -> Tensor:
        """Cross entropy: its softmax, and the gradients of both halves."""
        size = logits.size
        scores = self.new(size)

        def back(*_: Storage) -> tuple[Storage]:
            return (self.new(size),)

        found = self.graph.op(scores, back, logits, saved=(scores,))
        mean, weight = self.one(), self.one()
        return self.graph.op(mean, back, found, saved=(scores, weight))

    def _split(self, logits: Tensor, tokens: float) -> Tensor:
        """Masked targets, three numbers of each token summed over tp."""
        one, wide, flag, place = self.number, self.number * tokens, tokens, 8.0 * tokens
        softmax, play = logits.size, self.play
        elsewhere = [3.0 * flag, -2.0 * flag, 2.0 * place, -place, 8.0, -8.0]
        play(wide, wide, -wide, softmax, softmax, wide, -softmax, wide, -wide, wide, softmax)
        play(-softmax, -3.0 * wide, flag, place, -flag, *elsewhere, wide, one, -one, -flag, wide, wide)
        play(flag, wide, -flag, -wide, flag, 8.0, -flag, one, -8.0, 2.0 * one, -one)
        play(-3.0 * wide, -2.0 * place)

        def back(*_: Storage) -> tuple[Storage]:
            play(one, flag, place, -flag, softmax, *elsewhere, wide, wide, -wide, place, flag, wide, -flag)
            play(-one, softmax, softmax, -softmax, softmax, -softmax, -2.0 * wide, -3.0 * place, -softmax)
            play(-flag)
            return (self._adopted(softmax),)

        saved = self._adopted(softmax), self._adopted(one)
        return self.graph.op(self._adopted(one), back, logits, saved=saved)

    def _adopted(self, size: float) -> Storage:
        """Of bytes that are there already."""
        self.play(-size)
        return self.new(size)
