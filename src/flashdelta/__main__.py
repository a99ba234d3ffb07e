"""`python -m flashdelta` is the command line too."""

from .tools.cli import main

main()
