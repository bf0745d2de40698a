"""`python -m weightsync`: the command, where no `weightsync` is on the path."""

from weightsync.cli import main

main()
