"""How wrong we are: published measurements against predictions, row by row.

`rows` reads the files, `express` says each run in meshwise's words, `predict` prices it, `errors` sums
up. Rows that cannot be read or said keep their place and their reason.
"""

from meshwise.calibrate.validate.predict import Prediction, Validation, validate

__all__ = ["Prediction", "Validation", "validate"]
