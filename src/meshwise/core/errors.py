"""What can go wrong, one class per exit code of the command line.

The core trusts its input: everything a user hands in is checked once, where it enters, and a
problem is one sentence that says what is wrong, where, and what to do about it.
"""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about an unknown name: the nearest ones, or else `otherwise`, or all names."""
    known, name = list(known), name.strip().lower()[:40]
    longer = [one for one in known if name and one.startswith(name)]
    close = [*longer, *(one for one in get_close_matches(name, known, n=3) if one not in longer)][:3]
    return f"did you mean {' or '.join(close)}?" if close else otherwise or f"known are {', '.join(known)}"


class MeshwiseError(Exception):
    """Something the user can act on; the command line prints it without a traceback."""

    exit_code = 2


class ModelError(MeshwiseError):
    """A model that cannot be found or read, or whose numbers contradict each other."""


class ClusterError(MeshwiseError):
    """A chip or cluster that cannot be found or read, or whose numbers make no sense."""


class PlanError(MeshwiseError):
    """A parallel plan that is malformed, or that does not fit the model or the cluster."""


class WorkloadError(MeshwiseError):
    """A batch, sequence or microbatch that makes no sense or does not divide."""


class DataError(MeshwiseError):
    """A file of measurements, traces or results that cannot be read as what it should be."""


class MissingExtraError(MeshwiseError):
    """An optional package or a device that this call needs and this machine lacks."""

    exit_code = 3
