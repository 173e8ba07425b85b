"""meshwise: what a distributed transformer costs before it runs, and where prediction and run differ."""

__version__ = "0.1.0"
