"""What the server of forked ranks imports, once: a rank is its fork, with torch and the programs in place."""

import atexit
import gc
import os
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any


@atexit.register
def _leave() -> None:
    """The launcher removes the file where it asks for ranks, unless it is killed: then its server does.

    This is the last of the server's exit handlers, as the first that was registered. It leaves before the
    interpreter is taken down, at which Triton 3.8 lists thirty lines of what it holds on to.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_address is not None:
        address = Path(server._forkserver_address)
        with suppress(OSError):
            address.unlink(missing_ok=True)
            address.parent.rmdir()
    os._exit(0)


gc.disable()  # nothing of this is garbage, and the search for it takes a fifth of the time

import meshwise.runtime.programs.training  # noqa: E402
import meshwise.runtime.start  # noqa: E402, F401

gc.collect()
gc.freeze()  # all this lasts as long as a rank, and forks share its memory
gc.enable()
