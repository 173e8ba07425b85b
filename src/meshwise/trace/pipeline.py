"""Which schedule a pipeline ran, from the order of the messages between its first two stages.

The first stage sends what the forward of a microbatch leaves, and receives the gradient for its backward:

    gpipe          sends all microbatches of a step, then receives all gradients
    1f1b           sends as many as there are stages, then receives and sends in turns
    interleaved    exchanges with the last stage too, which hands its chunks on to the first

With no more microbatches than stages gpipe and 1f1b send alike. Schedules that split a backward into two send
like those that do not.
"""

from __future__ import annotations

import re
from itertools import groupby

from meshwise.trace.summary import Summary

MESSAGES = ("send_recv", "send", "recv")


def schedule_words(summary: Summary, num_stages: int, num_forwards: int) -> str:
    """The schedule in the words of a plan; none where the messages do not tell.

    Args:
        num_forwards: Microbatches of all steps together.
    """
    sent = [
        (tuple(map(int, re.findall(r"\d+", one.group))), one)
        for one in summary.collectives
        if one.name in MESSAGES and "->" in one.group
    ]
    if not sent:
        return ""
    (first, second), _ = min(sent, key=lambda pair: pair[1].enter_s.get(pair[0][0], pair[1].start_s))
    peers = {rank for ends, _ in sent if first in ends for rank in ends} - {first}
    forwards = [one.enter_s[first] for ends, one in sent if ends == (first, second) and first in one.enter_s]
    backwards = [
        one.enter_s[first] + one.wait_s[first] + one.wire_s
        for ends, one in sent
        if ends == (second, first) and first in one.enter_s
    ]
    if num_stages > 2 and len(peers) == 2:
        return f"vpp={max(2, round(len(forwards) / num_forwards))}"
    order = sorted([(at, "forward") for at in forwards] + [(at, "backward") for at in backwards])
    runs = [len(list(run)) for _, run in groupby(kind for _, kind in order)]
    if not backwards or max(runs) == 1:
        return ""
    if min(runs) == 1:
        return "schedule=1f1b"
    return "schedule=gpipe" if set(runs) == {runs[0]} and runs[0] > num_stages else ""
