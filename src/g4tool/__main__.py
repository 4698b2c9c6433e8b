"""`python -m g4tool` is `g4`."""

from g4tool.cli.main import main

if __name__ == "__main__":
    main()
