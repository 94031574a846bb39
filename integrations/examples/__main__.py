"""``python -m actoffload.integrations.examples NAME [FLAG ...]`` runs an example, and without a name lists them."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from . import __path__ as folders


def main() -> None:
    """Run the example that the command line names.

    Raises:
        SystemExit: no example has this name, or a package that it needs is missing.
    """
    names = [module.name for module in pkgutil.iter_modules(folders) if module.name.endswith("_loop")]
    name = sys.argv[1] if len(sys.argv) > 1 else "nothing"
    if name not in names:
        raise SystemExit(f"{name} is no example; choose one of {', '.join(names)}")
    try:
        example = importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        raise SystemExit(f"{name} needs a package that is missing: pip install {error.name}") from error
    example.main(sys.argv[2:])


if __name__ == "__main__":
    main()
