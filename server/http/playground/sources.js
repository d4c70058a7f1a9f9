// The side panel: the documents behind a text, and the passages behind a pinned token.

import { forget } from "./api.js";
import { visible } from "./card.js";
import { announce, button, confirmed, el, percent, plural, showError } from "./dom.js";
import { agreeing, documentsOf, keyOf, meanShare } from "./generation.js";

const OPEN_PASSAGES = 2; // of a document; more are folded
const CONTEXT_TOKENS = 12; // of a snippet, before its token

const nameOf = (source) => source.title || source.id || source.document_id;

/** What a reader has decided about documents, for all texts. */
const forgotten = new Set();

/** Dispatches `without` and `forgotten`, with the document. */
export class SourcesPanel extends EventTarget {
  /** @param {HTMLElement} element @param {{canExclude: boolean}} abilities */
  constructor(element, abilities) {
    super();
    this.element = element;
    this.abilities = abilities;
    this.pane = null;
    this.selected = null;
    this.notice = el("div", {});
  }

  /** Follows a text from now on. @param {import("./pane.js").Pane | null} pane */
  show(pane) {
    if (pane === this.pane) return;
    this.pane?.highlight(new Set());
    this.pane = pane;
    this.selected = null;
    showError(this.notice);
    this.render();
  }

  /** Draws the panel anew, unless something in it has the focus. */
  refresh() {
    if (!this.element.contains(document.activeElement)) this.render();
  }

