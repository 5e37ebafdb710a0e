"""``python -m spkv_nas``: the command line, for ``torchrun -m spkv_nas``."""

from spkv_nas.cli import main

if __name__ == "__main__":
    main()
