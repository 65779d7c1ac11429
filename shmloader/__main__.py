"""`python -m shmloader` is the console script."""

from shmloader.cli.app import main

if __name__ == "__main__":  # a spawned worker imports this module anew under another name
    main()
