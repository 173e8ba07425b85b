"""Price a program: ops on a machine, a pipeline stage, the step, its memory, the ledger."""
