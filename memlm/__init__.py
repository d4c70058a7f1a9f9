"""memlm: a language model whose memory you can read, edit, scale and serve.

    import memlm
    lm = memlm.load("MODEL", stores=["STORE"])
    for token in lm.generate("def main(", max_tokens=64):
        print(token.text, end="")

The public names are listed in `__init__.pyi` and imported when they are first used, so that `import memlm.client` and
`memlm --help` load neither torch nor Faiss.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
if not (_HERE / "index").is_dir():
    # A checkout: index/, server/ and proto/memlm/v1/ are parts of this package that lie beside its folder. An
    # installation has them inside. Without this line, Python in a checkout would find a package that lacks three parts.
    __path__ += [str(_HERE.parent), str(_HERE.parent / "proto/memlm")]

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULE_OF = {
    alias.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'memlm' has no attribute {name!r}")
    return getattr(import_module(str(_MODULE_OF[name])), name)


def __dir__() -> list[str]:
    return sorted(__all__)
