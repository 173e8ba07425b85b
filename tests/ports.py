"""Ports for the jobs of tests: below those the system gives away, and each process of pytest has its own,
so that nobody takes one between its choice and its use.
"""

import itertools
import os

_count = itertools.count()


def own_port() -> int:
    """A port that no other test asks for while this one runs."""
    return 10000 + (16 * os.getpid() + next(_count) % 16) % 10000
