"""`python -m weightsync.cli`."""

from weightsync.cli import main

main()
