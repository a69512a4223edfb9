"""``python -m hpc_train`` is the ``hpc-train`` command."""

from hpc_train.cli.app import main

if __name__ == "__main__":
    main()
