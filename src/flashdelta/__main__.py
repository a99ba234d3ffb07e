"""`python -m flashdelta` is the command line too."""

from flashdelta_command import main

main()
