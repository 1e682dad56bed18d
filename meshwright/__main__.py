"""`python -m meshwright`, for where the console script is not on PATH."""

from meshwright.cli import main

main()
