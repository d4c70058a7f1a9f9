// A text in the making: its tokens, the strip chart, a line of figures, and what went wrong.

import { LostConnection } from "./api.js";
import { hideCard, showCard } from "./card.js";
import { StripChart } from "./chart.js";
import { announce, button, el, figure, percent, plural, showError } from "./dom.js";
import { generate, meanShare, shared } from "./generation.js";
import { sentenceOf } from "./places.js";
import { TokenView } from "./tokens.js";

const REASONS = { stop: "ended by itself", length: "ended by its length" };

/** Dispatches `change` when tokens have come or the text has ended, and `pin` when another token is chosen. */
export class Pane extends EventTarget {
  /**
   * @param {string} title
   * @param {{isChat?: boolean, prompt?: string, hasTitle?: boolean, onClose?: (() => void) | null}} [options]
   */
  constructor(title, { isChat = false, prompt = "", hasTitle = false, onClose = null } = {}) {
    super();
    this.title = title;
    this.isChat = isChat;
    this.isRunning = false;
    this.memory = {};
    this.view = new TokenView(title);
    this.chart = new StripChart();
    this.status = el("p", { class: "status" });
    this.notice = el("div", { class: "notice" });
    const text = el("div", { class: "text" }, prompt ? el("span", { class: "prompt" }, prompt) : null, this.view.element);
    const heading = el("h2", { class: hasTitle ? "pane-title" : "unseen" }, title);
    this.sentence = el("div");
    const close = onClose && button("×", onClose, { class: "quiet", "aria-label": `Close “${title}”` });
    const head = el("div", { class: "pane-head" }, heading, close);
    this.element = el("section", { class: "pane", "aria-label": title }, head, this.sentence, text, this.notice, this.chart.element, this.status);
    for (const source of [this.view, this.chart]) {
      source.addEventListener("show", (event) => this.#point(event.detail));
      source.addEventListener("pin", (event) => this.pin(event.detail));
    }
  }

  get tokens() {
    return this.view.tokens;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  get seed() {
    return this.memory.seed;
  }

  /** The passages that a reply was asked from. */
  get passages() {
    return this.memory.passages ?? [];
  }

  /** Generates, and returns once the text has ended. @param {object} body */
  run(body) {
    this.running = this.#run(body);
    return this.running;
  }

  async #run(body) {
    this.body = body;
    this.usage = {};
    this.isRunning = true;
    this.controller = new AbortController();
    this.element.setAttribute("aria-busy", "true");
    showError(this.notice);
    const startedMs = performance.now();
    let ending = "stopped";
    try {
      for await (const part of generate(this.isChat, body, this.controller.signal)) {
        const { tokens: _, ...figures } = part.memory;
        this.memory = { ...this.memory, ...figures };
        this.view.add(part.tokens);
        if (figures.passages) this.#pointOut(figures.passages);
        if (part.usage) this.usage = part.usage;
        if (part.reason) ending = REASONS[part.reason] ?? part.reason;
        this.#changed();
      }
    } catch (error) {
      ending = this.#failed(error);
    } finally {
      this.isRunning = false;
      this.element.removeAttribute("aria-busy");
      this.#settle(ending, (performance.now() - startedMs) / 1000);
    }
  }

  stop() {
    this.controller?.abort();
  }

  /** @param {number | null} number the chosen token, once more to leave it */
  pin(number) {
    this.view.pin(number === this.view.pinned ? null : number);
    if (number !== null) announce(this.view.describe(number));
    this.dispatchEvent(new Event("pin"));
  }

  /** Marks the tokens that a document contributed to. @param {Set<number>} numbers */
  highlight(numbers) {
    this.view.mark("is-from", numbers);
    this.chart.mark(numbers);
  }

  #point(number) {
    const span = number === null ? undefined : this.view.spans.get(number);
    this.chart.point(number);
    if (span) showCard(this.tokens[number], span, this.passages);
    else hideCard();
  }

  /**
   * Shows the sentence of the best passage: of a mixture, of that with the largest share in the first token, unless the
   * model alone has a larger one.
   */
  #pointOut(passages) {
    const [first] = this.tokens;
    const shares = first && shared([first], passages);
    const best = shares ? shares.find((each) => each.share >= 1 - first.share)?.passage : passages[0];
    this.sentence.replaceChildren(...[best && sentenceOf(best)].filter(Boolean));
  }

  #changed() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.#draw();
      this.dispatchEvent(new Event("change"));
    });
  }

  #draw() {
    const isAlone = this.passages.length > 0 && this.tokens.every((token) => !token.lam);
    this.chart.draw(isAlone ? [] : this.tokens); // behind passages the model answers alone: there is nothing to draw
  }

  #failed(error) {
    if (error.name === "AbortError") return "stopped";
    showError(this.notice, error);
    if (!(error instanceof LostConnection)) return "failed";
    this.notice.append(button(this.isChat ? "Start again" : "Go on", () => this.#goOn()));
    return "broken off";
  }

  /** Goes on where the connection was lost. A chat's reply begins anew with its seed, which gives the same text. */
  #goOn() {
    if (!this.isChat) {
      const left = this.body.max_tokens - this.tokens.length;
      return this.run({ ...this.body, prompt: this.body.prompt + this.text, max_tokens: Math.max(1, left) });
    }
    this.view.clear();
    return this.run(this.seed === undefined ? this.body : { ...this.body, seed: this.seed });
  }

  #settle(ending, seconds) {
    const count = this.tokens.length;
    const origin = this.passages.length ? `from ${plural(this.passages.length, "passage")}` : `${percent(meanShare(this.tokens))} from memory`;
    const parts = [plural(count, "token"), origin, ending];
    if (this.seed !== undefined) parts.push(`seed ${this.seed}`);
    if (count > 1 && seconds > 0) parts.push(`${figure(count / seconds, count / seconds < 10 ? 1 : 0)} tokens/s`);
    const { drafts, steps, completion_tokens: generated, searched_share: share } = this.usage;
    if (share !== undefined) parts.splice(2, 0, `only ${percent(share)} of the entries were searched: a shard is down`);
    if (drafts && steps) parts.push(`${figure(generated / steps, 1)} tokens a step`);
    this.status.textContent = parts.join(" · ");
    announce(`${this.title}: ${parts.slice(0, 3).join(", ")}`);
    this.#draw();
    this.dispatchEvent(new Event("change"));
    this.dispatchEvent(new Event("end"));
  }
}
