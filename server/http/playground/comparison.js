// Texts beside each other: the first one, and another one whose differing tokens are marked.

import { announce, plural } from "./dom.js";
import { differences } from "./generation.js";
import { Pane } from "./pane.js";

/** The glob that only a document's id matches. @param {string} id */
const escaped = (id) => id.replace(/[*?[]/g, "[$&]");

/** Dispatches `run` when a text begins or ends, and `close` when the reader has closed the second text. */
export class Comparison extends EventTarget {
  /** @param {import("./main.js").App} app @param {HTMLElement} element @param {boolean} isChat */
  constructor(app, element, isChat) {
    super();
    this.app = app;
    this.element = element;
    this.isChat = isChat;
    /** @type {Pane[]} */
    this.panes = [];
    element.classList.add("panes");
  }

  get isRunning() {
    return this.panes.some((each) => each.isRunning);
  }

  stop() {
    for (const pane of this.panes) pane.stop();
  }

  clear() {
    for (const pane of this.panes) pane.element.remove();
    this.#set([]);
  }

  /** Adds a text. Only a second one can be closed. */
  add(title, { prompt = "", hasTitle = false } = {}) {
    const leave = () => {
      this.#close(pane);
      this.dispatchEvent(new Event("close"));
    };
    const pane = new Pane(title, { isChat: this.isChat, prompt, hasTitle, onClose: this.panes.length ? leave : null });
    pane.prompt = prompt;
    pane.addEventListener("change", () => this.app.sources.pane === pane && this.app.sources.refresh());
    pane.addEventListener("pin", () => {
      this.app.sources.show(pane);
      this.app.sources.render();
    });
    pane.addEventListener("end", () => this.dispatchEvent(new Event("run")));
    this.element.append(pane.element);
    this.#set([...this.panes, pane]);
    return pane;
  }

  /** Generates a text. @param {Pane} pane @param {any} body */
  run(pane, body) {
    pane.request = body;
    const running = pane.run(body);
    this.dispatchEvent(new Event("run"));
    return running;
  }

  /** Puts another text beside the first one, in place of an earlier one, and marks the tokens that differ. */
  async compare(title, memory, excluded = []) {
    const first = this.panes[0];
    this.panes.slice(1).forEach((each) => this.#close(each));
    const pane = this.add(title, { prompt: first.prompt, hasTitle: true });
    pane.excluded = excluded;
    pane.element.scrollIntoView({ block: "nearest" });
    const body = { ...first.request, seed: first.seed, memory: { ...first.request.memory, ...memory } };
    await Promise.all([first.running, this.run(pane, body)]);
    if (this.panes.includes(pane)) this.showDifference();
  }

  showDifference() {
    const [first, other] = this.panes;
    const [left, right] = differences(first.tokens, other.tokens);
    first.view.mark("is-different", left);
    other.view.mark("is-different", right);
    const count = Math.max(left.size, right.size);
    const text = count ? `${plural(count, "token")} unlike “${first.title}”` : `the same text as “${first.title}”`;
    other.status.textContent += ` · ${text}`;
    announce(`${other.title}: ${text}`);
  }

  /** Goes back to the first text. */
  #close(pane) {
    pane.stop();
    pane.element.remove();
    this.#set(this.panes.filter((each) => each !== pane));
    this.panes[0].view.mark("is-different", new Set());
    if (this.app.sources.pane === pane) this.app.sources.show(this.panes[0]);
  }

  #set(panes) {
    this.panes = panes;
    this.element.classList.toggle("is-comparison", panes.length > 1);
  }
}

/**
 * Does what the side panel asks for with the text that it shows, where that is one of these.
 * @param {import("./main.js").App} app @param {() => Comparison[]} comparisons
 */
export function followSources(app, comparisons) {
  app.sources.addEventListener("without", ({ detail }) => {
    const pane = app.sources.pane;
    const excluded = [...(pane.excluded ?? []), detail];
    const title = `Without ${excluded.map((each) => each.title || each.id).join(" and ")}`;
    const memory = { exclude_documents: excluded.map((each) => escaped(each.id)) };
    comparisons().find((each) => each.panes.includes(pane))?.compare(title, memory, excluded);
  });
  app.sources.addEventListener("forgotten", ({ detail }) => {
    const comparison = comparisons().find((each) => each.panes[0] === app.sources.pane);
    comparison?.compare(`After forgetting ${detail.title || detail.id}`, {});
  });
}
