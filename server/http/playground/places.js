// Passages, and where a person finds them in their documents.

import { el } from "./dom.js";

/** The name of a document. */
export const nameOf = (source) => source.title || source.id || source.document_id;

const PAGES = { pdf: "page", pptx: "slide", xlsx: "sheet" };

/** Where a passage stands in its document, as a person would say it. */
export function whereOf({ first_line, last_line, first_page, last_page, headings, metadata }) {
  const format = metadata?.format;
  if (first_page) return spanOf(PAGES[format] ?? "page", first_page, last_page);
  if (headings?.length) return headings.at(-1);
  return spanOf("line", first_line, last_line);
}

/** The text of a passage, with its sentence marked. Offsets count characters, of which some take two units here. */
export function pointedOut({ text, sentence }) {
  if (!sentence) return [text];
  const letters = [...text];
  const end = sentence.offset + [...sentence.text].length;
  return [letters.slice(0, sentence.offset).join(""), el("strong", {}, sentence.text), letters.slice(end).join("")];
}

/** The sentence that an answer stands on, and where a person finds it; null for an answer without one. */
export function sentenceOf(passage) {
  if (!passage.sentence) return null;
  const { text, line, page } = passage.sentence;
  const place = whereOf({ ...passage, first_line: line, last_line: line, first_page: page, last_page: page });
  return el("blockquote", { class: "sentence" }, el("p", {}, text), el("footer", {}, `${nameOf(passage)}, ${place}`));
}

const spanOf = (word, first, last) => (first === last ? `${word} ${first}` : `${word}s ${first} to ${last}`);
