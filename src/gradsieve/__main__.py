"""`python -m gradsieve`, as torchrun starts it."""

from gradsieve.cli import main

main()
