"""An inference server: requests over passes of a model."""
