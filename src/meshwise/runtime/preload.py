"""What the server of forked ranks imports, once: a rank is its fork, with torch and the programs in place."""

import meshwise.runtime.programs.train_reference
import meshwise.runtime.programs.training
import meshwise.runtime.run
import meshwise.runtime.start  # noqa: F401
from meshwise.runtime.torch_caches import freeze

freeze()
