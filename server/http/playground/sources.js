// The side panel: the documents behind a text, and the passages behind a pinned token.

import { forget } from "./api.js";
import { visible } from "./card.js";
import { announce, button, confirmed, el, percent, plural, showError } from "./dom.js";
import { agreeing, documentsOf, keyOf, meanShare, shared } from "./generation.js";
import { nameOf, pointedOut, whereOf } from "./places.js";
import { originOf } from "./tokens.js";

const OPEN_PASSAGES = 2; // of a document; more are folded
const CONTEXT_TOKENS = 12; // of a snippet, before its token

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
    if (this.pane && this.pane.view.pinned !== null) parts.push(this.#pinned(this.pane.view.pinned));
    if (passages.length) parts.push(this.#passages(passages));
    if (!this.pane?.tokens.length && !passages.length) {
      parts.push(el("p", { class: "hint" }, "The documents behind the text appear here. Select a token to see its passages."));
    } else if (this.pane.tokens.length) {
      const documents = documentsOf(this.pane.tokens);
      if (documents.length || !passages.length) parts.push(this.#documents(documents));
      this.pane.highlight(documents.find((each) => each.key === this.selected)?.tokens ?? new Set());
    }
    this.element.replaceChildren(...parts);
  }

  #pinned(number) {
    const token = this.pane.tokens[number];
    const head = el("div", { class: "pinned-head" }, el("h3", {}, el("code", {}, visible(token.text))), el("span", {}, originOf(token)), button("×", () => this.#unpin(number), { class: "quiet", "aria-label": "Unpin" }));
    const shares = shared([token], this.pane.passages);
    return el("section", { class: "pinned", "aria-label": "Pinned token" }, head, ...(shares ? [sharesOf(token, shares)] : this.#neighborsOf(token)));
  }

  #neighborsOf(token) {
    const groups = Map.groupBy(agreeing(token), keyOf);
    const weight = (neighbors) => neighbors.reduce((sum, each) => sum + each.weight, 0);
    const total = weight(token.neighbors) || 1;
    const sorted = [...groups.values()].sort((one, other) => weight(other) - weight(one));
    const parts = sorted.map((neighbors) => this.#card(neighbors, weight(neighbors) / total));
    if (!sorted.length) parts.push(el("p", { class: "hint" }, "No retrieved passage goes on with this token: it is the model's."));
    const others = token.neighbors.filter((each) => each.token_id !== token.id);
    if (others.length) parts.push(otherTokens(others, total));
    return parts;
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

  /** The passages of a reply, which stood before the question. Of a mixture, with their shares in the reply. */
  #passages(passages) {
    const shares = shared(this.pane.tokens, passages);
    const cards = (shares ?? passages.map((passage) => ({ passage }))).map(({ passage: each, share }) => {
      const source = { key: keyOf(each), store: each.store, id: each.document_id, title: each.title };
      const heading = el("h4", {}, el("span", { class: forgotten.has(source.key) ? "forgotten" : "name" }, nameOf(source)), el("span", { class: "figure" }, [whereOf(each), share !== undefined && percent(share)].filter(Boolean).join(" · ")));
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

/** The shares of passages in a token, and that of the model alone. */
function sharesOf(token, shares) {
  const rows = shares.map(({ passage, share }) => bar(el("span", { class: "name" }, `${nameOf(passage)}, ${whereOf(passage)}`), share));
  return el("ul", { class: "documents" }, ...rows, bar(el("span", { class: "name" }, "the model alone"), 1 - token.share, "of-model"));
}

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
