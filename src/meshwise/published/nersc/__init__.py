"""NERSC's models of a transformer's training step: their notebook of 2024-02, and their paper of 2024-10.

`notebook` and `paper_plan` are the conventions; `cases` holds a file of the paper's results against ours.
"""

from meshwise.published.nersc.cases import TOLERANCE, CaseCheck, check_cases

__all__ = ["TOLERANCE", "CaseCheck", "check_cases"]
