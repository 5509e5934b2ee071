"""The command `gradsieve`, also as `python -m gradsieve`, as torchrun starts it.

`gradsieve doctor` belongs to the library; all other commands need the laboratory.
"""

import sys


def main() -> None:
    if sys.argv[1:2] == ["doctor"]:
        from gradsieve import doctor

        sys.exit(doctor.main(sys.argv[2:]))
    try:
        from gradsieve_lab import cli
    except ModuleNotFoundError as problem:
        if (problem.name or "").startswith("gradsieve"):
            raise  # a mistake of our own
        sys.exit(
            f"gradsieve: the command needs {problem.name}, which is not installed: pip install 'gradsieve[lab]'"
        )
    cli.main()


if __name__ == "__main__":
    main()
