"""`python -m flashdelta` is the command line too."""

from .cli import main

main()
