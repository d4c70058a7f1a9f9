"""Bytes of a file that people have (HTML, PDF, Office, EPUB, notebooks, mail) -> its text, like Markdown.

A heading is a line of one to six `#`, a space and its text. List items begin with `- `, rows of tables with `| `, code
stands between lines of three backticks, an empty line separates paragraphs, and a form feed separates pages, slides
and sheets. Readers run in children with limits of time and memory (`pool`).
"""
