"""`python -m espresso_mpi` is the command `espresso-mpi`."""

from espresso_mpi.cli.program import main

if __name__ == "__main__":
    main()
