"""What the server of forked ranks imports, once: a rank is its fork, with torch and the programs in place."""

import gc

gc.disable()  # nothing of this is garbage, and the search for it takes a fifth of the time

import meshwise.runtime.programs.train_reference  # noqa: E402
import meshwise.runtime.programs.training  # noqa: E402
import meshwise.runtime.run  # noqa: E402
import meshwise.runtime.start  # noqa: E402, F401
from meshwise.runtime.torch_caches import freeze  # noqa: E402

freeze()
gc.enable()
