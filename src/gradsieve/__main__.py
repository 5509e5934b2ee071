"""The command `gradsieve`, also as `python -m gradsieve`, as torchrun starts it. It needs the laboratory."""

import sys


def main() -> None:
    try:
        from gradsieve_lab import cli
    except ImportError as problem:
        missing = problem.name or "gradsieve_lab"
        sys.exit(f"gradsieve: the command needs {missing}, which is not installed: pip install 'gradsieve[lab]'")
    cli.main()


if __name__ == "__main__":
    main()