  render() {
    const parts = [el("h2", {}, "Sources"), this.notice];
    const passages = this.pane?.passages ?? [];
    if (passages.length) parts.push(this.#passages(passages));
    if (!this.pane?.tokens.length && !passages.length) {
      parts.push(el("p", { class: "hint" }, "The documents behind the text appear here. Select a token to see its passages."));
    } else if (this.pane.tokens.length) {
      const documents = documentsOf(this.pane.tokens);
      if (this.pane.view.pinned !== null) parts.push(this.#pinned(this.pane.view.pinned));
      if (documents.length || !passages.length) parts.push(this.#documents(documents));
      this.pane.highlight(documents.find((each) => each.key === this.selected)?.tokens ?? new Set());
    }
    this.element.replaceChildren(...parts);
  }

  #pinned(number) {
    const token = this.pane.tokens[number];
    const groups = Map.groupBy(agreeing(token), keyOf);
    const weight = (neighbors) => neighbors.reduce((sum, each) => sum + each.weight, 0);
    const total = weight(token.neighbors) || 1;
    const sorted = [...groups.values()].sort((one, other) => weight(other) - weight(one));
    const section = el(
      "section",
      { class: "pinned", "aria-label": "Pinned token" },
      el("div", { class: "pinned-head" }, el("h3", {}, el("code", {}, visible(token.text))), el("span", {}, `${percent(token.share)} from memory`), button("×", () => this.#unpin(number), { class: "quiet", "aria-label": "Unpin" })),
      ...sorted.map((neighbors) => this.#card(neighbors, weight(neighbors) / total)),
    );
    if (!sorted.length) section.append(el("p", { class: "hint" }, "No retrieved passage goes on with this token: it is the model's."));
    const others = token.neighbors.filter((each) => each.token_id !== token.id);
    if (others.length) section.append(otherTokens(others, total));
    return section;
  }

  #unpin(number) {
    this.pane.pin(number);
    this.pane.view.focus(number);
  }

  #card(neighbors, share) {
    const first = neighbors[0];
    const passages = folded(neighbors).map(passage);
    const more = passages.splice(OPEN_PASSAGES);
    return el(
      "article",
      { class: "source" },
      el("h4", {}, this.#toggle(first, keyOf(first)), el("span", { class: "figure" }, percent(share))),
      ...passages,
      more.length ? el("details", {}, el("summary", {}, plural(more.length, "more passage")), ...more) : null,
    );
  }

  /** A button with a document's name, which marks its tokens. */
  #toggle(source, key) {
    const label = el("span", { class: forgotten.has(key) ? "forgotten" : "name" }, nameOf(source));
    const toggle = button("", () => this.#select(key), { class: "document", "aria-pressed": `${this.selected === key}`, data: { key } });
    toggle.append(label);
    return toggle;
  }

  #select(key) {
    this.selected = this.selected === key ? null : key;
    this.render();
    const again = [...this.element.querySelectorAll(".documents .document")].find((each) => each.dataset.key === key);
    again?.focus();
    const chosen = documentsOf(this.pane.tokens).find((each) => each.key === this.selected);
    if (chosen) announce(`${nameOf(chosen)} contributed to ${plural(chosen.tokens.size, "token")}`);
  }

  /** The passages of a reply, which stood before the question. */
  #passages(passages) {
    const cards = passages.map((each) => {
      const source = { key: keyOf(each), store: each.store, id: each.document_id, title: each.title };
      const heading = el("h4", {}, el("span", { class: forgotten.has(source.key) ? "forgotten" : "name" }, nameOf(source)), el("span", { class: "figure" }, whereOf(each)));
      return el("article", { class: "source" }, heading, el("blockquote", {}, el("p", { class: "passage" }, ...pointedOut(each))), this.#actions(source));
    });
    return el("section", { "aria-label": "Passages behind this reply" }, el("h3", {}, "The reply was asked from"), ...cards);
  }

  #documents(documents) {
    const count = this.pane.tokens.length;
    const rows = documents.filter((each) => each.share / count >= 0.005).map((each) => this.#row(each, count));
    rows.push(bar(el("span", { class: "name" }, "the model"), 1 - meanShare(this.pane.tokens), "of-model"));
    return el("section", { "aria-label": "Documents of this text" }, el("h3", {}, "Documents of this text"), el("ul", { class: "documents" }, ...rows));
  }

  #row(source, count) {
    const row = bar(this.#toggle(source, source.key), source.share / count);
    if (this.selected !== source.key) return row;
    const place = [source.id !== nameOf(source) && source.id, source.store, `${plural(source.tokens.size, "token")} marked`].filter(Boolean).join(" · ");
    row.append(el("p", { class: "hint" }, place));
    row.append(this.#actions(source));
    return row;
  }

  #actions(source) {
    if (forgotten.has(source.key)) return el("p", { class: "hint" }, "Forgotten.");
    return el("p", { class: "actions" }, this.#without(source), button("Forget…", () => this.#forget(source), { class: "danger" }));
  }

  #without(source) {
    if (!this.abilities.canExclude) return null;
    return button("Without this document", () => this.dispatchEvent(new CustomEvent("without", { detail: source })));
  }

  async #forget(source) {
    const question = `Delete “${nameOf(source)}” from the datastore “${source.store}” for good? Nothing will be generated from it again.`;
    if (!(await confirmed(question, "Delete it"))) return;
    try {
      await forget(source.store, source.id);
    } catch (error) {
      showError(this.notice, error);
      return;
    }
    forgotten.add(source.key);
    this.render();
    announce(`${nameOf(source)} was deleted`);
    this.dispatchEvent(new CustomEvent("forgotten", { detail: source }));
  }
}

/** A row with a bar as long as a share. */
function bar(label, share, name = "") {
  const row = el("li", { class: name }, el("div", { class: "row" }, label, el("span", { class: "figure" }, percent(share))), el("span", { class: "meter" }));
  row.style.setProperty("--share", share.toFixed(3));
  return row;
}

const PAGES = { pdf: "page", pptx: "slide", xlsx: "sheet" };

/** Where a passage stands in its document, as a person would say it. */
function whereOf({ first_line, last_line, first_page, last_page, headings, metadata }) {
  const format = metadata?.format;
  if (first_page) return spanOf(PAGES[format] ?? "page", first_page, last_page);
  if (headings?.length) return headings.at(-1);
  return spanOf("line", first_line, last_line);
}

/** The text of a passage, with its sentence marked. Offsets count characters, of which some take two units here. */
function pointedOut({ text, sentence }) {
  if (!sentence) return [text];
  const letters = [...text];
  const end = sentence.offset + [...sentence.text].length;
  return [letters.slice(0, sentence.offset).join(""), el("strong", {}, sentence.text), letters.slice(end).join("")];
}

/** The sentence that an answer stands on, and where a person finds it; null for an answer without one. */
export function sentenceOf([passage]) {
  if (!passage?.sentence) return null;
  const { text, line, page } = passage.sentence;
  const place = whereOf({ ...passage, first_line: line, last_line: line, first_page: page, last_page: page });
  return el("blockquote", { class: "sentence" }, el("p", {}, text), el("footer", {}, `${nameOf(passage)}, ${place}`));
}

const spanOf = (word, first, last) => (first === last ? `${word} ${first}` : `${word}s ${first} to ${last}`);

/** Neighbors with the same passage as one. */
function folded(neighbors) {
  const passages = new Map();
  for (const neighbor of neighbors) {
    const key = neighbor.snippet.replace(/\s+/g, " ").trim();
    if (passages.has(key)) passages.get(key).lines.push(neighbor.line);
    else passages.set(key, { neighbor, lines: [neighbor.line] });
  }
  return [...passages.values()];
}

function passage({ neighbor, lines }) {
  const { snippet, token_text: text } = neighbor;
  const begin = placeOf(neighbor);
  const place = lines.length > 1 ? `lines ${lines.join(", ")} · ${lines.length} times` : `line ${lines[0]}`;
  const marked = begin < 0 ? [snippet] : [snippet.slice(0, begin), el("strong", {}, text), snippet.slice(begin + text.length)];
  return el("blockquote", {}, el("p", {}, "… ", ...marked, " …"), el("footer", {}, place));
}

/** Where the token stands in its snippet: of the places with its text, the nearest to where it has to be. */
function placeOf({ snippet, token_text: text, token_offset: offset }) {
  const before = Math.min(CONTEXT_TOKENS, offset);
  const expected = (snippet.length * before) / (before + CONTEXT_TOKENS);
  let best = -1;
  for (let at = snippet.indexOf(text); at >= 0; at = snippet.indexOf(text, at + 1)) {
    if (best < 0 || Math.abs(at - expected) < Math.abs(best - expected)) best = at;
  }
  return best;
}

function otherTokens(neighbors, total) {
  const weights = new Map();
  for (const { token_text: text, weight } of neighbors) weights.set(text, (weights.get(text) ?? 0) + weight / total);
  const items = [...weights].sort((one, other) => other[1] - one[1]);
  return el(
    "details",
    {},
    el("summary", {}, `${plural(neighbors.length, "passage")} with other tokens`),
    el("ul", { class: "others" }, ...items.map(([text, share]) => el("li", {}, el("code", {}, visible(text)), el("span", {}, percent(share))))),
  );
}
