"""What the server of forked ranks imports, once: a rank is its fork, with torch and the programs in place."""

import atexit
import gc
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any


@atexit.register
def _remove_listener() -> None:
    """The launcher removes the file where it asks for ranks, unless it is killed: then its server does."""
    server: Any = forkserver._forkserver
    if server._forkserver_address is not None:
        address = Path(server._forkserver_address)
        with suppress(OSError):
            address.unlink(missing_ok=True)
            address.parent.rmdir()


gc.disable()  # nothing of this is garbage, and the search for it takes a fifth of the time

import meshwise.runtime.programs.train_reference  # noqa: E402
import meshwise.runtime.programs.training  # noqa: E402
import meshwise.runtime.run  # noqa: E402
import meshwise.runtime.start  # noqa: E402, F401
from meshwise.runtime.torch_caches import freeze  # noqa: E402

freeze()
gc.enable()
