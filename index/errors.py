"""The errors of the datastore, and the root that every memlm error grows from.

    MemlmError
    ├── InvalidInput        an argument, a flag or a text that cannot be used     (also a ValueError)
    ├── NotFound            no such store, document, model or file                (also a LookupError)
    ├── AlreadyExists       something is there already, and is left as it was
    ├── Incompatible        a store of another model, or of another format
    ├── Corrupt             a file that is not what its manifest says
    ├── Locked              another process is writing to the store
    ├── StorageFull         the disk would not take what had to be written
    └── NotWritable         a read-only file system, or a folder that this user may not write to

`memlm.errors` adds the errors of the model and of the service to this tree. Each message is one line: what was
wrong, what was expected, what to try.
"""


class MemlmError(Exception):
    """Anything that memlm reports to its user. Whatever else is raised is a bug of ours."""


class InvalidInput(MemlmError, ValueError):
    """An argument that cannot be used; `field` names it where there is one to name."""

    def __init__(self, message: str, *, field: str = "") -> None:
        """Takes the one-line message and the name of the offending argument."""
        super().__init__(message)
        self.field = field


class NotFound(MemlmError, LookupError):
    """Something named does not exist; `kind` and `name` say what."""

    def __init__(self, message: str, *, kind: str = "", name: str = "") -> None:
        """Takes the one-line message, and what was looked for."""
        super().__init__(message)
        self.kind = kind
        self.name = name


class AlreadyExists(MemlmError):
    """Something is there already, and was left as it was."""


class Incompatible(MemlmError):
    """A store made by another model, another tokenizer, or another version of the format."""


class Corrupt(MemlmError):
    """A file is missing, truncated or changed; the message names it."""


class Locked(MemlmError):
    """Another process is writing to the store."""


class StorageFull(MemlmError):
    """The disk would not take what had to be written; the last committed state stands."""


class NotWritable(MemlmError):
    """The file system is read-only, or this user may not write there; nothing was changed."""
