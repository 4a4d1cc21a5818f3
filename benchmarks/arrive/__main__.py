"""`python -m benchmarks.arrive`."""

from benchmarks.arrive.report import main

if __name__ == "__main__":
    main()
