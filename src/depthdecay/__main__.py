"""`python -m depthdecay`: the command line without the installed script."""

from depthdecay.cli import main

main()
