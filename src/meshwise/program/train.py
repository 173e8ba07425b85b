"""A training step on torch's own parts in closed form: matmuls, attention, collectives, states, activations.

The ops are those of the layout that `estimate` prices (`layout.block`, `layout.vocabulary`), as often as a
rank runs them; `layout.train_rows` says how torch's parts do them differently, `layout.train_weights` what
FSDP2 moves, `layout.train_kept` what is kept for the backward. Element-wise kernels are not stated; a dry
run counts them.
"""

from __future__ import annotations

from meshwise.program.tape import Tape
from meshwise.program.train_kept import write_kept
from meshwise.program.train_rows import write_handovers, write_ops
from meshwise.program.train_weights import write_states, write_weights
from meshwise.program.training import Training, piece_ops


def write_train(t: Training, tape: Tape) -> None:
    """All steps, then what is held and kept."""
    for stage, piece in t.pieces.items():
        for count, ops in piece_ops(t, piece):
            write_ops(t, ops, tape, count=count * t.steps * t.microbatches)
        write_handovers(t, stage, tape)
    write_weights(t, tape)
    write_states(t, tape)
    write_kept(t, tape)
