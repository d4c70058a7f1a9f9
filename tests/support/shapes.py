"""The type checker of `make test-shapes`: beartype, for which an int is also a float (PEP 484)."""

from beartype import BeartypeConf, beartype

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
