"""`python -m hubring.workers.bench` is `ps-worker bench`."""

from hubring.workers.bench.cli import main

if __name__ == "__main__":
    main()
