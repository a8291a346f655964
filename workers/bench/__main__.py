"""`python -m hubring.workers.bench` runs `ps-worker bench`."""

from hubring.workers.bench.cli import main

if __name__ == "__main__":
    main()
