"""Files that are made from the documents of a segment, and can be made anew: words, passages, vectors, suffixes."""
