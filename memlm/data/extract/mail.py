"""Mail (EML) -> text: the subject as a heading, sender, recipients and date, and the message."""

from __future__ import annotations

import email
import email.policy
from email.message import EmailMessage

from memlm.data.extract.blocks import Blocks
from memlm.data.extract.encodings import decode
from memlm.data.extract.html import extract_html
from memlm.data.extract.outcome import Extracted, Unreadable

SHOWN = ("From", "To", "Cc", "Date")


def read_mail(data: bytes) -> Extracted:
    """The text of a message, and its subject. Of attachments, the names."""
    message = email.message_from_bytes(data, policy=email.policy.default)
    if "From" not in message and "Subject" not in message:
        raise Unreadable("is no message (it lacks From and Subject)")
    subject, blocks = _header(message, "Subject"), Blocks()
    blocks.heading(subject, 1)
    named = [(name, _header(message, name)) for name in SHOWN]
    attached = (
        [name for part in message.iter_attachments() if (name := part.get_filename())] if message.is_multipart() else []
    )
    named.append(("Attachments", ", ".join(attached)))
    blocks.paragraph("\n".join(f"{name}: {value}" for name, value in named if value))
    body = _body(message)
    if not body.strip() and not subject:
        raise Unreadable("has no text: neither a subject nor a message")
    blocks.markdown(body)
    return Extracted(blocks.text() + "\n", subject)


def _header(message: EmailMessage, name: str) -> str:
    try:
        return " ".join(str(message[name] or "").split())
    except (
        ValueError,
        LookupError,
        AttributeError,
        IndexError,
        TypeError,
    ):  # the parser's own, of headers that are wrong
        return ""


def _body(message: EmailMessage) -> str:
    """The message as plain text, or its page where it has none."""
    plain, page = (message.get_body(preferencelist=(kind,)) for kind in ("plain", "html"))
    if plain is not None and (text := _content(plain)).strip():
        return text
    if page is None:
        return ""
    try:
        return extract_html(_content(page)).text
    except Unreadable:
        return ""


def _content(part: EmailMessage | object) -> str:
    assert isinstance(part, EmailMessage)
    payload = part.get_payload(decode=True)
    raw = payload if isinstance(payload, bytes) else b""
    text = decode(raw, declared=str(part.get_content_charset() or ""))
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
