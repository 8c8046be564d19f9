"""`python -m depthdecay`: the command line without its script."""

from depthdecay.cli import main

main()
