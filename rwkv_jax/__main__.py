"""`python -m rwkv_jax`, the commands of the package."""

import sys

from rwkv_jax._commands import main

if __name__ == "__main__":
    sys.exit(main())
