"""`python -m decodescope` and the `decodescope` command."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from decodescope.cli.main import main as run

    sys.exit(run())


if __name__ == "__main__":
    main()
