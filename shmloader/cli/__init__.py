"""Commands for people's eyes. Only the console script imports this room; it needs the extras `cli` or `demo`."""
