"""`python -m meshwise`: the command line."""

from meshwise.cli import main

main()
