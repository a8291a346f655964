"""`python -m workers.bench` is `ps-worker bench`."""

from workers.bench.cli import main

if __name__ == "__main__":
    main()
