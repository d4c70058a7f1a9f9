// The panel that shows a document, with a place in it marked.

import { call, pathOf } from "./api.js";
import { button, byId, el, showError } from "./dom.js";
import { linkOf, nameOf } from "./places.js";

const BEFORE = 1024; // tokens in front of the place that was asked for
const PART = 4096; // tokens that are read at a time

/** The part of a document that is shown. @type {any} */
let shown = null;

export function setUpReader() {
  byId("reader-close").addEventListener("click", () => byId("reader").close());
  byId("reader-earlier").addEventListener("click", () => extend(Math.max(0, shown.begin - PART), shown.begin));
  byId("reader-later").addEventListener("click", () => extend(shown.end, shown.end + PART));
  byId("reader").addEventListener("close", () => (shown = null));
}

const read = (source, begin, end) =>
  call("GET", pathOf(source.store, `/documents/${encodeURIComponent(source.document_id)}?token_offset=${begin}&num_tokens=${end - begin}`));

/**
 * Opens a document at a place: the text that stands nearest to a line of it, else that line.
 * @param {{store: string, document_id: string, title?: string, token_offset?: number}} source
 * @param {{text?: string, line?: number}} place
 */
export async function openDocument(source, { text = "", line = 0 } = {}) {
  const own = (shown = { source, text: "", wanted: { text: text.trim(), line } });
  byId("reader-title").textContent = nameOf(source);
  byId("reader-place").textContent = "reading…";
  byId("reader-text").replaceChildren();
  for (const name of ["link", "earlier", "later"]) byId(`reader-${name}`).hidden = true;
  showError(byId("reader-notice"));
  if (!byId("reader").open) byId("reader").showModal();
  const begin = Math.max(0, (source.token_offset ?? 0) - BEFORE);
  try {
    take(own, await read(source, begin, begin + PART));
  } catch (error) {
    fail(own, error);
  }
}

/**
 * A button that opens a document at a place.
 * @param {any} source a passage or a neighbor @param {string} label @param {{text?: string, line?: number}} place
 */
export const opener = (source, label, place) => button(label, () => openDocument(source, place), { class: "place", title: "Read it in its document" });

/** Reads more of the document, in front or behind, and leaves what is seen in its place. */
async function extend(begin, end) {
  const own = shown;
  const text = byId("reader-body");
  const fromEnd = text.scrollHeight - text.scrollTop;
  const isBefore = begin < own.begin;
  try {
    take(own, await read(own.source, begin, end), true);
    if (shown === own && isBefore) text.scrollTop = text.scrollHeight - fromEnd;
  } catch (error) {
    fail(own, error);
  }
}

function fail(own, error) {
  if (shown !== own) return; // closed, or another document was opened
  byId("reader-place").textContent = "";
  showError(byId("reader-notice"), error);
}

function take(own, part, isMore = false) {
  if (shown !== own) return;
  const end = part.token_offset + part.num_tokens;
  if (!isMore || part.token_offset < own.begin) {
    own.text = part.text + own.text;
    [own.begin, own.firstLine] = [part.token_offset, part.first_line];
  } else {
    own.text += part.text;
  }
  own.end = Math.max(own.end ?? 0, end);
  draw(own, part);
  if (isMore) return;
  const marks = [...byId("reader-text").querySelectorAll("mark")];
  const best = marks.find((each) => each.parentNode.dataset.line === `${own.wanted.line}`) ?? marks[0];
  best?.scrollIntoView({ block: "center" });
}

function draw(own, { document_id, metadata, store, total_tokens: total }) {
  const [begin, end] = placeOf(own);
  const isConverted = Boolean(metadata.format); // whose lines no reader sees elsewhere
  byId("reader-text").classList.toggle("is-converted", isConverted);
  byId("reader-text").replaceChildren(...rowsOf(own, begin, end));
  const lineAt = (place) => own.firstLine + own.text.slice(0, place).split("\n").length - 1;
  const [first, last] = [lineAt(begin), lineAt(end)];
  const marked = end > begin && !isConverted ? `${first === last ? `line ${first} is` : `lines ${first} to ${last} are`} marked` : null;
  byId("reader-place").textContent = [document_id, `in ${store}`, marked].filter(Boolean).join(" · ");
  byId("reader-earlier").hidden = own.begin === 0;
  byId("reader-later").hidden = own.end >= total;
  const link = linkOf(metadata);
  byId("reader-link").hidden = !link;
  if (link) byId("reader-link").href = link;
}

/** The characters to mark: the wanted text, of its places the nearest to its line, else that line. */
function placeOf({ text, firstLine, wanted }) {
  const lineAt = (place) => firstLine + text.slice(0, place).split("\n").length - 1;
  let best = -1;
  for (let at = wanted.text ? text.indexOf(wanted.text) : -1; at >= 0; at = text.indexOf(wanted.text, at + 1)) {
    if (best < 0 || Math.abs(lineAt(at) - wanted.line) < Math.abs(lineAt(best) - wanted.line)) best = at;
  }
  if (best >= 0) return [best, best + wanted.text.length];
  const lines = text.split("\n");
  const number = wanted.line - firstLine;
  if (!wanted.line || number < 0 || number >= lines.length) return [0, 0];
  const begin = lines.slice(0, number).join("\n").length + (number ? 1 : 0);
  return [begin, begin + lines[number].length];
}

/** The lines, each with its number. */
function rowsOf({ text, firstLine }, begin, end) {
  let at = 0;
  const lines = text.endsWith("\n") ? text.slice(0, -1).split("\n") : text.split("\n");
  return lines.map((line, number) => {
    const [from, to] = [begin - at, end - at].map((place) => Math.min(Math.max(0, place), line.length));
    at += line.length + 1;
    const parts = to > from ? [line.slice(0, from), el("mark", {}, line.slice(from, to)), line.slice(to)] : [line];
    return el("p", { data: { line: firstLine + number } }, ...parts);
  });
}
